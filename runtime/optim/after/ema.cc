#include "runtime/optim/after/ema.h"

#include "runtime/kernels/ema.h"

namespace cairn::optim {

void average_weights(StateWalk& walk, double decay, int64_t from, int64_t to) {
  for (const auto pieces : {StateWalk::Pieces::kTrained, StateWalk::Pieces::kBalancing}) {
    walk.for_blocks(
        from, to,
        [&](const StateBlock& block) {
          if (block.saved < 0) return;
          walk.note_sum(block, walk.rank().saved_arrays - 1,
                        kernels::ema(decay, block.to.master, block.from.ema, block.to.ema, block.count));
        },
        pieces);
  }
}

}  // namespace cairn::optim
