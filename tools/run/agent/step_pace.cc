#include "tools/run/agent/step_pace.h"

#include <algorithm>
#include <utility>

namespace cairn::tools {
namespace {

constexpr size_t kLongest = 2;  // steps of a window that do not count

double sum_without_longest(const auto& steps, auto value) {
  double out = 0;
  for (size_t k = kLongest; k < steps.size(); ++k) out += steps[k].*value;
  return out;
}

}  // namespace

void StepPace::clear() {
  left_out_ = 0;
  window_.clear();
}

std::optional<StepPace::News> StepPace::add(int64_t step, double ms, int64_t tokens) {
  const int64_t trained = tokens - std::exchange(tokens_, tokens);
  if (trained <= 0 || !(ms > 0)) return std::nullopt;
  if (left_out_ < kSteps) {
    ++left_out_;
    return std::nullopt;
  }
  window_.push_back({ms, ms / static_cast<double>(trained)});
  // The longest come first, the rest in any order.
  for (size_t k = 0; k < std::min(kLongest, window_.size() - 1); ++k)
    if (window_.back().ms > window_[k].ms) std::swap(window_.back(), window_[k]);
  if (std::ssize(window_) < kSteps || sum_without_longest(window_, &Step::ms) < 1000 * kWindowS) return std::nullopt;
  const std::optional<News> news = judge(step);
  window_.clear();
  return news;
}

std::optional<StepPace::News> StepPace::judge(int64_t step) {
  const auto steps = static_cast<double>(window_.size() - kLongest);
  const double now = sum_without_longest(window_, &Step::token_ms) / steps;
  fastest_ = std::min(fastest_.value_or(now), now);
  const double ratio = now / *fastest_;
  const bool turns = slow_ ? ratio <= kOver : ratio >= kSlow;
  if (!turns) return std::nullopt;
  slow_ = !slow_;
  return News{.over = !slow_, .step = step, .ratio = ratio, .step_ms = sum_without_longest(window_, &Step::ms) / steps};
}

}  // namespace cairn::tools
