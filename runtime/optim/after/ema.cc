#include "runtime/optim/after/ema.h"

namespace cairn::optim {

void average_weights(StateWalk& walk, double decay, int64_t from, int64_t to) {
  for (const auto pieces : {StateWalk::Pieces::kTrained, StateWalk::Pieces::kBalancing}) {
    walk.for_blocks(
        from, to,
        [&](const StateBlock& block) {
          if (block.saved < 0) return;
          walk.on().ema(decay, block.to.master, block.from.ema, block.to.ema, block.count,
                        walk.sums_of(block, walk.rank().saved_arrays - 1, 1));
        },
        pieces);
  }
}

}  // namespace cairn::optim
