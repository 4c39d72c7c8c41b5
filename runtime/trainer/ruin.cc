#include "runtime/trainer/ruin.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

namespace cairn::trainer {

bool RuinReport::ruined() const {
  if (ruined_weights > 0 || !std::isfinite(other_loss)) return true;
  return samples.empty() && vocab > 1 && other_loss > 1.5 * std::log(static_cast<double>(vocab)) + 1;
}

std::string to_text(const RuinReport& report) {
  const int64_t before = report.step - 1;
  std::string text = fmt::format("step {}: loss {}, gradient norm {}, not finite when computed again either; ",
                                 report.step, report.loss, report.norm);
  const std::string batch = report.own_batch ? fmt::format("on step {}'s own batch", before) : "on the batch behind it";
  const std::string whose = before == 0 ? "the initial weights" : fmt::format("the weights of step {}", before);
  if (report.ruined()) {
    if (report.ruined_weights > 0) {
      text += fmt::format("{} values of {} are not finite", report.ruined_weights, whose);
    } else {
      text += fmt::format("{} give loss {} {} too", whose, report.other_loss, batch);
    }
    return text + (before == 0 ? ": the run begins with weights of no use"
                               : fmt::format(": the update of step {} has ruined them, and it is not saved", before));
  }
  text += fmt::format("{} are finite and give loss {:.4g} {}, so the batch of step {} did it: ", whose,
                      report.other_loss, batch, report.step);
  if (report.samples.empty()) return text + "no sample's loss is other than finite, the gradients are";
  return text + fmt::format(
                    "samples whose loss is not finite: {}. \"cairn data samples RUN --step {} --text\" shows all "
                    "of the step",
                    fmt::join(report.samples, "; "), report.step);
}

}  // namespace cairn::trainer
