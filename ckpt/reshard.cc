#include "ckpt/reshard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <vector>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/retention/retention.h"
#include "ckpt/shared_order.h"
#include "ckpt/tensors/box_stream.h"
#include "runtime/core/random.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// How memory_bytes is spent.
struct Budget {
  int64_t memory_bytes;
  int64_t window_bytes;  // target bytes held, with the plan of reading them
  int64_t reader_bytes;  // reads in flight
  int64_t fill_bytes;    // chunks on their way to the disk
  int64_t chunk_bytes;   // of the target

  explicit Budget(int64_t memory) : memory_bytes(memory), chunk_bytes(64 << 10) {
    const int64_t payload = payload_share(memory);
    window_bytes = payload / 2;
    reader_bytes = payload / 8;
    fill_bytes = payload / 8;
    while (chunk_bytes < int64_t{4} << 20 && chunk_bytes * 2 <= fill_bytes / 4) chunk_bytes *= 2;
  }

  /// How `files` files of a state are written side by side. Small bands lie in one window mostly, so that few chunks
  /// are read for two; but each of their steps takes memory, of which a sixteenth of all may go for that.
  SharedOrderLimits order_limits(int64_t state_bytes, size_t files, int64_t commit_bytes) const {
    constexpr int64_t kBandsInWindow = 8, kStepMemoryBytes = 160, kLeastStepBytes = int64_t{512} << 10;
    const int64_t steps = std::max<int64_t>(1, memory_bytes / 16 / kStepMemoryBytes);
    const auto at_once = static_cast<int64_t>(std::min(files, kOpenFiles));
    return {.band_bytes = std::max({window_bytes / kBandsInWindow, chunk_bytes, state_bytes / steps * at_once}),
            .step_bytes = std::min(chunk_bytes, kLeastStepBytes),
            .commit_bytes = commit_bytes};
  }

  /// A chunk is read whole, or its checksum could not be compared.
  Status fit_chunks(const Manifest& source) {
    for (const ShardEntry& shard : source.shards) {
      const int64_t chunk = std::min(shard.chunk_bytes, shard.bytes);
      if (chunk > window_bytes / 2) {
        return invalid(fmt::format("{} has chunks of {} bytes, which are read whole: {} bytes of memory are needed",
                                   describe_shard(source, shard), chunk, memory_for(4 * chunk)));
      }
      reader_bytes = std::max(reader_bytes, chunk);
    }
    return {};
  }
};

/// The kinds of state that the source has: the weights alone, with moments, with averages; of the model's tensors.
Result<StateKinds> kinds_of(const Manifest& source, const Plan& target) {
  Manifest state;  // without what is no state
  std::copy_if(source.tensors.begin(), source.tensors.end(), std::back_inserter(state.tensors),
               [](const TensorEntry& tensor) { return is_state_kind(tensor.kind); });
  const StateKinds kinds = kinds_in(state);
  RT_TRY(check_moments(kinds, target.state_kinds()));
  RT_TRY(check_tensors(state, state_tensors(target.tensors, kinds)));
  return kinds;
}

/// All that decides the bytes of the target's files.
Result<uint64_t> key_of(const Manifest& source, const Manifest& target, std::span<const WriterPart> parts,
                        int64_t chunk_bytes, Codec codec) {
  RT_TRY_SET(std::string text, encode_manifest(source));
  text = fmt::format("{} {} {} {}\n", hash_to_hex(hash_bytes(text)), target.step, chunk_bytes, codec_name(codec));
  for (const WriterPart& part : parts) {
    text += part.file_name + "\n";
    for (const ShardData& shard : part.shards) {
      const TensorEntry& tensor = target.tensors[static_cast<size_t>(shard.tensor)];
      text += fmt::format("{} {} {}\n", tensor.kind, tensor.name, to_string(Box{shard.lo, shard.hi}));
    }
  }
  return std::max<uint64_t>(1, hash_bytes(text));
}

constexpr int64_t kCommitBytes = int64_t{1} << 30;         // files are made durable when they have so many
constexpr int64_t kSharedCommitBytes = int64_t{16} << 30;  // or so many, or half of all, when they are written together

// What the target's shards are filled from: items of a stream, in the order in which the save asks for them.
class Fills {
 public:
  Fills(CheckpointReader& reader, const LoadPlanner& planner, const StreamOptions& stream,
        const ReshardOptions& options)
      : options_(options), manifest_(reader.manifest()), planner_(planner), stream_(reader, planner, items_, stream) {}
  Fills(const Fills&) = delete;

  /// Gives each shard of `parts` its fill(); `order` as the save's. All this outlives the save.
  void add(const Manifest& target, const std::vector<WriteStep>& order, std::vector<WriterPart>& parts) {
    size_t shards = 0;
    for (const WriterPart& part : parts) shards += part.shards.size();
    items_.reserve(order.size() + shards);
    owners_.reserve(order.size() + shards);
    struct Cursor {
      size_t shard = 0;
      int64_t at = 0;
      StreamItem item;  // of the shard
    };
    std::vector<Cursor> cursors(parts.size());
    const auto put = [&](size_t p, int64_t end) {
      Cursor& cursor = cursors[p];
      const ShardData& shard = parts[p].shards[cursor.shard];
      if (cursor.at == 0) {
        const TensorEntry& tensor = target.tensors[static_cast<size_t>(shard.tensor)];
        cursor.item = stream_item(manifest_, planner_.find(tensor.kind, tensor.name), Box{shard.lo, shard.hi});
      }
      cursor.item.begin = cursor.at;
      cursor.item.bytes = end - cursor.at;
      items_.push_back(cursor.item);
      owners_.emplace_back(static_cast<int32_t>(p), static_cast<int32_t>(cursor.shard));
      all_bytes_ += cursor.item.bytes;
      cursor.at = end;
    };
    const auto go = [&](size_t p, size_t last, int64_t end) {
      Cursor& cursor = cursors[p];
      for (; cursor.shard < last; ++cursor.shard, cursor.at = 0) put(p, parts[p].shards[cursor.shard].bytes);
      if (end > cursor.at) put(p, end);
    };
    for (const WriteStep& step : order) go(static_cast<size_t>(step.part), static_cast<size_t>(step.shard), step.end);
    for (size_t p = 0; p < parts.size() && order.empty(); ++p) go(p, parts[p].shards.size(), 0);
    for (size_t p = 0; p < parts.size(); ++p) {
      for (size_t s = 0; s < parts[p].shards.size(); ++s) {
        const std::pair owner(static_cast<int32_t>(p), static_cast<int32_t>(s));
        parts[p].shards[s].fill = [this, owner](int64_t offset, std::span<std::byte> out) {
          return fill(owner, offset, out);
        };
      }
    }
  }

  int64_t windows() const { return stream_.windows(); }

 private:
  using Owner = std::pair<int32_t, int32_t>;  // part and shard

  Status fill(Owner owner, int64_t offset, std::span<std::byte> out) {
    // What is asked for comes in order, but for files that were taken over and are not asked for.
    for (; next_ < items_.size(); passed_bytes_ += items_[next_++].bytes) {
      const StreamItem& item = items_[next_];
      if (owners_[next_] == owner && offset >= item.begin && offset < item.begin + item.bytes) break;
    }
    RT_CHECK(next_ < items_.size(), "byte {} of shard {} of part {} is out of order", offset, owner.second,
             owner.first);
    const int64_t within = offset - items_[next_].begin;
    RT_TRY(stream_.copy(static_cast<int64_t>(next_), within, out));
    if (options_.progress) options_.progress(passed_bytes_ + within + std::ssize(out), all_bytes_);
    return {};
  }

  const ReshardOptions& options_;
  const Manifest& manifest_;
  const LoadPlanner& planner_;
  std::vector<StreamItem> items_;
  std::vector<Owner> owners_;  // of the items
  BoxStream stream_;
  size_t next_ = 0;
  int64_t passed_bytes_ = 0, all_bytes_ = 0;
};

std::string new_run_id() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return fmt::format("reshard-{:016x}", mix64(static_cast<uint64_t>(now.count()) ^ mix64(::getpid())));
}

}  // namespace

Result<ReshardReport> reshard_checkpoint(IoBackend& io, const fs::path& source_step_dir,
                                         const fs::path& target_checkpoints_dir, const Plan& target, RunText run,
                                         const ReshardOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  if (options.memory_bytes < kMinStreamBytes) {
    return invalid(
        fmt::format("{} bytes of memory to reshard in; at least {} are needed", options.memory_bytes, kMinStreamBytes));
  }
  Budget budget(options.memory_bytes);
  {
    RT_TRY_SET(const Manifest manifest, read_manifest(io, source_step_dir));
    RT_TRY(budget.fit_chunks(manifest).with(source_step_dir.string()));
  }
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(options.source_io != nullptr ? *options.source_io : io,
                                                             source_step_dir, {.window_bytes = budget.reader_bytes}));
  const Manifest& source = reader.manifest();
  if ((target_checkpoints_dir / step_dir_name(source.step)).lexically_normal() ==
      (source_step_dir / "").lexically_normal().parent_path()) {
    return invalid(fmt::format("{}: the source would be replaced; give another target", source_step_dir.string()));
  }
  RT_TRY_SET(const StateKinds saved_kinds, kinds_of(source, target).with(source_step_dir.string()));
  const StateKinds kinds = options.weights_only ? StateKinds::weights_alone() : saved_kinds;

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
  skeleton.origin = fmt::format("reshard of {} step {}{}", source.run.id.empty() ? "?" : source.run.id, source.step,
                                kinds == saved_kinds ? "" : ", weights only");
  skeleton.created_unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  skeleton.tensors = state_tensors(target.tensors, kinds);
  const StateIndex index(target.tensors, kinds);

  const LoadPlanner planner(source);
  int64_t total_bytes = 0;
  const auto add = [&](WriterPart& part, int64_t tensor, const Box& box) {
    const int64_t bytes = box.count_elems() * dtype_size_bytes(skeleton.tensors[static_cast<size_t>(tensor)].dtype);
    part.shards.push_back({.tensor = tensor, .lo = box.lo, .hi = box.hi, .bytes = bytes});
    total_bytes += bytes;
  };

  std::vector<WriterPart> parts;
  for (int64_t rank = 0; rank < target.mesh.world(); ++rank) {
    WriterPart part{shard_file_name(rank, target.mesh.world()), {}};
    for (const SlotShard& shard : slot_layout(target, rank, kinds).shards) {
      add(part, index.at(shard.kind, shard.tensor), shard.box);
    }
    if (rank == 0) {
      for (const TensorEntry& entry : source.tensors) {
        if (is_state_kind(entry.kind)) continue;
        skeleton.tensors.push_back(entry);
        add(part, static_cast<int64_t>(skeleton.tensors.size()) - 1, Box::whole(entry.shape));
      }
    }
    if (!part.shards.empty()) parts.push_back(std::move(part));
  }

  // Ranks of more tp than the source has want the same chunks.
  const bool shared = target.mesh.tp() > source.mesh.tp && options.codec == Codec::kRaw;
  SaveOptions save;
  save.commit_bytes = options.commit_bytes;
  if (save.commit_bytes == 0) save.commit_bytes = shared ? std::max(kSharedCommitBytes, total_bytes / 2) : kCommitBytes;
  if (shared) save.order = shared_order(parts, budget.order_limits(total_bytes, parts.size(), save.commit_bytes));
  Fills fills(reader, planner, {.memory_bytes = budget.window_bytes, .ahead = options.source_io != nullptr}, options);
  fills.add(skeleton, save.order, parts);

  save.chunk_bytes = budget.chunk_bytes;
  save.fill_bytes = budget.fill_bytes;
  save.replace_existing = options.replace_existing;
  save.cancel = options.cancel;
  save.codec = options.codec;
  RT_TRY_SET(const uint64_t key, key_of(source, skeleton, parts, budget.chunk_bytes, options.codec));
  RT_TRY_SET(save.resume_from, find_unfinished(io, target_checkpoints_dir, source.step, key,
                                               options.alive ? options.alive : may_be_alive, &report.cleaned));
  save.resume_key = key;
  RT_TRY_SET(SaveReport saved, save_checkpoint(io, target_checkpoints_dir, std::move(skeleton), parts, save));
  report.dir = std::move(saved.dir);
  report.manifest = std::move(saved.manifest);
  report.payload_bytes = saved.payload_bytes;
  report.taken_files = saved.taken_files;
  report.taken_bytes = saved.taken_bytes;
  report.windows = fills.windows();
  report.read_bytes = reader.stats().read_bytes;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::ckpt
