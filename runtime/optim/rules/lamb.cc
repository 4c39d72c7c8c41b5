#include "runtime/optim/rules/lamb.h"

#include <cmath>
#include <vector>

#include "runtime/optim/rules/adamw.h"
#include "runtime/optim/rules/tensor_squares.h"

namespace cairn::optim {

Status lamb(StateWalk& walk, std::span<const TensorRates> rates, const Update& update, comm::Comm& world) {
  NormsOfTensors norms(walk, true);
  walk.for_batches(update.from, update.to, [&](std::span<const StateBlock> batch) {
    walk.on().lamb_moments_of_runs(adam_runs(walk, rates, update, batch), norms.of(batch));
  });
  RT_TRY_SET(const std::vector<TensorSquares> squares, norms.add_over_world(world));
  walk.for_batches(update.from, update.to, [&](std::span<const StateBlock> batch) {
    std::vector<kernels::AdamRun> runs = adam_runs(walk, rates, update, batch);
    for (size_t k = 0; k < runs.size(); ++k) {
      const TensorSquares& of = squares[batch[k].piece->tensor];
      const double weight = std::sqrt(of.weight), step = std::sqrt(of.step);
      runs[k].trust = static_cast<float>(weight > 0 && step > 0 ? weight / step : 1.0);
    }
    walk.on().lamb_step_of_runs(runs);
    for (const StateBlock& block : batch) walk.sum_up(block);
  });
  return {};
}

}  // namespace cairn::optim
