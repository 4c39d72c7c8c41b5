#include "runtime/optim/rules/lamb.h"

#include <algorithm>
#include <vector>

#include "runtime/device/host_numbers.h"
#include "runtime/optim/rules/adamw.h"
#include "runtime/optim/rules/device_norms.h"

namespace cairn::optim {
namespace {

/// The words of all ranks' norms, for the device: `words` with one rank. Else the host waits for this rank's and adds
/// them up; `host` keeps the sum for as long as the update takes.
Result<DevicePtr<const double>> norms_of_world(const kernels::StateExec& on, DevicePtr<double> words, int64_t count,
                                               comm::Comm& world, std::vector<double>* host) {
  if (world.size() == 1) return DevicePtr<const double>(words);
  HostNumbers<double> mine(on.stream, count);
  on.doubles_to_host(words, mine.room());
  RT_TRY(on.stream.settle());
  host->assign(mine.read().begin(), mine.read().end());
  RT_TRY(world.all_reduce(host->data(), count, DType::kF64, comm::ReduceOp::kSum, "norms of tensors"));
  return on.stream.give(std::span<const double>(*host), words);
}

}  // namespace

Status lamb(StateWalk& walk, std::span<const TensorRates> rates, const Update& update, comm::Comm& world) {
  const kernels::StateExec& on = walk.on();
  DeviceNorms norms(walk);
  walk.for_batches(update.from, update.to, [&](std::span<const StateBlock> batch) {
    std::vector<kernels::AdamRun> runs = adam_runs(walk, rates, update, batch);
    std::ranges::stable_partition(runs, &kernels::AdamRun::counts);
    on.lamb_moments_of_runs(runs, norms.partials_of(batch));
  });
  const DevicePtr<double> words = norms.add_up();
  std::vector<double> host;
  RT_TRY_SET(const DevicePtr<const double> all, norms_of_world(on, words, walk.rank().tensor_norms, world, &host));
  const auto step = [&](std::span<const StateBlock> batch) {
    on.lamb_step_of_runs(adam_runs(walk, rates, update, batch), all);
    for (const StateBlock& block : batch) walk.sum_up(block);
  };
  walk.for_batches(update.from, update.to, step, StateWalk::Pieces::kTrainedAgain);
  return {};
}

}  // namespace cairn::optim
