// Whether the arithmetic of checkpoints holds at the size of real systems, on one core and without communication:
//   ckpt_scale plan                plans what 1,024 ranks save of 1,028 tensors, and validates that it tiles every
//   tensor ckpt_scale open                opens a checkpoint with a manifest of 1,048,576 chunks and more ckpt_scale
//   sparse MODEL DIR    lays out, commits and opens the whole Adam state of MODEL as sparse files below DIR
// MODEL: bloom-176b, mt-nlg-530b, or tiny. Each prints one line of JSON; bench/ckpt_scale.py runs them.
//
// sparse runs the real save: libhdf5 lays out each rank's file, the shard table and the manifest are written, the
// directory is renamed into place. Payload is zeros, so it need not be written: pages of zeros are left as holes, and
// the checksums are those of zeros. What is there afterwards is a checkpoint in every respect, and pieces of it are
// read back with verification.
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "ckpt/format/checksum.h"
#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/checksum_bytes.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/plan/plan.h"

namespace {

using namespace cairn;
using namespace cairn::ckpt;
namespace fs = std::filesystem;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

[[noreturn]] void give_up(const Error& error) {
  fmt::print(stderr, "ckpt_scale: {}\n", error.message);
  std::exit(1);
}

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) give_up(result.error());
  return std::move(result).value();
}

void must(Status status) {
  if (!status.ok()) give_up(status.error());
}

struct Model {
  ModelConfig config;
  MeshConfig mesh;
  int64_t world = 0;
};

Model gpt(int64_t layers, int64_t width, int64_t heads, int64_t vocab, Positions positions, int64_t tp, int64_t pp,
          int64_t dp) {
  Model m;
  m.config = {.layers = layers,
              .width = width,
              .heads = heads,
              .kv_heads = heads,
              .head_dim = width / heads,
              .ffn = 4 * width,
              .context = 2048,
              .vocab = vocab,
              .positions = positions};
  m.mesh = {.tp = tp, .pp = pp, .dp = dp};
  m.world = tp * pp * dp;
  return m;
}

Model model_of(std::string_view name) {
  // BLOOM has no positions among its parameters (ALiBi), which kNone is as far as shapes go; its embedding norm, 2 x
  // 14336 elements, is not in our families. Scao et al. 2022 (arXiv 2211.05100): tp 4, pp 12, dp 8.
  if (name == "bloom-176b") return gpt(70, 14336, 112, 250'880, Positions::kNone, 4, 12, 8);
  // Smith et al. 2022 (arXiv 2201.11990): tp 8, pp 35, and dp 8 at 280 nodes; 529,600,819,200 parameters.
  if (name == "mt-nlg-530b") return gpt(105, 20480, 128, 51'200, Positions::kLearned, 8, 35, 8);
  if (name == "tiny") return gpt(4, 64, 4, 1000, Positions::kLearned, 2, 2, 2);
  give_up(Error{ErrorCode::kInvalidInput, fmt::format("\"{}\": expected bloom-176b, mt-nlg-530b or tiny", name)});
}

Plan plan_of(const Model& model) {
  Recipe recipe;
  recipe.name = "scale";
  recipe.model = model.config;
  recipe.mesh = model.mesh;
  recipe.batch = {.samples = model.world, .micro = 1};
  recipe.optimizer.zero = 1;
  recipe.stop = {Span::Unit::kSteps, 1};
  return must(make_plan(recipe, model.world));
}

// 1,028 tensors over tp 8, pp 16, dp 8, as GPT-3 ran; narrower by `width`, which does not change how many pairs of
// tensor and rank there are while a rank's parameters are one bucket.
Model thousand(int64_t width) { return gpt(64, width, 16, 50'257, Positions::kLearned, 8, 16, 8); }

int plan(int64_t width) {
  const double start = now_s();
  const Plan plan = plan_of(thousand(width));
  const std::vector<SlotLayout> layouts = slot_layouts(plan);
  const Manifest manifest = slot_manifest(plan, layouts, {}, int64_t{4} << 20);
  const double planned = now_s();
  must(validate_manifest(manifest));
  const double done = now_s();
  double one = now_s();
  const SlotLayout mine = slot_layout(plan, 517);
  one = now_s() - one;
  if (payload_bytes(manifest) != plan.checkpoint_bytes)
    give_up(Error{ErrorCode::kInternal, "the plan's bytes are not those of its shards"});
  fmt::print(
      "{{\"tensors\":{},\"ranks\":{},\"shards\":{},\"plan_s\":{:.4f},\"validate_s\":{:.4f},\"one_rank_s\":{:.6f}}}\n",
      plan.tensors.size(), layouts.size(), manifest.shards.size(), planned - start, done - planned,
      mine.shards.empty() ? 0.0 : one);
  return 0;
}

// A checkpoint of which only manifest and table are there: what read_manifest reads.
int open(int64_t width, int64_t chunk_bytes, int64_t rounds, const fs::path& dir) {
  const Plan plan = plan_of(thousand(width));
  const Manifest made = slot_manifest(plan, slot_layouts(plan), {}, chunk_bytes);
  size_t chunks = 0;
  for (const ShardEntry& shard : made.shards) chunks += shard.hashes.size();
  const ManifestFiles files = must(encode_manifest_files(made));
  PosixBackend io;
  const fs::path step = dir / "step-00000000";
  fs::create_directories(step);
  must(write_file(io, step / kTableName, files.table));
  must(write_file(io, step / kManifestName, files.json));
  std::string times;
  for (int64_t round = 0; round < rounds; ++round) {
    const double start = now_s();
    const Manifest opened = must(read_manifest(io, step));
    times += fmt::format("{}{:.4f}", round > 0 ? "," : "", now_s() - start);
    if (opened.shards.size() != made.shards.size()) return 1;
  }
  fs::remove_all(dir);
  fmt::print(
      "{{\"tensors\":{},\"shards\":{},\"chunks\":{},\"manifest_bytes\":{},\"table_bytes\":{},\"open_s\":[{}]}}\n",
      made.tensors.size(), made.shards.size(), chunks, files.json.size(), files.table.size(), times);
  return 0;
}

// Leaves pages of zeros as holes and has room for everything. Nothing here need outlive a power cut, so no fsync.
class SparseFile final : public IoFile {
 public:
  SparseFile(std::unique_ptr<IoFile> file, int64_t& written) : file_(std::move(file)), written_(written) {}

  Result<IoTicket> submit_write(int64_t offset, const std::byte* data, int64_t bytes) override {
    static constexpr std::byte kZeros[kIoAlign] = {};
    const bool known = data >= zeros_begin && data + bytes <= zeros_end;
    for (int64_t at = 0; at < bytes && !known; at += kIoAlign) {
      const int64_t part = std::min(kIoAlign, bytes - at);
      if (std::memcmp(data + at, kZeros, static_cast<size_t>(part)) == 0) continue;
      RT_TRY(file_->write(offset + at, std::span(data + at, static_cast<size_t>(part))));
      written_ += part;
    }
    return IoTicket{0};
  }
  Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override {
    RT_TRY(file_->read(offset, std::span(data, static_cast<size_t>(bytes))));
    return IoTicket{0};
  }
  Status wait(IoTicket) override { return {}; }
  Status finish() override { return {}; }
  Status truncate(int64_t size_bytes) override { return file_->truncate(size_bytes); }
  Result<int64_t> size() override { return file_->size(); }
  Status sync() override { return {}; }
  Status close() override { return file_->close(); }

  static inline const std::byte *zeros_begin = nullptr, *zeros_end = nullptr;  // what need not be looked at

 private:
  std::unique_ptr<IoFile> file_;
  int64_t& written_;
};

class SparseBackend final : public IoBackend {
 public:
  std::string_view name() const override { return "sparse"; }
  Result<std::unique_ptr<IoFile>> create(const fs::path& path, int64_t size_bytes) override {
    RT_TRY_SET(std::unique_ptr<IoFile> file, disk_.create(path, 0));  // no space is reserved
    RT_TRY(file->truncate(size_bytes));
    return std::unique_ptr<IoFile>(new SparseFile(std::move(file), written));
  }
  Result<std::unique_ptr<IoFile>> open(const fs::path& path) override { return disk_.open(path); }
  Status make_dir(const fs::path& path) override { return disk_.make_dir(path); }
  Status rename(const fs::path& from, const fs::path& to) override { return disk_.rename(from, to); }
  Status exchange(const fs::path& a, const fs::path& b) override { return disk_.exchange(a, b); }
  Status sync_dir(const fs::path&) override { return {}; }
  Status remove_file(const fs::path& path) override { return disk_.remove_file(path); }
  Status remove_dir(const fs::path& path) override { return disk_.remove_dir(path); }
  Result<std::vector<DirEntry>> list(const fs::path& path) override { return disk_.list(path); }
  Result<FileStat> stat(const fs::path& path) override { return disk_.stat(path); }
  Result<int64_t> free_bytes(const fs::path&) override { return int64_t{1} << 60; }

  int64_t written = 0;

 private:
  PosixBackend disk_;
};

int sparse(std::string_view name, const fs::path& dir) {
  double at = now_s();
  const Plan plan = plan_of(model_of(name));
  const std::vector<SlotLayout> layouts = slot_layouts(plan);
  const double planned_s = now_s() - at;

  int64_t largest = 0;
  for (const SlotLayout& layout : layouts) {
    for (const SlotShard& shard : layout.shards) largest = std::max(largest, shard.bytes);
  }
  void* const zeros =
      ::mmap(nullptr, static_cast<size_t>(largest), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (zeros == MAP_FAILED) give_up(Error{ErrorCode::kUnavailable, "mmap refused"});
  SparseFile::zeros_begin = static_cast<const std::byte*>(zeros);
  SparseFile::zeros_end = SparseFile::zeros_begin + largest;

  SaveOptions options;
  options.huge_pages = true;                  // as in training: large shards are written from where they are
  std::map<int64_t, uint64_t> hash_of_zeros;  // by length
  const auto hash_zeros = [&](int64_t bytes) {
    const auto [it, fresh] = hash_of_zeros.try_emplace(bytes, 0);
    if (fresh) it->second = hash_bytes(std::span(static_cast<const std::byte*>(zeros), static_cast<size_t>(bytes)));
    return it->second;
  };
  const StateIndex index(plan);
  ChecksumBytes checksum_bytes(options.chunk_bytes);
  std::vector<WriterPart> parts;
  int64_t shards = 0, chunks = 0;
  for (size_t rank = 0; rank < layouts.size(); ++rank) {
    if (layouts[rank].shards.empty()) continue;
    WriterPart part{shard_file_name(static_cast<int64_t>(rank), static_cast<int64_t>(layouts.size())), {}};
    for (const SlotShard& shard : layouts[rank].shards) {
      ShardData data;
      data.tensor = index.at(shard.kind, shard.tensor);
      data.lo = shard.box.lo;
      data.hi = shard.box.hi;
      data.data = static_cast<const std::byte*>(zeros);
      data.bytes = shard.bytes;
      checksum_bytes.count(data.lo, data.hi, shard.bytes / shard.box.count_elems());
      ++shards;
      part.shards.push_back(std::move(data));
    }
    parts.push_back(std::move(part));
  }
  for (WriterPart& part : parts) {
    for (ShardData& data : part.shards) {
      const int64_t elem_bytes = data.bytes / Box{data.lo, data.hi}.count_elems();
      const int64_t step = checksum_bytes.of(data.lo, data.hi, elem_bytes);
      for (int64_t begin = 0; begin < data.bytes; begin += step)
        data.hashes.push_back(hash_zeros(std::min(step, data.bytes - begin)));
      chunks += std::ssize(data.hashes);
    }
  }

  SparseBackend io;
  at = now_s();
  fs::path step;
  {
    const SaveReport saved = must(save_checkpoint(io, dir, manifest_skeleton(plan, {}), parts, options));
    step = saved.dir;
  }
  const double saved_s = now_s() - at;

  // Open: manifest, table, and that every file is there with its size.
  at = now_s();
  CheckpointReader reader = must(CheckpointReader::open(io, step));
  const double opened_s = now_s() - at;
  const Manifest& m = reader.manifest();

  // The plan's numbers against the files' own.
  int64_t payload = 0, apparent = 0, on_disk = 0, largest_file = 0;
  std::vector<int64_t> payload_of(m.files.size());
  for (const ShardEntry& shard : m.shards) payload_of[static_cast<size_t>(shard.file)] += shard.bytes;
  size_t file = 0;
  for (size_t rank = 0; rank < layouts.size(); ++rank) {
    if (layouts[rank].shards.empty()) continue;
    int64_t predicted = 0;
    for (const SlotShard& shard : layouts[rank].shards) predicted += shard.bytes;
    if (payload_of[file] != predicted)
      give_up(Error{ErrorCode::kInternal, fmt::format("{}: {} bytes of payload, the plan has {}", m.files[file].name,
                                                      payload_of[file], predicted)});
    struct stat st {};
    if (::stat((step / m.files[file].name).c_str(), &st) != 0 || st.st_size != m.files[file].size_bytes)
      give_up(Error{ErrorCode::kInternal, m.files[file].name + ": not of the size that the manifest has"});
    payload += payload_of[file];
    apparent += st.st_size;
    on_disk += st.st_blocks * 512;
    largest_file = std::max<int64_t>(largest_file, st.st_size);
    ++file;
  }
  if (payload != plan.checkpoint_bytes || payload != plan.parameters * 12)
    give_up(
        Error{ErrorCode::kInternal, fmt::format("{} bytes saved, the plan has {}", payload, plan.checkpoint_bytes)});

  // Some pieces all over it, through the reader with verification.
  std::vector<std::byte> bytes(static_cast<size_t>(largest));
  int64_t read_back = 0;
  for (size_t s = 0; s < m.shards.size(); s += std::max<size_t>(1, m.shards.size() / 50)) {
    const auto span = std::span(bytes).first(static_cast<size_t>(m.shards[s].bytes));
    std::memset(span.data(), 1, span.size());
    must(reader.read_shard(static_cast<int64_t>(s), span));
    if (std::any_of(span.begin(), span.end(), [](std::byte b) { return b != std::byte{0}; }))
      give_up(Error{ErrorCode::kInternal, "a shard read back is not zeros"});
    read_back += m.shards[s].bytes;
  }
  const auto size_of = [&](std::string_view file_name) {
    return static_cast<int64_t>(fs::file_size(step / file_name));
  };
  fmt::print(
      "{{\"model\":\"{}\",\"parameters\":{},\"layout\":\"tp {} x pp {} x dp "
      "{}\",\"tensors\":{},\"files\":{},\"shards\":{},"
      "\"chunks\":{},\"planned_bytes\":{},\"payload_bytes\":{},\"file_bytes\":{},\"largest_file_bytes\":{},"
      "\"manifest_bytes\":{},\"table_bytes\":{},\"disk_bytes\":{},\"read_back_bytes\":{},\"plan_s\":{:.3f},"
      "\"save_s\":{:.1f},\"open_s\":{:.3f}}}\n",
      name, plan.parameters, plan.mesh.tp(), plan.mesh.pp(), plan.mesh.dp(), m.tensors.size(), m.files.size(), shards,
      chunks, plan.checkpoint_bytes, payload, apparent, largest_file, size_of(kManifestName), size_of(kTableName),
      on_disk, read_back, planned_s, saved_s, opened_s);
  ::munmap(zeros, static_cast<size_t>(largest));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  const auto number = [&](int at, int64_t otherwise) { return argc > at ? std::atoll(argv[at]) : otherwise; };
  if (what == "plan") return plan(number(2, 2048));
  if (what == "open" && argc > 2) return open(number(3, 2048), number(4, 36 << 10), number(5, 7), argv[2]);
  if (what == "sparse" && argc > 3) return sparse(argv[2], argv[3]);
  fmt::print(stderr, "usage: ckpt_scale plan [WIDTH] | open DIR [WIDTH CHUNK_BYTES ROUNDS] | sparse MODEL DIR\n");
  return 2;
}
