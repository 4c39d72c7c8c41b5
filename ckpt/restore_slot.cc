#include "ckpt/restore_slot.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "ckpt/plan/load_plan.h"
#include "ckpt/plan/partial.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/tensors/planned_range.h"
#include "runtime/core/cgroup.h"
#include "runtime/trainer/initial.h"

namespace cairn::ckpt {

namespace {

/// Memory for a box of one tensor's state of the plan.
struct StateBox {
  std::string_view kind, name;
  int64_t tensor = 0;  // of the plan
  const Box* box = nullptr;
  std::span<std::byte> memory;
  bool anew = false;  // set by load_boxes(): it is in no checkpoint
};

/// What is in no checkpoint.
void fill(const Plan& plan, const StateBox& anew) {
  if (!is_moment_kind(anew.kind)) {  // a weight, or its average
    trainer::initial_weights(plan, anew.tensor, *anew.box, reinterpret_cast<float*>(anew.memory.data()));
  } else {
    std::fill(anew.memory.begin(), anew.memory.end(), std::byte{0});
  }
}

/// Reads the boxes that the checkpoint has.
Result<SlotLoad> load_boxes(const Plan& plan, IoBackend& io, const std::filesystem::path& dir, const InitConfig& how,
                            const ReadOptions& options, std::span<StateBox> boxes) {
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(io, dir, options));
  const bool begin = how.path.empty() && moments_begin(plan, reader.manifest());
  const StateKinds kinds = begin ? plan.state_kinds().without_moments() : plan.state_kinds();
  RT_TRY_SET(const LoadMatch match, match_tensors(reader.manifest(), plan.tensors, kinds, how).with(dir.string()));
  const LoadPlanner planner(reader.manifest());
  SlotLoad out{.position = {.seed = plan.recipe.seed}};
  if (!how.weights_only) {
    RT_TRY_SET(out.position, position_of(reader.manifest()).with(dir.string()));
  }
  std::vector<WantedBox> wanted;
  std::vector<std::byte*> targets;  // of `wanted`
  wanted.reserve(boxes.size());
  targets.reserve(boxes.size());
  for (StateBox& item : boxes) {
    const TensorMatch& of = match.tensors[static_cast<size_t>(item.tensor)];
    const bool weight = !is_moment_kind(item.kind);  // or its average
    item.anew = !(weight ? of.weight : of.moments && !begin);
    if (item.anew) continue;
    // An average begins anew, at the weights, where the moments do.
    const std::string_view kind = item.kind == kEmaKind && !of.moments ? kWeightKind : item.kind;
    wanted.push_back({planner.kind_to_read(kind, item.name), item.name, *item.box});
    targets.push_back(item.memory.data());
  }
  RT_TRY_SET(const std::vector<LoadRead> reads, planner.plan_reads(wanted).with(dir.string()));
  std::vector<ReadRange> ranges;
  ranges.reserve(reads.size());
  for (const LoadRead& read : reads) ranges.push_back(range_of(read, targets[static_cast<size_t>(read.wanted)]));
  RT_TRY(reader.read_ranges(ranges));
  out.stats = reader.stats();
  return out;
}

}  // namespace

Status load_state(const Plan& plan, IoBackend& io, const std::filesystem::path& dir, const InitConfig& how,
                  std::span<const trainer::StateTensor> state, DeviceLink& link) {
  std::vector<DeviceBytes> runs;
  for (const trainer::StateTensor& item : state) runs.push_back({item.data, item.bytes});
  return link.fill(runs, [&](std::span<const std::span<std::byte>> areas) -> Status {
    std::vector<StateBox> boxes;
    for (size_t k = 0; k < state.size(); ++k) {
      const trainer::StateTensor& item = state[k];
      boxes.push_back({kStateKinds[static_cast<size_t>(item.kind)], plan.tensors.at(item.tensor).name, item.tensor,
                       &item.box, areas[k]});
    }
    RT_TRY(load_boxes(plan, io, dir, how, {}, boxes));
    for (const StateBox& item : boxes) {
      if (item.anew) fill(plan, item);
    }
    return {};
  });
}

Result<SlotLoad> load_slot(const Plan& plan, const Arena& arena, int64_t slot, uint64_t incarnation, IoBackend& io,
                           const std::filesystem::path& dir, const InitConfig& how, BufferStore* buffers) {
  RT_TRY_SET(const Manifest directory, decode_manifest(arena.directory()));
  const std::vector<int64_t> rank_of_file = arena.rank_of_file();
  const StateIndex index(plan);
  if (rank_of_file.size() != directory.files.size() || std::ssize(directory.tensors) != index.size())
    return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
  const RankRange here = arena.ranks();
  std::vector<StateBox> boxes;
  std::vector<int64_t> rank_of_box;
  boxes.reserve(directory.shards.size());
  rank_of_box.reserve(directory.shards.size());
  for (const ShardEntry& shard : directory.shards) {
    const int64_t rank = rank_of_file[static_cast<size_t>(shard.file)];
    if (!here.contains(rank)) continue;
    const auto area = arena.payload(rank, slot);
    if (shard.offset + shard.bytes > static_cast<int64_t>(area.size()))
      return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
    const TensorEntry& entry = directory.tensors[static_cast<size_t>(shard.tensor)];
    boxes.push_back(
        {entry.kind, entry.name, index.tensor_of(shard.tensor), &shard.box, area.subspan(shard.offset, shard.bytes)});
    rank_of_box.push_back(rank);
  }
  ReadOptions options;
  options.huge_pages = arena.huge_pages();
  options.buffers = buffers;
  RT_TRY_SET(SlotLoad out, load_boxes(plan, io, dir, how, options, boxes));
  std::vector<std::vector<StateBox>> anew(static_cast<size_t>(here.size()));
  for (size_t k = 0; k < boxes.size(); ++k) {
    if (boxes[k].anew) anew[static_cast<size_t>(rank_of_box[k] - here.first)].push_back(boxes[k]);
  }

  // What starts anew and the slots' own hashes, in a few threads: memory speed.
  const int64_t ranks = here.size();
  const std::string text = encode_position(out.position, kPositionCapacity);
  std::vector<Status> sealed(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  const int64_t workers = std::min({usable_cpus(), ranks, int64_t{8}});
  const auto seal_some = [&](int64_t worker) {
    for (int64_t k = worker; k < ranks; k += workers) {
      for (const StateBox& item : anew[static_cast<size_t>(k)]) fill(plan, item);
      sealed[static_cast<size_t>(k)] =
          SnapshotWriter(arena, here.first + k).seal(slot, incarnation, out.position.step, text);
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
