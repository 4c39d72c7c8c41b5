#pragma once
// How long a stream's device takes for some work, by its own clock.

#include <functional>

#include "runtime/core/result.h"
#include "runtime/cuda/stream.h"

namespace cairn::cuda {

/// Microseconds that one call of `order` takes, which orders work on this stream: the best of three rounds, of several
/// calls each where they are short. The stream does nothing else meanwhile. Errors: of `order`; of the stream.
Result<double> time_us(CudaStream& on, const std::function<Status()>& order);

/// A way is taken instead of the first only where it is faster by so much of the time: below that it would follow
/// noise.
constexpr double kWorthwhile = 0.03;

}  // namespace cairn::cuda
