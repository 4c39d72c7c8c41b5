#include "ckpt/restore_slot.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <thread>
#include <vector>

#include "ckpt/plan/load_plan.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/snapshot/snapshot.h"

namespace cairn::ckpt {

Result<SlotLoad> load_slot(const Arena& arena, int64_t slot, uint64_t incarnation, IoBackend& io,
                           const std::filesystem::path& dir) {
  RT_TRY_SET(const Manifest directory, decode_manifest(arena.directory()));
  ReadOptions options;
  options.huge_pages = arena.huge_pages();
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(io, dir, options));
  std::vector<TensorEntry> expected;  // averages may be missing: they begin at the weights then
  std::copy_if(directory.tensors.begin(), directory.tensors.end(), std::back_inserter(expected),
               [](const TensorEntry& tensor) { return tensor.kind != kEmaKind; });
  RT_TRY(check_tensors(reader.manifest(), expected, /*extra_allowed=*/true).with(dir.string()));
  const LoadPlanner planner(reader.manifest());
  SlotLoad out;
  RT_TRY_SET(out.position, position_of(reader.manifest()).with(dir.string()));
  std::string text = encode_position(out.position);
  if (static_cast<int64_t>(text.size()) > kPositionCapacity) {  // as the ranks' hook does
    trainer::TrainPosition bare = out.position;
    bare.metrics.clear();
    text = encode_position(bare);
  }

  std::vector<int64_t> rank_of_file;  // slot_manifest: ranks that save nothing have no file
  for (int64_t rank = 0; rank < arena.world(); ++rank) {
    if (!arena.shards(rank).empty()) rank_of_file.push_back(rank);
  }
  if (rank_of_file.size() != directory.files.size())
    return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
  std::vector<WantedBox> wanted;
  wanted.reserve(directory.shards.size());
  for (const ShardEntry& shard : directory.shards) {
    const TensorEntry& tensor = directory.tensors[static_cast<size_t>(shard.tensor)];
    wanted.push_back({planner.kind_to_read(tensor.kind, tensor.name), tensor.name, shard.box});
    const auto area = arena.payload(rank_of_file[static_cast<size_t>(shard.file)], slot);
    if (shard.offset + shard.bytes > static_cast<int64_t>(area.size()))
      return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
  }
  RT_TRY_SET(const std::vector<LoadRead> reads, planner.plan_reads(wanted).with(dir.string()));
  std::vector<ReadRange> ranges;
  ranges.reserve(reads.size());
  for (const LoadRead& read : reads) {
    const ShardEntry& shard = directory.shards[static_cast<size_t>(read.wanted)];
    const auto area = arena.payload(rank_of_file[static_cast<size_t>(shard.file)], slot);
    ranges.push_back({read.file, read.offset, read.bytes, area.data() + shard.offset + read.target_offset});
  }
  RT_TRY(reader.read_ranges(ranges));
  out.stats = reader.stats();

  // The slots' own hashes, in a few threads: memory speed.
  const int64_t world = arena.world(), step = reader.manifest().step;
  std::vector<Status> sealed(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  const int64_t workers = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, std::min<int64_t>(world, 8));
  for (int64_t worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&, worker] {
      for (int64_t rank = worker; rank < world; rank += workers)
        sealed[static_cast<size_t>(rank)] = SnapshotWriter(arena, rank).seal(slot, incarnation, step, text);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Status& status : sealed) RT_TRY(std::move(status));
  return out;
}

}  // namespace cairn::ckpt
