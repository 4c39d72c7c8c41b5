#include "runtime/optim/rules/lamb.h"

#include <algorithm>
#include <vector>

#include "runtime/optim/rules/adamw.h"
#include "runtime/optim/rules/device_norms.h"
#include "runtime/optim/rules/world_sum.h"

namespace cairn::optim {

Status lamb(StateWalk& walk, std::span<const TensorRates> rates, const Update& update, const comm::RankGroups& groups) {
  const kernels::StateExec& on = walk.on();
  DeviceNorms norms(walk);
  walk.for_batches(update.from, update.to, [&](std::span<const StateBlock> batch) {
    std::vector<kernels::AdamRun> runs = adam_runs(walk, rates, update, batch);
    std::ranges::stable_partition(runs, &kernels::AdamRun::counts);
    on.lamb_moments_of_runs(runs, norms.partials_of(batch));
  });
  const DevicePtr<double> words = norms.add_up();
  RT_TRY(add_over_world(groups, words, walk.rank().tensor_norms, "norms of tensors"));
  const auto step = [&](std::span<const StateBlock> batch) {
    on.lamb_step_of_runs(adam_runs(walk, rates, update, batch), words);
    for (const StateBlock& block : batch) walk.sum_up(block);
  };
  walk.for_batches(update.from, update.to, step, StateWalk::Pieces::kTrainedAgain);
  return {};
}

}  // namespace cairn::optim
