#pragma once
// What an update rule is told. A rule is a function over the walk of a rank's state (runtime/optim/walk): it makes the
// state of bank `to` from that of bank `from` and the reduced gradients, puts the weights that forward and backward
// read, and notes the checksums of what it writes.

#include <cstdint>

namespace cairn::optim {

/// One update; the same on all ranks.
struct Update {
  int64_t number = 1;        // counts from 1 (bias correction)
  double lr = 0;             // of the step; groups of parameters have theirs as multiples (groups.h)
  float grad_scale = 1;      // the clip coefficient, by which gradients are multiplied
  int64_t from = 0, to = 0;  // banks, which may be the same; a kill leaves `from` whole if it is another
  int64_t tokens = 0;        // of the step
};

}  // namespace cairn::optim
