#pragma once
// Dynamic loss scale of fp16 training. The loss is multiplied by the scale before backward, so that small gradients do
// not vanish in half precision, and gradients are divided by it before clipping. A step whose gradients overflow is
// skipped and the scale halved; after a window of steps without one it doubles. Source: Micikevicius et al. 2018,
// section 3.2; hysteresis as in Megatron-LM's DynamicGradScaler.

#include <cstdint>

#include "runtime/config/optimizer.h"
#include "runtime/core/result.h"

namespace cairn::optim {

/// Part of the training position; all zero when the precision needs no scale.
struct LossScale {
  double scale = 0;
  int64_t good_steps = 0;       // in a row since the last overflow or growth
  int64_t hysteresis_left = 0;  // overflows that are still forgiven: skipped without a smaller scale
  int64_t skipped = 0;          // steps of the whole run without an update
  bool operator==(const LossScale&) const = default;
};

LossScale initial_loss_scale(const LossScaleConfig& config);

/// The state after a step with or without overflow. Errors: kGuard when the gradients overflow at the smallest scale.
Result<LossScale> next_loss_scale(const LossScaleConfig& config, LossScale state, bool overflow);

}  // namespace cairn::optim
