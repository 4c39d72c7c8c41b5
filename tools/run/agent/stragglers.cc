#include "tools/run/agent/stragglers.h"

#include <algorithm>

namespace cairn::tools {
namespace {

constexpr double kShare = 0.75;    // of blocks
constexpr size_t kMostOpen = 256;  // blocks that some rank has not told of: then it is not waited for

}  // namespace

void Stragglers::clear() {
  open_.clear();
  ranks_.clear();
  window_s_ = -1;
}

void Stragglers::add(int64_t rank, const telemetry::Pace& pace, const agent::HostLoad& load) {
  if (rank < 0 || rank >= std::ssize(stage_)) return;
  Rank& one = ranks_[rank];
  agent::HostLoad sum = load;
  sum.throttled += one.load.throttled;
  sum.delayed += one.load.delayed;
  one.load = sum;
  ++one.loads;
  std::map<int64_t, telemetry::Pace>& block = open_[pace.step];
  block[rank] = pace;
  if (std::ssize(block) == std::ssize(stage_)) {
    close(pace.step, block);
    open_.erase(pace.step);
  }
  if (open_.size() > kMostOpen) open_.erase(open_.begin());
}

void Stragglers::close(int64_t step, const std::map<int64_t, telemetry::Pace>& block) {
  step_ = std::max(step_, step);
  std::map<int64_t, std::vector<double>> of_stage;
  for (const auto& [rank, pace] : block) of_stage[stage_[static_cast<size_t>(rank)]].push_back(pace.ms);
  for (auto& [stage, times] : of_stage) std::ranges::sort(times);
  for (const auto& [rank, pace] : block) {
    const std::vector<double>& times = of_stage[stage_[static_cast<size_t>(rank)]];
    const double median = times[(times.size() - 1) / 2];  // of two the faster one
    Rank& one = ranks_[rank];
    ++one.blocks;
    one.ratio += median > 0 ? pace.ms / median : 1;
    if (times.size() > 1 && pace.ms > kSlow * median) ++one.slow;
  }
}

agent::HostLoad Stragglers::take_load(Rank& rank) {
  agent::HostLoad out = rank.load;
  const auto loads = static_cast<double>(std::max<int64_t>(1, rank.loads));
  out.throttled /= loads;
  out.delayed /= loads;
  rank.load.throttled = rank.load.delayed = 0;
  rank.loads = 0;
  return out;
}

std::vector<Stragglers::News> Stragglers::judge(double now_s) {
  std::vector<News> out;
  const bool any = std::ranges::any_of(ranks_, [](const auto& one) { return one.second.blocks > 0; });
  if (window_s_ < 0) {
    window_s_ = now_s;
    return out;
  }
  if (!any || now_s - window_s_ < kWindowS) return out;
  for (auto& [rank, one] : ranks_) {
    if (one.blocks == 0) continue;
    const auto blocks = static_cast<double>(one.blocks);
    const bool slow = static_cast<double>(one.slow) >= kShare * blocks;
    // Between the two a straggler stays one.
    const bool well = static_cast<double>(one.slow) <= (1 - kShare) * blocks;
    const agent::HostLoad load = take_load(one);
    const agent::SlowCause cause = agent::cause_of(load);
    const bool turns = slow != one.straggles && (slow || well);
    if (turns || (slow && cause > one.told)) {
      one.straggles = slow;
      one.told = slow ? cause : agent::SlowCause::kUnknown;
      out.push_back({.rank = rank, .over = !slow, .ratio = one.ratio / blocks, .step = step_, .load = load});
    }
    one.before = one.ratio / blocks;
    one.blocks = one.slow = 0;
    one.ratio = 0;
  }
  window_s_ = now_s;
  return out;
}

std::optional<Stragglers::Slowest> Stragglers::slowest() const {
  std::optional<Slowest> out;
  for (const auto& [rank, one] : ranks_) {
    const double ratio = one.blocks > 0 ? one.ratio / static_cast<double>(one.blocks) : one.before;
    if (ratio > kSlow && (!out || ratio > out->ratio)) out = Slowest{rank, ratio};
  }
  return out;
}

}  // namespace cairn::tools
