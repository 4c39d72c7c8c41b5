#include "runtime/optim/loss_scale.h"

#include <algorithm>

namespace cairn::optim {

LossScale initial_loss_scale(const LossScaleConfig& config) {
  return {.scale = config.initial, .hysteresis_left = config.hysteresis};
}

Result<LossScale> next_loss_scale(const LossScaleConfig& config, LossScale state, bool overflow) {
  constexpr double kLargest = 0x1p96;  // scaled losses stay far from the end of float's range
  if (!overflow) {
    ++state.good_steps;
    if (config.window > 0 && state.good_steps >= config.window) {  // it may be lower than it was, in a run under way
      state.good_steps = 0;
      state.hysteresis_left = config.hysteresis;
      state.scale = std::min(state.scale * 2, kLargest);
    }
    return state;
  }
  ++state.skipped;
  state.good_steps = 0;
  state.hysteresis_left = std::max<int64_t>(0, state.hysteresis_left - 1);
  if (state.hysteresis_left > 0) return state;
  if (state.scale <= config.min) {
    return Error{ErrorCode::kGuard,
                 fmt::format("gradients overflow fp16 at loss_scale.min = {}: a lower learning rate, a lower "
                             "optimizer.clip or precision = \"bf16\" may help",
                             config.min)};
  }
  state.scale = std::max(state.scale / 2, config.min);
  return state;
}

}  // namespace cairn::optim
