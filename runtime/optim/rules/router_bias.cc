#include "runtime/optim/rules/router_bias.h"

#include "runtime/plan/model_tensors.h"

namespace cairn::optim {

void router_bias(StateWalk& walk, std::span<const TensorRates> rates, const Update& update) {
  const MoeConfig& moe = walk.plan().recipe.model.moe;
  if (!has_choice_bias(walk.plan().recipe.model)) return;  // those that stay are gone through too: their sums are kept
  const auto mean =
      static_cast<float>(static_cast<double>(update.tokens * moe.top_k) / static_cast<double>(moe.experts));
  walk.for_blocks(
      update.from, update.to,
      [&](const StateBlock& block) {
        const auto rate = static_cast<float>(rates[block.piece->tensor].lr > 0 ? moe.bias_rate : 0);
        walk.on().balance_bias(rate, mean, update.clip, block.grad, block.from.master, block.to.master, block.count);
        for (const auto moment : {&kernels::StateArrays::exp_avg, &kernels::StateArrays::exp_avg_sq}) {
          if (block.from.*moment != block.to.*moment)
            walk.on().copy_state(block.from.*moment, block.to.*moment, block.count);
        }
        walk.put_weights(block);
        walk.sum_up(block);
      },
      StateWalk::Pieces::kBalancing);
}

}  // namespace cairn::optim
