#include "tools/run/overdue.h"

#include <algorithm>

namespace cairn::tools {

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

}  // namespace cairn::tools
