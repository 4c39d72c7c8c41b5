#include "converters/import.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/save_plan.h"
#include "converters/hf_folder.h"
#include "runtime/core/random.h"
#include "runtime/core/unique_handle.h"
#include "runtime/plan/plan.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kInMemoryBytes = int64_t{1} << 30;       // above: file-backed
constexpr int64_t kMaxKeptFileBytes = int64_t{256} << 20;  // a tokenizer.json has some 10 MB

/// Zeroed, page-aligned memory: anonymous, or of an unlinked file in `folder`.
class Scratch {
 public:
  static Result<Scratch> make(const fs::path& folder, int64_t bytes) {
    Scratch out;
    out.bytes_ = std::max<int64_t>(bytes, 1);
    Fd fd;
    if (bytes > kInMemoryBytes) {
      std::string name = (folder / ".tmp-import-XXXXXX").string();
      fd.reset(::mkstemp(name.data()));
      if (!fd) return os_error(errno, name);
      ::unlink(name.c_str());
      // Reserved now: a full disk would otherwise be a SIGBUS later.
      if (const int error = ::posix_fallocate(fd.get(), 0, bytes); error != 0) {
        return os_error(error, fmt::format("{}: room for {} bytes", folder.string(), bytes));
      }
    }
    void* at = ::mmap(nullptr, out.bytes_, PROT_READ | PROT_WRITE, fd ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS,
                      fd ? fd.get() : -1, 0);
    if (at == MAP_FAILED) return os_error(errno, fmt::format("memory for {} bytes of weights", bytes));
    out.data_ = static_cast<std::byte*>(at);
    return out;
  }
  Scratch(Scratch&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  std::byte* data() const { return data_; }

 private:
  Scratch() = default;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// Where a rank's piece of a tensor is put together.
struct Target {
  Box box;
  int64_t offset = 0;  // bytes into the scratch memory
};

std::string clean_name(const std::string& name) {
  std::string out;
  for (const char c : name) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
    out += plain ? c : '-';
  }
  if (out.empty()) return "imported";
  return (out[0] == '-' ? "hf" : "") + out.substr(0, 64);
}

}  // namespace

Recipe recipe_for_import(const ModelConfig& model, const MeshConfig& mesh, const std::string& name,
                         const fs::path& hf_dir) {
  Recipe out;
  out.name = clean_name(name);
  out.seed = 1;
  out.stop = {Span::Unit::kSteps, 1};
  out.model = model;
  out.mesh = mesh;
  out.batch = {.samples = mesh.dp, .micro = 1};
  out.optimizer.peak_lr = 1e-5;  // a usual rate to tune on with
  out.optimizer.clip = 1.0;
  out.eval.steps = 1;  // the least that a recipe may say; nothing is evaluated by itself
  std::error_code error;
  if (fs::is_regular_file(hf_dir / "tokenizer.model", error)) {
    out.tokenizer = {TokenizerConfig::Kind::kSentencePiece, fs::absolute(hf_dir / "tokenizer.model", error).string()};
  }
  return out;
}

Result<ImportReport> import_hf(ckpt::IoBackend& io, const fs::path& hf_dir, const fs::path& checkpoints_dir,
                               const ImportOptions& options, const RecipeEncoder& encode) {
  const auto start = std::chrono::steady_clock::now();
  RT_TRY_SET(const std::unique_ptr<HfFolder> folder, HfFolder::open(hf_dir, {.untie = options.untie}));
  const fs::path plain = (hf_dir / "").lexically_normal().parent_path();
  const std::string name = options.run_name.empty() ? plain.filename().string() : options.run_name;
  ImportReport report;
  report.recipe = recipe_for_import(folder->model(), options.mesh, name, hf_dir);
  const int64_t world = std::max<int64_t>(1, options.mesh.tp * options.mesh.pp * options.mesh.dp);
  RT_TRY_SET(const Plan plan, make_plan(report.recipe, world));
  RT_CHECK(plan.tensors.size() == folder->tensors().size(), "the plan has {} tensors", plan.tensors.size());

  // Where every rank's pieces go.
  std::vector<std::vector<Target>> targets(plan.tensors.size());
  std::vector<ckpt::WriterPart> parts;
  std::vector<int64_t> offsets;  // of all shards of all parts, in order
  int64_t bytes = 0;
  for (int64_t r = 0; r < world; ++r) {
    ckpt::WriterPart part;
    for (const StatePiece& piece : plan.rank(r).pieces) {
      if (!piece.primary) continue;
      const int64_t size = piece.count_elems() * int64_t{sizeof(float)};
      const int64_t align = size >= ckpt::kPagedShardBytes ? ckpt::kPageBytes : ckpt::kPackedAlign;
      bytes = (bytes + align - 1) / align * align;
      targets[piece.tensor].push_back({piece.box, bytes});
      ckpt::ShardData shard{.tensor = piece.tensor, .lo = piece.box.lo, .hi = piece.box.hi, .bytes = size};
      part.shards.push_back(std::move(shard));
      offsets.push_back(bytes);
      bytes += size;
    }
    if (!part.shards.empty()) parts.push_back(std::move(part));
  }
  RT_TRY(ckpt::make_dirs(io, checkpoints_dir));
  RT_TRY_SET(const Scratch scratch, Scratch::make(checkpoints_dir, bytes));
  auto offset = offsets.begin();
  for (ckpt::WriterPart& part : parts) {
    for (ckpt::ShardData& shard : part.shards) shard.data = scratch.data() + *offset++;
  }

  std::vector<float> whole;
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    const Shape& shape = plan.tensors[t].shape;
    whole.resize(cairn::count_elems(shape));
    RT_TRY(folder->read(static_cast<int64_t>(t), whole));
    for (const Target& target : targets[t]) {
      copy_box_out(whole.data(), shape, target.box, reinterpret_cast<float*>(scratch.data() + target.offset));
    }
  }

  const RecipeText recipe = encode(report.recipe);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  ckpt::RunText run{.run_name = report.recipe.name, .recipe_json = recipe.json, .recipe_hash = recipe.hash};
  run.run_id = fmt::format("import-{:016x}", mix64(static_cast<uint64_t>(nanoseconds) ^ mix64(::getpid())));
  ckpt::Manifest skeleton = ckpt::manifest_skeleton(plan, run);
  skeleton.tensors.resize(plan.tensors.size());  // the weights come first; no moments
  skeleton.created_unix_ms = nanoseconds / 1'000'000;
  nlohmann::json imported = {{"model_type", folder->family().model_type},
                             {"dtype", dtype_name(folder->dtype())},
                             {"empty_files", nlohmann::json::array()}};

  std::vector<std::string> contents;
  contents.reserve(folder->kept_files().size());  // shards point into it
  for (const std::string& file : folder->kept_files()) {
    RT_TRY_SET(std::string text, read_text_file(hf_dir / file, kMaxKeptFileBytes));
    ++report.files_kept;
    if (text.empty()) {  // a tensor has at least one element
      imported["empty_files"].push_back(file);
      continue;
    }
    const auto size = static_cast<int64_t>(text.size());
    contents.push_back(std::move(text));
    skeleton.tensors.push_back({file, std::string(kFileKind), DType::kU8, {size}});
    parts[0].shards.push_back({.tensor = static_cast<int64_t>(skeleton.tensors.size()) - 1,
                               .lo = {0},
                               .hi = {size},
                               .data = reinterpret_cast<const std::byte*>(contents.back().data()),
                               .bytes = size});
  }
  skeleton.state = nlohmann::json{{"imported", std::move(imported)}}.dump();
  for (size_t k = 0; k < parts.size(); ++k) {
    parts[k].file_name = ckpt::shard_file_name(static_cast<int64_t>(k), static_cast<int64_t>(parts.size()));
  }
  RT_TRY_SET(ckpt::SaveReport saved, ckpt::save_checkpoint(io, checkpoints_dir, std::move(skeleton), parts,
                                                           {.replace_existing = options.replace}));
  report.dir = saved.dir;
  report.dtype = folder->dtype();
  report.tensors = static_cast<int64_t>(plan.tensors.size());
  report.parameters = plan.parameters;
  report.payload_bytes = saved.payload_bytes;
  report.ranks = world;
  report.warnings = folder->warnings();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::convert
