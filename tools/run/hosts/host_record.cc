#include "tools/run/hosts/host_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

namespace cairn::tools {

using agent::FailureClass;
using agent::Remedy;
using agent::Restart;

Restart HostRecord::judge(int64_t host, const agent::Failure& failure, int64_t step, double now_s, bool spare) {
  const FailureClass which = failure.failure_class;
  const agent::ClassRule& rule = agent::rule_of(which);
  const auto before = std::ranges::count_if(
      failures_, [&](const One& one) { return one.host == host && now_s - one.at_s <= kHostTriesWithinS; });
  const bool had_it =
      std::ranges::any_of(failures_, [&](const One& one) { return one.host == host && one.which == which; });
  const bool same = std::ranges::all_of(failures_, [&](const One& one) {
    return one.host != host || now_s - one.at_s > kHostTriesWithinS ||
           (one.which == which && std::abs(one.step - step) <= 1);  // the last one may not have been reported
  });
  // What tells of another's end is no failure of this host.
  if (which != FailureClass::kSymptom) failures_.push_back({host, step, which, now_s});
  reason_ = rule.words;
  switch (rule.remedy) {
    case Remedy::kThenMove:
      if (had_it && spare) return Restart::kElsewhere;
      break;
    case Remedy::kMove:
      return spare ? Restart::kElsewhere : Restart::kEnd;
    case Remedy::kMoveOnce: {
      const bool again = std::ranges::find(moved_, which) != moved_.end();
      if (again || !spare) return Restart::kEnd;
      moved_.push_back(which);
      return Restart::kElsewhere;
    }
    case Remedy::kLeave:
    case Remedy::kNever:
      return agent::restart_here(which);
    case Remedy::kInPlace:
      break;
  }
  if (!spare || which == FailureClass::kSymptom || before + 1 < kHostTries) return Restart::kInPlace;
  const bool own = which == FailureClass::kCrash || which == FailureClass::kError;  // not a hang: its links may do that
  if (own && same) return Restart::kInPlace;
  reason_ = fmt::format("{} failures of its ranks in {:.0f} min without progress, the last: {}", before + 1,
                        kHostTriesWithinS / 60, rule.words);
  return Restart::kElsewhere;
}

}  // namespace cairn::tools
