#include "runtime/cuda/time_calls.h"

#include <algorithm>
#include <array>
#include <memory>

#include "runtime/device/op_clock.h"

namespace cairn::cuda {

Result<double> time_us(CudaStream& on, const std::function<Status()>& order) {
  constexpr int kRounds = 3;
  constexpr double kRoundMs = 2;  // of short work several calls, whose mean is taken
  constexpr int kLeastCalls = 2, kMostCalls = 12;
  const std::unique_ptr<StreamTimer> timer = on.make_timer();
  const auto round = [&](int calls) -> Result<double> {
    timer->mark();
    for (int call = 0; call < calls; ++call) RT_TRY(order());
    timer->mark();
    RT_TRY(on.settle());
    std::array<double, 2> ms{};
    RT_TRY(timer->read(ms));
    return ms[1] / calls;
  };
  RT_TRY_SET(double best, round(1));
  const int calls = std::clamp(static_cast<int>(kRoundMs / std::max(best, 1e-3)), kLeastCalls, kMostCalls);
  for (int k = 0; k < kRounds; ++k) {
    RT_TRY_SET(const double ms, round(calls));
    best = k == 0 ? ms : std::min(best, ms);
  }
  return best * 1e3;
}

}  // namespace cairn::cuda
