#pragma once
// What an update rule is told. A rule is a function over the walk of a rank's state (runtime/optim/walk): it makes the
// state of bank `to` from that of bank `from` and the reduced gradients, puts the weights that forward and backward
// read, and notes the checksums of what it writes.

#include <array>
#include <cstdint>

#include "runtime/device/pointer.h"
#include "runtime/kernels/clip.h"

namespace cairn::optim {

/// Words of an ExactSum.
using SquaredNorm = std::array<double, ExactSum::kWords>;

/// One update; the same on all ranks.
struct Update {
  int64_t number = 1;          // counts from 1 (bias correction)
  double lr = 0;               // of the step; groups of parameters have theirs as multiples (groups.h)
  SquaredNorm squared_norm{};  // of the gradients, over the world
  kernels::ClipNumbers gradients;
  DevicePtr<const kernels::Clip> clip;  // of both, on the device, where ShardedOptimizer puts it
  int64_t from = 0, to = 0;             // banks, which may be the same; a kill leaves `from` whole if it is another
  int64_t tokens = 0;                   // of the step
};

}  // namespace cairn::optim
