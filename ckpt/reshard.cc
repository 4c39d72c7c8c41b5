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
#include "ckpt/tensors/box_stream.h"
#include "runtime/core/random.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// How memory_bytes is spent.
struct Budget {
  int64_t window_bytes;  // target bytes held, with the plan of reading them
  int64_t reader_bytes;  // reads in flight
  int64_t fill_bytes;    // chunks on their way to the disk
  int64_t chunk_bytes;   // of the target

  // What is not payload, as measured for states from 0.1 to 1 GiB: ring, libhdf5 and its pages, manifests, stacks, and
  // what rounding to huge pages adds.
  static constexpr int64_t kFixedBytes = int64_t{12} << 20;

  explicit Budget(int64_t memory) : chunk_bytes(64 << 10) {
    const int64_t payload = std::max(memory - kFixedBytes, memory / 2);
    window_bytes = payload / 2;
    reader_bytes = payload / 8;
    fill_bytes = payload / 8;
    while (chunk_bytes < int64_t{4} << 20 && chunk_bytes * 2 <= fill_bytes / 4) chunk_bytes *= 2;
  }

  /// A chunk is read whole, or its checksum could not be compared.
  Status fit_chunks(const Manifest& source) {
    for (const ShardEntry& shard : source.shards) {
      const int64_t chunk = std::min(shard.chunk_bytes, shard.bytes);
      if (chunk > window_bytes / 2) {
        return invalid(fmt::format("{} has chunks of {} bytes, which are read whole: {} bytes of memory are needed",
                                   describe_shard(source, shard), chunk, 4 * chunk + kFixedBytes));
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
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(options.source_io != nullptr ? *options.source_io : io,
                                                             source_step_dir, {.window_bytes = budget.reader_bytes}));
  const Manifest& source = reader.manifest();
  if ((target_checkpoints_dir / step_dir_name(source.step)).lexically_normal() ==
      (source_step_dir / "").lexically_normal().parent_path()) {
    return invalid(fmt::format("{}: the source would be replaced; give another target", source_step_dir.string()));
  }
  Result<StateKinds> kinds = kinds_of(source, target);
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
  skeleton.origin = fmt::format("reshard of {} step {}", source.run.id.empty() ? "?" : source.run.id, source.step);
  skeleton.created_unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  skeleton.tensors = state_tensors(target.tensors, kinds.value());
  const StateIndex index(target.tensors, kinds.value());

  const LoadPlanner planner(source);
  const int64_t total_bytes = payload_bytes(source);
  std::vector<StreamItem> targets;
  BoxStream stream(reader, planner, targets,
                   {.memory_bytes = budget.window_bytes, .ahead = options.source_io != nullptr});
  int64_t planned_bytes = 0;
  const auto add = [&](WriterPart& part, int64_t tensor, const Box& box) {
    const TensorEntry& entry = skeleton.tensors[static_cast<size_t>(tensor)];
    const auto item = static_cast<int64_t>(targets.size());
    const int64_t before = planned_bytes;
    targets.push_back(stream_item(source, planner.find(entry.kind, entry.name), box));
    ShardData shard{.tensor = tensor, .lo = box.lo, .hi = box.hi, .bytes = targets.back().bytes};
    shard.fill = [&stream, &options, item, before, total_bytes](int64_t offset, std::span<std::byte> out) -> Status {
      RT_TRY(stream.copy(item, offset, out));
      if (options.progress) options.progress(before + offset + static_cast<int64_t>(out.size()), total_bytes);
      return {};
    };
    planned_bytes += targets.back().bytes;
    part.shards.push_back(std::move(shard));
  };

  std::vector<WriterPart> parts;
  for (int64_t rank = 0; rank < target.mesh.world(); ++rank) {
    WriterPart part{shard_file_name(rank, target.mesh.world()), {}};
    for (const SlotShard& shard : slot_layout(target, rank, kinds.value()).shards) {
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

  SaveOptions save;
  save.chunk_bytes = budget.chunk_bytes;
  save.fill_bytes = budget.fill_bytes;
  save.replace_existing = options.replace_existing;
  save.cancel = options.cancel;
  save.codec = options.codec;
  save.commit_bytes = options.commit_bytes;
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
  report.windows = stream.windows();
  report.read_bytes = reader.stats().read_bytes;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::ckpt
