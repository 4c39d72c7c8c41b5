#include "runtime/optim/rules/lamb.h"

#include <cmath>
#include <vector>

#include "runtime/optim/rules/adamw.h"
#include "runtime/optim/rules/tensor_squares.h"

namespace cairn::optim {

Status lamb(StateWalk& walk, std::span<const TensorRates> rates, const Update& update, comm::Comm& world) {
  const auto args_of = [&](const StateBlock& block) {
    return adamw_args(walk.plan().recipe.optimizer, rates[block.piece->tensor], update);
  };
  NormsOfTensors norms(walk);
  walk.for_blocks(update.from, update.to, [&](const StateBlock& block) {
    walk.on().lamb_moments(args_of(block), block.grad, block.from, block.to, block.count, norms.of(block));
  });
  RT_TRY_SET(const std::vector<TensorSquares> squares, norms.add_over_world(world));
  walk.for_blocks(update.from, update.to, [&](const StateBlock& block) {
    const double weight = std::sqrt(squares[block.piece->tensor].weight);
    const double step = std::sqrt(squares[block.piece->tensor].step);
    const double trust = weight > 0 && step > 0 ? weight / step : 1.0;
    walk.on().lamb_step(args_of(block), static_cast<float>(trust), block.from, block.to, block.count);
    walk.put_weights(block);
    walk.sum_up(block);
  });
  return {};
}

}  // namespace cairn::optim
