#include "converters/import.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/save.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/retention/retention.h"
#include "converters/hf_folder.h"
#include "converters/source_stream.h"
#include "runtime/core/random.h"
#include "runtime/json/json.h"
#include "runtime/plan/plan.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxKeptFileBytes = int64_t{256} << 20;  // a tokenizer.json has some 10 MB
constexpr int64_t kSourceThreads = 2;

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
  if (model.mask == Mask::kPrefix) out.objective.kind = ObjectiveConfig::Kind::kPrefix;  // else no recipe may have it
  out.eval.steps = 1;  // the least that a recipe may say; nothing is evaluated by itself
  std::error_code error;
  if (fs::is_regular_file(hf_dir / "tokenizer.model", error)) {
    out.tokenizer = {TokenizerConfig::Kind::kSentencePiece, fs::absolute(hf_dir / "tokenizer.model", error).string()};
  }
  return out;
}

namespace {

/// What every rank of the plan would save, in files of about `file_bytes`; `boxes` gets the box of each shard.
std::vector<ckpt::WriterPart> lay_out(const Plan& plan, int64_t file_bytes, std::vector<SourceBox>* boxes) {
  std::vector<ckpt::WriterPart> out;
  for (int64_t r = 0; r < plan.mesh.world(); ++r) {
    ckpt::WriterPart part;
    int64_t filled = 0;
    for (const StatePiece& piece : plan.rank(r).pieces) {
      if (!piece.primary) continue;
      const int64_t bytes = piece.count_elems() * int64_t{sizeof(float)};
      if (!part.shards.empty() && filled + bytes > file_bytes) {
        out.push_back(std::exchange(part, {}));
        filled = 0;
      }
      filled += bytes;
      part.shards.push_back({.tensor = piece.tensor, .lo = piece.box.lo, .hi = piece.box.hi, .bytes = bytes});
      boxes->push_back({piece.tensor, piece.box});
    }
    if (!part.shards.empty()) out.push_back(std::move(part));
  }
  for (size_t k = 0; k < out.size(); ++k)
    out[k].file_name = ckpt::shard_file_name(static_cast<int64_t>(k), static_cast<int64_t>(out.size()));
  return out;
}

/// All that decides the bytes of the checkpoint's files.
uint64_t key_of(const HfFolder& folder, const ckpt::Manifest& skeleton, std::span<const ckpt::WriterPart> parts,
                std::span<const std::string> contents) {
  std::string text = "import\n" + folder.identity();
  for (const std::string& content : contents) text += ckpt::hash_to_hex(ckpt::hash_bytes(content)) + "\n";
  for (const ckpt::WriterPart& part : parts) {
    text += part.file_name + "\n";
    for (const ckpt::ShardData& shard : part.shards) {
      const ckpt::TensorEntry& tensor = skeleton.tensors[static_cast<size_t>(shard.tensor)];
      text += fmt::format("{} {} {}\n", tensor.kind, tensor.name, to_string(Box{shard.lo, shard.hi}));
    }
  }
  return std::max<uint64_t>(1, ckpt::hash_bytes(text));
}

}  // namespace

Result<ImportReport> import_hf(ckpt::IoBackend& io, const fs::path& hf_dir, const fs::path& checkpoints_dir,
                               const ImportOptions& options, const RecipeEncoder& encode) {
  const auto start = std::chrono::steady_clock::now();
  std::error_code ignored;
  if (const fs::path step = checkpoints_dir / ckpt::step_dir_name(0); fs::equivalent(hf_dir, step, ignored)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: the source would be replaced; name another folder", hf_dir.string())};
  }
  if (fs::exists(checkpoints_dir / ckpt::kManifestName, ignored)) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: is a checkpoint; name a folder for step-00000000 to be in",
                                                       checkpoints_dir.string())};
  }
  RT_TRY_SET(const std::unique_ptr<HfFolder> folder,
             HfFolder::open(hf_dir, {.untie = options.untie, .drop_mtp = options.drop_mtp}));
  const fs::path plain = (hf_dir / "").lexically_normal().parent_path();
  const std::string name = options.run_name.empty() ? plain.filename().string() : options.run_name;
  ImportReport report;
  report.recipe = recipe_for_import(folder->model(), options.mesh, name, hf_dir);
  const int64_t world = std::max<int64_t>(1, options.mesh.tp * options.mesh.cp * options.mesh.pp * options.mesh.dp);
  RT_TRY_SET(const Plan plan, make_plan(report.recipe, world));
  RT_CHECK(plan.tensors.size() == folder->tensors().size(), "the plan has {} tensors", plan.tensors.size());

  for (const auto& file : folder->weights().files()) RT_TRY(file->verify());

  std::vector<SourceBox> boxes;
  std::vector<ckpt::WriterPart> parts = lay_out(plan, options.file_bytes, &boxes);
  SourceStream stream(*folder, boxes, {.window_bytes = options.memory_bytes / 4, .threads = kSourceThreads});
  int64_t box = 0, planned_bytes = 0;
  const int64_t total_bytes = plan.parameters * int64_t{sizeof(float)};
  for (ckpt::WriterPart& part : parts) {
    for (ckpt::ShardData& shard : part.shards) {
      shard.fill = [&, box, before = planned_bytes](int64_t offset, std::span<std::byte> out) -> Status {
        RT_TRY(stream.copy(box, offset, out));
        if (options.progress) options.progress(before + offset + static_cast<int64_t>(out.size()), total_bytes);
        return {};
      };
      ++box;
      planned_bytes += shard.bytes;
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
  for (const auto& [name, dtype] : folder->own_dtypes()) imported["dtypes"][name] = dtype_name(dtype);

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
  skeleton.state = json_text(nlohmann::json{{"imported", std::move(imported)}});
  ckpt::SaveOptions save;
  save.fill_bytes = options.memory_bytes / 4;
  save.replace_existing = options.replace;
  save.cancel = options.cancel;
  save.resume_key = key_of(*folder, skeleton, parts, contents);
  save.commit_bytes = int64_t{1} << 30;
  RT_TRY_SET(save.resume_from, ckpt::find_unfinished(io, checkpoints_dir, skeleton.step, save.resume_key,
                                                     ckpt::may_be_alive, &report.cleaned));
  RT_TRY_SET(ckpt::SaveReport saved, ckpt::save_checkpoint(io, checkpoints_dir, std::move(skeleton), parts, save));
  report.dir = saved.dir;
  report.dtype = folder->dtype();
  report.tensors = static_cast<int64_t>(plan.tensors.size());
  report.parameters = plan.parameters;
  report.payload_bytes = saved.payload_bytes;
  report.taken_files = saved.taken_files;
  report.taken_bytes = saved.taken_bytes;
  report.ranks = world;
  report.warnings = folder->warnings();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::convert
