#include "runtime/telemetry/step_level.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/core/robust_level.h"

namespace cairn::telemetry {
namespace {

/// How many robust deviations `x` lies above the window; 0 with less than half a window.
double deviations(float x, std::vector<float> window, int64_t full, double floor) {
  if (static_cast<int64_t>(window.size()) < std::max<int64_t>(1, full / 2)) return 0;
  return RobustLevel::of(std::move(window), floor).deviations(x);
}

}  // namespace

double loss_ceiling(int64_t vocab) { return 1.5 * std::log(static_cast<double>(std::max<int64_t>(2, vocab))) + 1; }

StepVerdict judge_step(const WatchRules& rules, const StepNumbers& numbers, std::vector<float> losses,
                       std::vector<float> norms) {
  StepVerdict out{.loss = static_cast<float>(numbers.loss), .norm = static_cast<float>(std::log(numbers.grad_norm))};
  if (numbers.skipped && std::isnan(numbers.loss)) return {};  // no token of its batch counted: it says nothing
  const bool judged = numbers.step >= rules.begin;
  if (std::isfinite(out.loss)) {
    const double z = judged ? deviations(out.loss, std::move(losses), rules.window, rules.loss_floor) : 0;
    out.above = rules.ceiling > 0 && numbers.loss > rules.ceiling;
    out.downward = z < -rules.limit;
    if (out.above) {
      out.why =
          fmt::format("loss {:.4g}, above {:.4g}, which is worse than knowing nothing", numbers.loss, rules.ceiling);
    } else if (z > rules.limit) {
      out.why = fmt::format("loss {:.4g}, {:.1f} deviations above the steps before", numbers.loss, z);
    }
    out.upward = !out.why.empty();
    out.loss_counts = !out.upward && !out.downward;
    if (out.downward && !out.upward)
      out.why = fmt::format("loss {:.4g}, {:.1f} deviations below the steps before", numbers.loss, -z);
  } else {
    out.upward = true;
    out.why = fmt::format("loss {}", numbers.loss);
  }
  if (std::isfinite(out.norm)) {
    const double z = judged ? deviations(out.norm, std::move(norms), rules.window, rules.norm_floor) : 0;
    if (z > rules.limit) {  // the event names the norm where both are outliers
      out.upward = true;
      out.why = fmt::format("gradient norm {:.4g}, {:.1f} deviations above the steps before", numbers.grad_norm, z);
    }
    out.norm_counts = !(z > rules.limit);
  }
  return out;
}

}  // namespace cairn::telemetry
