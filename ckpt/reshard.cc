#include "ckpt/reshard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/load_plan.h"
#include "runtime/core/dtype.h"
#include "runtime/core/random.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// How memory_bytes is spent. Read buffers grow to powers of two, so they may take twice their window.
struct Budget {
  int64_t window_bytes;   // target bytes held, with the plan of reading them
  int64_t reader_bytes;   // reads in flight
  int64_t fill_bytes;     // chunks on their way to the disk
  int64_t chunk_bytes;    // of the target
  int64_t granule_bytes;  // planned at a time

  explicit Budget(int64_t memory)
      : window_bytes(memory / 2), reader_bytes(memory / 8), fill_bytes(memory / 8), chunk_bytes(64 << 10) {
    while (chunk_bytes < int64_t{4} << 20 && chunk_bytes * 2 <= fill_bytes / 4) chunk_bytes *= 2;
    granule_bytes = std::clamp<int64_t>(memory / 256, 32 << 10, 1 << 20);
  }

  /// A chunk is read whole, or its checksum could not be compared.
  Status fit_chunks(const Manifest& source) {
    for (const ShardEntry& shard : source.shards) {
      const int64_t chunk = std::min(shard.chunk_bytes, shard.bytes);
      if (chunk > window_bytes / 2) {
        return invalid(
            fmt::format("{} has chunks of {} bytes, which are read whole: {} bytes of memory are needed, {} "
                        "are given",
                        describe_shard(source, shard), chunk, 4 * chunk, 2 * window_bytes));
      }
      reader_bytes = std::max(reader_bytes, chunk);
    }
    return {};
  }
};

/// A shard of the target.
struct Target {
  int64_t tensor = 0;  // index into the source's tensors
  Box box;
  int64_t bytes = 0, elem_bytes = 0;
};

/// The target's bytes, in the order in which they are written, from a window that moves over them. A window holds whole
/// shards and at its ends parts of shards; what is asked for next is always in it or at its end.
class Window {
 public:
  Window(CheckpointReader& reader, const LoadPlanner& planner, const std::vector<Target>& targets, const Budget& budget)
      : reader_(reader), planner_(planner), targets_(targets), budget_(budget) {
    for (const ShardEntry& shard : reader.manifest().shards) shard_starts_.emplace_back(shard.file, shard.offset);
    std::sort(shard_starts_.begin(), shard_starts_.end());
  }

  Status copy(int64_t target, int64_t offset, std::span<std::byte> out) {
    while (!out.empty()) {
      const Extent* extent = find(target, offset);
      if (extent == nullptr) {
        RT_TRY(load(target, offset));
        continue;
      }
      const int64_t within = offset - extent->offset;
      const auto bytes = std::min(static_cast<int64_t>(out.size()), extent->bytes - within);
      std::memcpy(out.data(), memory_.get() + extent->at + within, static_cast<size_t>(bytes));
      offset += bytes;
      out = out.subspan(static_cast<size_t>(bytes));
    }
    return {};
  }

  int64_t windows() const { return windows_; }

 private:
  // Bytes [offset, offset + bytes) of a target stand at `at` of the window.
  struct Extent {
    int64_t target, offset, bytes, at;
  };

  const Extent* find(int64_t target, int64_t offset) const {
    const auto after = std::upper_bound(
        extents_.begin(), extents_.end(), std::pair(target, offset),
        [](const std::pair<int64_t, int64_t>& key, const Extent& e) { return key < std::pair(e.target, e.offset); });
    if (after == extents_.begin()) return nullptr;
    const Extent& extent = *(after - 1);
    return extent.target == target && offset < extent.offset + extent.bytes ? &extent : nullptr;
  }

  /// Fills the window from (target, offset) on.
  Status load(int64_t target, int64_t offset) {
    // Where source and target cut across each other a range may be a few bytes long, and its bookkeeping longer.
    constexpr int64_t kRangeBytes = sizeof(ReadRange) + 80 + 40;  // the reader's piece, the planner's read
    if (!memory_) {
      int64_t all = 0;
      for (const Target& t : targets_) all += t.bytes + kIoAlign;
      capacity_ = std::min(budget_.window_bytes, all);
      memory_.reset(
          static_cast<std::byte*>(std::aligned_alloc(kIoAlign, (capacity_ + kIoAlign - 1) / kIoAlign * kIoAlign)));
      if (!memory_) {
        return Error{ErrorCode::kUnavailable, fmt::format("no memory for a window of {} bytes", capacity_), ENOMEM};
      }
    }
    extents_.clear();
    ranges_.clear();
    int64_t used = 0;
    for (; target < static_cast<int64_t>(targets_.size()); ++target, offset = 0) {
      const Target& shard = targets_[static_cast<size_t>(target)];
      while (offset < shard.bytes) {
        const int64_t bytes = std::min(budget_.granule_bytes, shard.bytes - offset);
        const int64_t spent = used + static_cast<int64_t>(ranges_.size()) * kRangeBytes;
        if (!extents_.empty() && (spent + bytes > budget_.window_bytes || used + bytes > capacity_)) return read();
        RT_TRY(plan(shard, offset, bytes, memory_.get() + used));
        if (!extents_.empty() && extents_.back().target == target) {
          extents_.back().bytes += bytes;
        } else {
          extents_.push_back({target, offset, bytes, used});
        }
        used += bytes;
        offset += bytes;
      }
      used = (used + kIoAlign - 1) / kIoAlign * kIoAlign;  // aligned, a whole chunk can be read where it belongs
    }
    return read();
  }

  /// Adds the reads for bytes [offset, offset + bytes) of a shard.
  Status plan(const Target& shard, int64_t offset, int64_t bytes, std::byte* to) {
    const TensorEntry& tensor = reader_.manifest().tensors[static_cast<size_t>(shard.tensor)];
    std::vector<WantedBox> wanted;
    std::vector<std::byte*> starts;
    for (Box& box :
         boxes_of_flat_range(shard.box.extents(), offset / shard.elem_bytes, (offset + bytes) / shard.elem_bytes)) {
      starts.push_back(to);
      to += box.count_elems() * shard.elem_bytes;
      for (size_t d = 0; d < box.lo.size(); ++d) {
        box.lo[d] += shard.box.lo[d];
        box.hi[d] += shard.box.lo[d];
      }
      wanted.push_back({tensor.kind, tensor.name, std::move(box)});
    }
    RT_TRY_SET(const std::vector<LoadRead> reads, planner_.plan_reads(wanted));
    for (const LoadRead& read : reads) {
      std::byte* dst = starts[static_cast<size_t>(read.wanted)] + read.target_offset;
      if (!ranges_.empty() && continues(ranges_.back(), read, dst)) {
        ranges_.back().bytes += read.bytes;
      } else {
        ranges_.push_back({read.file, read.offset, read.bytes, dst});
      }
    }
    return {};
  }

  /// One range instead of two, so that a whole chunk is seen as one; a range stays within one shard.
  bool continues(const ReadRange& last, const LoadRead& read, const std::byte* dst) const {
    return last.file == read.file && last.offset + last.bytes == read.offset && last.dst + last.bytes == dst &&
           !std::binary_search(shard_starts_.begin(), shard_starts_.end(), std::pair(read.file, read.offset));
  }

  Status read() {
    ++windows_;
    return reader_.read_ranges(ranges_);
  }

  struct Freer {
    void operator()(void* p) const { std::free(p); }
  };
  CheckpointReader& reader_;
  const LoadPlanner& planner_;
  const std::vector<Target>& targets_;
  const Budget budget_;
  int64_t capacity_ = 0;
  std::unique_ptr<std::byte, Freer> memory_;
  std::vector<std::pair<int64_t, int64_t>> shard_starts_;  // of the source: (file, offset), ascending
  std::vector<Extent> extents_;                            // ascending
  std::vector<ReadRange> ranges_;
  int64_t windows_ = 0;
};

bool is_state(std::string_view kind) {
  return std::find(kStateKinds.begin(), kStateKinds.end(), kind) != kStateKinds.end();
}

/// All kinds of state, or the weights alone, as the source has them; the tensors must be the model's.
Result<size_t> kinds_of(const Manifest& source, const Plan& target) {
  bool moments = false;
  Manifest state;  // without what is no state
  for (const TensorEntry& tensor : source.tensors) {
    if (!is_state(tensor.kind)) continue;
    moments = moments || tensor.kind != kStateKinds[0];
    state.tensors.push_back(tensor);
  }
  const size_t kinds = moments ? kStateKinds.size() : 1;
  std::vector<TensorEntry> expected = state_tensors(target.tensors);
  expected.resize(target.tensors.size() * kinds);
  RT_TRY(check_tensors(state, expected));
  return kinds;
}

std::string new_run_id() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return fmt::format("reshard-{:016x}", mix64(static_cast<uint64_t>(now.count()) ^ mix64(::getpid())));
}

}  // namespace

Result<ReshardReport> reshard_checkpoint(IoBackend& io, const fs::path& source_step_dir,
                                         const fs::path& target_checkpoints_dir, const Plan& target, RunText run,
                                         const ReshardOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  if (options.memory_bytes < kMinReshardBytes) {
    return invalid(fmt::format("{} bytes of memory to reshard in; at least {} are needed", options.memory_bytes,
                               kMinReshardBytes));
  }
  Budget budget(options.memory_bytes);
  {
    RT_TRY_SET(const Manifest manifest, read_manifest(io, source_step_dir));
    RT_TRY(budget.fit_chunks(manifest).with(source_step_dir.string()));
  }
  RT_TRY_SET(CheckpointReader reader,
             CheckpointReader::open(io, source_step_dir, {.window_bytes = budget.reader_bytes}));
  const Manifest& source = reader.manifest();
  if ((target_checkpoints_dir / step_dir_name(source.step)).lexically_normal() ==
      (source_step_dir / "").lexically_normal().parent_path()) {
    return invalid(fmt::format("{}: the source would be replaced; give another target", source_step_dir.string()));
  }
  Result<size_t> kinds = kinds_of(source, target);
  if (!kinds.ok()) return std::move(kinds).error().with(source_step_dir.string());

  ReshardReport report;
  report.from = source.mesh;
  run.parents = source.run.parents;
  if (!source.run.id.empty()) run.parents.push_back(source.run.id);
  if (run.run_id.empty()) run.run_id = new_run_id();
  Manifest skeleton = manifest_skeleton(target, run);
  skeleton.step = source.step;
  skeleton.samples = source.samples;
  skeleton.tokens = source.tokens;
  skeleton.state = source.state;
  skeleton.metrics = source.metrics;
  skeleton.created_unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  const auto state_count = static_cast<int64_t>(target.tensors.size() * kinds.value());
  skeleton.tensors.resize(static_cast<size_t>(state_count));

  const LoadPlanner planner(source);
  const int64_t total_bytes = payload_bytes(source);
  std::vector<Target> targets;
  Window window(reader, planner, targets, budget);
  const auto add = [&](WriterPart& part, int64_t tensor, const Box& box) {
    const TensorEntry& entry = skeleton.tensors[static_cast<size_t>(tensor)];
    const int64_t elem_bytes = dtype_size_bytes(entry.dtype);
    const auto index = static_cast<int64_t>(targets.size());
    targets.push_back({planner.find(entry.kind, entry.name), box, box.count_elems() * elem_bytes, elem_bytes});
    ShardData shard{.tensor = tensor, .lo = box.lo, .hi = box.hi, .bytes = targets.back().bytes};
    shard.fill = [&window, &report, &options, index, total_bytes](int64_t offset, std::span<std::byte> out) -> Status {
      RT_TRY(window.copy(index, offset, out));
      report.payload_bytes += static_cast<int64_t>(out.size());
      if (options.progress) options.progress(report.payload_bytes, total_bytes);
      return {};
    };
    part.shards.push_back(std::move(shard));
  };

  std::vector<WriterPart> parts;
  for (int64_t rank = 0; rank < target.mesh.world(); ++rank) {
    WriterPart part{shard_file_name(rank, target.mesh.world()), {}};
    for (const SlotShard& shard : slot_layout(target, rank).shards) {
      const int64_t tensor = manifest_tensor(target, shard.kind, shard.tensor);
      if (tensor < state_count) add(part, tensor, shard.box);
    }
    if (rank == 0) {
      for (const TensorEntry& entry : source.tensors) {
        if (is_state(entry.kind)) continue;
        skeleton.tensors.push_back(entry);
        add(part, static_cast<int64_t>(skeleton.tensors.size()) - 1, Box::whole(entry.shape));
      }
    }
    if (!part.shards.empty()) parts.push_back(std::move(part));
  }

  SaveOptions save;
  save.chunk_bytes = budget.chunk_bytes;
  save.fill_bytes = budget.fill_bytes;
  save.replace_existing = options.replace_existing;
  save.cancel = options.cancel;
  save.codec = options.codec;
  RT_TRY_SET(SaveReport saved, save_checkpoint(io, target_checkpoints_dir, std::move(skeleton), parts, save));
  report.dir = std::move(saved.dir);
  report.manifest = std::move(saved.manifest);
  report.windows = window.windows();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::ckpt
