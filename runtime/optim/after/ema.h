#pragma once
// The moving average of the weights that a rank saves, after an update (runtime/kernels/ema.h).

#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

/// The average goes from bank `from` into bank `to`, towards the masters that lie there; where `clip` is not finite it
/// stays as it is.
void average_weights(StateWalk& walk, double decay, int64_t from, int64_t to, DevicePtr<const kernels::Clip> clip);

}  // namespace cairn::optim
