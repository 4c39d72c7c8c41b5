#pragma once
// Training by ranks that are processes, each on a device of its own, which communicate by NCCL: on the doubles of all
// of these. Devices begin what they are asked for in one order over all communicators, as a run asks NCCL for.

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/comm/shm_world.h"
#include "runtime/cuda/nccl/nccl_engine.h"
#include "runtime/plan/communication.h"
#include "runtime/plan/message_order.h"
#include "runtime/trainer/state.h"
#include "runtime/trainer/sum_rooms.h"
#include "runtime/trainer/trainer.h"
#include "runtime/trainer/work_shapes.h"
#include "tests/runtime/comm/fabric.h"
#include "tests/runtime/cuda/train/trained_double.h"
#include "tests/simt/nccl_double.h"
#include "tests/simt/symbols.h"

namespace cairn::testing {

/// Of one rank.
struct RankCounts {
  int64_t allocations = 0;                        // of the device, until the second step
  int64_t later_allocations = 0, later_pins = 0;  // from then on
  int64_t waits = 0;                              // of its own thread for the device, in the second step
  int64_t waits_before_update = -1;               // of those, before the update's first kernel; -1: there was none
  int64_t device_bytes = 0, planned_device_bytes = 0;
  int64_t registered = 0, in_registered = 0;  // communicators with memory registered; operations in it
};

inline int64_t moved_bytes(const Traffic& of) {
  return of.all_reduce.bytes + of.reduce_scatter.bytes + of.all_gather.bytes + of.broadcast.bytes + of.send.bytes +
         of.all_to_all.bytes;
}

/// What the processes tell: plain memory.
struct ToldByRanks {
  static constexpr int64_t kRanks = 8, kSteps = 16, kGroups = 16;
  struct Group {
    char name[32];
    int64_t bytes;
  };
  double loss[kSteps], norm[kSteps];
  RankCounts counts[kRanks];
  Group groups[kRanks][kGroups];
};

struct TrainedByNccl {
  std::vector<std::string> wrong;  // by rank; empty: nothing
  std::vector<double> loss, norm;  // by step, from 1 on
  std::vector<RankCounts> counts;  // by rank
  std::vector<std::vector<std::pair<std::string, int64_t>>> groups;

  /// Bytes that the rank has put into a group, in all.
  int64_t moved(int64_t rank, const std::string& group) const {
    for (const auto& [name, bytes] : groups[static_cast<size_t>(rank)]) {
      if (name == group) return bytes;
    }
    return 0;
  }
};

/// For state on a device, of which nothing is copied.
class NoSaves final : public trainer::CheckpointHook {
 public:
  Result<trainer::StateMemory> memory(std::span<const trainer::StateTensor>, std::span<const trainer::StateTensor>,
                                      int64_t) override {
    trainer::StateMemory out;
    out.gate = &gate_;
    return out;
  }
  Result<std::optional<trainer::Restored>> restore(std::span<const trainer::StateTensor>) override {
    return std::optional<trainer::Restored>();
  }
  Result<trainer::StepOrder> decide(const trainer::TrainPosition&, bool) override { return trainer::StepOrder{}; }
  Status snapshot(const trainer::StepOrder&, const trainer::TrainPosition&, int64_t,
                  std::span<const trainer::StateTensor>, std::span<const uint64_t>) override {
    return {};
  }
  Status finish() override { return {}; }

 private:
  class Open final : public CopyGate {
    int64_t block_bytes() const override { return int64_t{1} << 20; }
    void order_after_copy(Stream&, std::span<const DeviceBytes>) override {}
    int64_t waited_ns() const override { return 0; }
  } gate_;
};

struct NcclTraining {
  uint64_t seed = 0;
  int64_t deadline_ms = 60000;
  bool registered = false;                                          // memory is NCCL's, and registered
  std::function<void(int64_t rank, simt::NcclDouble& nccl)> plant;  // before the engine is made
};

inline Status train_rank_by_nccl(const Plan& plan, comm::Engine& host, simt::NcclSegment& segment,
                                 const NcclTraining& how, ToldByRanks& told, std::string* misuses) {
  const int64_t rank = host.world_rank();
  const uint64_t seed = how.seed + static_cast<uint64_t>(2 * rank);
  TrainedDouble device(seed);
  simt::NcclDouble nccl(device.cuda, segment, seed);
  nccl.order_launches(true);
  if (how.plant) how.plant(rank, nccl);
  const simt::DeviceRuns runs(device.cuda);
  RankCounts& counts = told.counts[rank];
  const auto train = [&]() -> Status {
    RT_TRY_SET(const auto machine, device.open(0, trainer::sum_rooms(plan), how.registered ? &nccl.api() : nullptr));
    std::function<DeviceBytes()> registered;
    if (how.registered) registered = [&] { return machine->memory(); };
    RT_TRY_SET(const auto engine,
               cuda::make_nccl_engine(
                   host, nccl.api(), machine->rank_sums(), machine->cuda_stream(),
                   {.deadline_ms = how.deadline_ms,
                    .rooms =
                        [&] {
                          return cuda::NcclRooms{machine->room_for_sums(), machine->room_for_sums_beside()};
                        },
                    .registered = std::move(registered),
                    .nccl_sums = plan.recipe.sums == Sums::kNccl,
                    .ways = message_ways(plan),
                    .least_chunk_bytes = 64,
                    .on_device = [&](const void* at) { return machine->holds(at); },
                    .peers =
                        [](std::string_view axis) {
                          return axis == kForwardGroup || axis == kBackwardGroup ? cuda::NcclPeers::kNeighbours
                                                                                 : cuda::NcclPeers::kNone;
                        },
                    .whole_axes = true}));
    bool counted_step = false;
    device.cuda.on_order([&, training = std::this_thread::get_id()](const simt::Ordered& ordered) {
      if (std::this_thread::get_id() != training || !counted_step || counts.waits_before_update >= 0) return;
      const std::string name = ordered.kind == simt::Ordered::Kind::kKernel ? simt::name_of(ordered.kernel) : "";
      const bool updates = name.find("adamw") != name.npos || name.find("lamb") != name.npos;
      if (updates) counts.waits_before_update = simt::StreamDouble::own_waits_so_far();
    });
    NoSaves hook;
    trainer::Environment env{.plan = plan, .rank = rank, .engine = *engine, .hook = hook};
    env.machine = machine.get();
    env.on_phase = [&](int64_t step, const char* what) {
      if (std::string_view(what) != "data" || step < 2 || step > 3) return;
      counted_step = step == 2;
      const int64_t waits = simt::StreamDouble::take_own_waits();
      if (step == 3) {
        counts.waits = waits;
        return;
      }
      counts.allocations = device.cuda.take_counts().allocations;
    };
    env.on_step = [&](const telemetry::StepMetrics& metrics) {
      told.loss[metrics.step] = metrics.loss;
      told.norm[metrics.step] = metrics.grad_norm;
    };
    if (rank != 0) env.on_step = {};
    RT_TRY_SET(const trainer::Outcome outcome, trainer::run(env));
    const simt::StreamDouble::Counts later = device.cuda.take_counts();
    counts.later_allocations = later.allocations;
    counts.later_pins = later.pins;
    counts.registered = nccl.registered();
    counts.in_registered = nccl.in_registered();
    counts.device_bytes = outcome.device_bytes;
    counts.planned_device_bytes =
        machine->bytes_for(trainer::TrainState::blocks(plan, plan.rank(rank), {}), trainer::work_shapes(plan, rank));
    for (size_t g = 0; g < std::min<size_t>(outcome.traffic.size(), ToldByRanks::kGroups); ++g) {
      ToldByRanks::Group& group = told.groups[rank][g];
      std::strncpy(group.name, outcome.traffic[g].group.c_str(), sizeof(group.name) - 1);
      group.bytes = moved_bytes(outcome.traffic[g].traffic);
    }
    return {};
  };
  const Status trained = train();
  for (const auto& of : {device.cuda.misuses(), device.products.misuses(), nccl.misuses()}) {
    for (const std::string& what : of) *misuses += what + "; ";
  }
  if (trained.ok() && nccl.left() > 0) *misuses += fmt::format("{} communicators are left", nccl.left());
  if (nccl.registrations_left() > 0) *misuses += fmt::format("{} registrations are left", nccl.registrations_left());
  return trained;
}

inline TrainedByNccl train_by_nccl(const Plan& plan, const NcclTraining& how) {
  const int64_t world = plan.mesh.world();
  const comm::testing::Shared<ToldByRanks> told;
  simt::NcclSegment segment;
  const auto memory = comm::ShmWorld::create(trainer::world_config(plan));
  RT_CHECK(memory.ok(), "{}", memory.error().message);
  TrainedByNccl out;
  {
    comm::testing::Processes ranks(
        world,
        [&](int64_t rank) {
          return comm::attach_shm_engine(memory.value().fd(), rank, {.deadline_ms = how.deadline_ms});
        },
        [&](comm::Engine& host) -> std::string {
          omp_set_num_threads(1);
          std::string misuses;
          const Status trained = train_rank_by_nccl(plan, host, segment, how, *told, &misuses);
          return misuses + (trained.ok() ? "" : trained.error().message);
        });
    for (int64_t rank = 0; rank < world; ++rank) out.wrong.push_back(ranks.join(rank));
  }
  out.loss.assign((*told).loss, (*told).loss + ToldByRanks::kSteps);
  out.norm.assign((*told).norm, (*told).norm + ToldByRanks::kSteps);
  for (int64_t rank = 0; rank < world; ++rank) {
    out.counts.push_back((*told).counts[rank]);
    auto& groups = out.groups.emplace_back();
    for (const ToldByRanks::Group& group : (*told).groups[rank]) {
      if (group.name[0] != 0) groups.emplace_back(group.name, group.bytes);
    }
  }
  return out;
}

}  // namespace cairn::testing
