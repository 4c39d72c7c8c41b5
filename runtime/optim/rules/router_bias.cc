#include "runtime/optim/rules/router_bias.h"

#include <algorithm>

namespace cairn::optim {

void router_bias(StateWalk& walk, std::span<const TensorRates> rates, const Update& update) {
  const MoeConfig& moe = walk.plan().recipe.model.moe;
  if (moe.bias_rate == 0) return;
  const auto mean =
      static_cast<float>(static_cast<double>(update.tokens * moe.top_k) / static_cast<double>(moe.experts));
  walk.for_blocks(
      update.from, update.to,
      [&](const StateBlock& block) {
        const float* const choices = block.grad;
        const auto rate = static_cast<float>(rates[block.piece->tensor].lr > 0 ? moe.bias_rate : 0);
        for (int64_t i = 0; i < block.count; ++i) {
          const float step = choices[i] < mean ? rate : choices[i] > mean ? -rate : 0.0f;
          block.to.master[i] = block.from.master[i] + step;
        }
        for (float* kernels::StateArrays::*const moment :
             {&kernels::StateArrays::exp_avg, &kernels::StateArrays::exp_avg_sq}) {
          if (block.from.*moment != block.to.*moment) std::copy_n(block.from.*moment, block.count, block.to.*moment);
        }
        walk.put_weights(block);
        walk.note_sums(block);
      },
      StateWalk::Pieces::kBalancing);
}

}  // namespace cairn::optim
