#include "runtime/optim/after/ema.h"

namespace cairn::optim {

void average_weights(StateWalk& walk, double decay, int64_t from, int64_t to, DevicePtr<const kernels::Clip> clip) {
  for (const auto pieces : {StateWalk::Pieces::kTrainedAgain, StateWalk::Pieces::kBalancingAgain}) {
    walk.for_batches(
        from, to,
        [&](std::span<const StateBlock> batch) {
          std::vector<kernels::EmaRun> runs;
          for (const StateBlock& block : batch) {
            if (block.saved < 0) continue;
            runs.push_back({block.to.master, block.from.ema, block.to.ema, block.count,
                            walk.sums_of(block, walk.rank().saved_arrays - 1, 1), clip});
          }
          walk.on().ema_of_runs(decay, runs);
        },
        pieces);
  }
}

}  // namespace cairn::optim
