#include "tools/run/agent/overdue.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "runtime/core/count_text.h"

namespace cairn::tools {
namespace {

constexpr double kLineEveryS = 60;

}  // namespace

std::vector<OverdueSaves::News> OverdueSaves::look(const std::set<int64_t>& under_way, double now_s) {
  std::erase_if(saves_, [&](const auto& one) { return !under_way.contains(one.first); });
  std::vector<News> out;
  for (const int64_t step : under_way) {
    Save& save = saves_.try_emplace(step, Save{now_s, now_s + patience_s_}).first->second;
    if (now_s < save.next_s) continue;
    const double seconds = now_s - save.since_s;
    out.push_back({step, seconds});
    save.next_s = save.since_s + 2 * seconds;
  }
  return out;
}

void OverdueSaves::took(double seconds) { patience_s_ = std::max(patience_s_, 3 * seconds); }

std::optional<std::string> FailedSaves::failed(int64_t step, std::string text, double now_s) {
  if (!line_s_ || (counted_ == 0 && now_s - *line_s_ >= kLineEveryS)) {
    line_s_ = now_s;
    return text;
  }
  if (counted_++ == 0) first_ = step;
  last_ = step;
  text_ = std::move(text);
  return due(now_s);
}

std::optional<std::string> FailedSaves::due(double now_s, bool at_end) {
  if (counted_ == 0 || (!at_end && now_s - *line_s_ < kLineEveryS)) return std::nullopt;
  line_s_ = now_s;
  const int64_t count = std::exchange(counted_, 0);
  if (count == 1) return std::exchange(text_, {});
  return fmt::format("{} failed, of steps {} to {}; the last: {}", count_text(count, "more save"), first_, last_,
                     std::exchange(text_, {}));
}

}  // namespace cairn::tools
