#include "ckpt/restore_slot.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <thread>
#include <vector>

#include "ckpt/plan/load_plan.h"
#include "ckpt/plan/partial.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/tensors/planned_range.h"
#include "runtime/trainer/initial.h"

namespace cairn::ckpt {

namespace {

/// What is in no checkpoint.
struct Anew {
  int64_t tensor = 0;   // of the plan
  bool weight = false;  // else a moment
  Box box;
  std::span<std::byte> memory;
};

void fill(const Plan& plan, const Anew& anew) {
  if (anew.weight) {
    trainer::initial_weights(plan, anew.tensor, anew.box, reinterpret_cast<float*>(anew.memory.data()));
  } else {
    std::fill(anew.memory.begin(), anew.memory.end(), std::byte{0});
  }
}

}  // namespace

Result<SlotLoad> load_slot(const Plan& plan, const Arena& arena, int64_t slot, uint64_t incarnation, IoBackend& io,
                           const std::filesystem::path& dir, const InitConfig& how, BufferStore* buffers) {
  RT_TRY_SET(const Manifest directory, decode_manifest(arena.directory()));
  ReadOptions options;
  options.huge_pages = arena.huge_pages();
  options.buffers = buffers;
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(io, dir, options));
  const bool begin = how.path.empty() && moments_begin(plan, reader.manifest());
  const StateKinds kinds = begin ? plan.state_kinds().without_moments() : plan.state_kinds();
  RT_TRY_SET(const LoadMatch match, match_tensors(reader.manifest(), plan.tensors, kinds, how).with(dir.string()));
  const LoadPlanner planner(reader.manifest());
  SlotLoad out{.position = {.seed = plan.recipe.seed}};
  if (!how.weights_only) {
    RT_TRY_SET(out.position, position_of(reader.manifest()).with(dir.string()));
  }

  const std::vector<int64_t> rank_of_file = arena.rank_of_file();
  const StateIndex index(plan);
  if (rank_of_file.size() != directory.files.size() || std::ssize(directory.tensors) != index.size())
    return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
  std::vector<WantedBox> wanted;
  std::vector<std::byte*> targets;  // of `wanted`
  std::vector<std::vector<Anew>> anew(static_cast<size_t>(arena.world()));
  wanted.reserve(directory.shards.size());
  targets.reserve(directory.shards.size());
  for (const ShardEntry& shard : directory.shards) {
    const int64_t rank = rank_of_file[static_cast<size_t>(shard.file)];
    const auto area = arena.payload(rank, slot);
    if (shard.offset + shard.bytes > static_cast<int64_t>(area.size()))
      return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
    const std::span<std::byte> memory = area.subspan(shard.offset, shard.bytes);
    const int64_t tensor = index.tensor_of(shard.tensor);
    const TensorEntry& entry = directory.tensors[static_cast<size_t>(shard.tensor)];
    const TensorMatch& of = match.tensors[static_cast<size_t>(tensor)];
    const bool weight = !is_moment_kind(entry.kind);  // or its average
    if (weight ? of.weight : of.moments && !begin) {
      // An average begins anew, at the weights, where the moments do.
      const std::string_view kind = entry.kind == kEmaKind && !of.moments ? kWeightKind : std::string_view(entry.kind);
      wanted.push_back({planner.kind_to_read(kind, entry.name), entry.name, shard.box});
      targets.push_back(memory.data());
    } else {
      anew[static_cast<size_t>(rank)].push_back({tensor, weight, shard.box, memory});
    }
  }
  RT_TRY_SET(const std::vector<LoadRead> reads, planner.plan_reads(wanted).with(dir.string()));
  std::vector<ReadRange> ranges;
  ranges.reserve(reads.size());
  for (const LoadRead& read : reads) ranges.push_back(range_of(read, targets[static_cast<size_t>(read.wanted)]));
  RT_TRY(reader.read_ranges(ranges));
  out.stats = reader.stats();

  // What starts anew and the slots' own hashes, in a few threads: memory speed.
  const int64_t world = arena.world();
  const std::string text = encode_position(out.position, kPositionCapacity);
  std::vector<Status> sealed(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  const int64_t workers = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, std::min<int64_t>(world, 8));
  const auto seal_some = [&](int64_t worker) {
    for (int64_t rank = worker; rank < world; rank += workers) {
      for (const Anew& item : anew[static_cast<size_t>(rank)]) fill(plan, item);
      sealed[static_cast<size_t>(rank)] = SnapshotWriter(arena, rank).seal(slot, incarnation, out.position.step, text);
    }
  };
  for (int64_t worker = 0; worker < workers; ++worker) {
    try {
      threads.emplace_back(seal_some, worker);
    } catch (const std::system_error&) {  // a limit of threads
      seal_some(worker);
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (Status& status : sealed) RT_TRY(std::move(status));
  return out;
}

}  // namespace cairn::ckpt
