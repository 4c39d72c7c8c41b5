#include "runtime/device/op_clock.h"

#include <algorithm>

#include "runtime/core/check.h"

namespace cairn {

Status HostTimer::read(std::span<double> ms) {
  RT_CHECK(ms.size() <= marked_ns_.size(), "{} moments of {}", ms.size(), marked_ns_.size());
  for (size_t i = 0; i < ms.size(); ++i) {
    ms[i] = last_ns_ < 0 ? 0 : static_cast<double>(marked_ns_[i] - last_ns_) * 1e-6;
    last_ns_ = marked_ns_[i];
  }
  marked_ns_.erase(marked_ns_.begin(), marked_ns_.begin() + std::ssize(ms));
  return {};
}

double OpTimes::steps_ms() const {
  double out = gaps_ms;
  for (const OpTime& op : ops) out += op.ms;
  return out;
}

OpClock::OpClock(Stream& stream, std::unique_ptr<StreamTimer> timer) : stream_(stream), timer_(std::move(timer)) {
  stream_.use_clock(this);
}

OpClock::~OpClock() { stream_.use_clock(nullptr); }

void OpClock::mark(Kind kind, Sum* sum) {
  timer_->mark();
  marked_.push_back({kind, sum, stream_.settled()});
}

void OpClock::begin_step() {
  RT_CHECK(!in_step_, "a step of a clock inside a step");
  in_step_ = true;
  mark(Kind::kStepBegins);
}

void OpClock::end_step() {
  RT_CHECK(in_step_ && depth_ == 0, "a clock's step ends that has not begun, or inside an op");
  mark(Kind::kStepEnds);
  in_step_ = false;
  ignore(read_settled(), "the stream and times() have it");
}

void OpClock::begin(std::string_view name, const OpDims& dims) {
  if (depth_++ > 0 || !in_step_) return;
  const std::pair kind(name, dims);
  auto found = sums_.find(kind);
  if (found == sums_.end()) {
    const bool room = sums_.size() < kMostKinds;
    found = sums_.try_emplace(room ? kind : std::pair(name, OpDims())).first;
  }
  now_ = &found->second;
  mark(Kind::kOpBegins);
}

void OpClock::end() {
  if (--depth_ > 0 || !in_step_) return;
  mark(Kind::kOpEnds, now_);
}

Status OpClock::read_settled() {
  const auto end =
      std::ranges::find_if(marked_, [now = stream_.settled()](const Moment& m) { return m.settled >= now; });
  const auto count = static_cast<size_t>(end - marked_.begin());
  ms_.resize(count);
  if (failed_.ok()) failed_ = timer_->read(ms_);
  if (failed_.ok()) {
    for (size_t i = 0; i < count; ++i) add(marked_[i].kind, marked_[i].sum, ms_[i]);
  }
  marked_.erase(marked_.begin(), end);
  return failed_;
}

void OpClock::add(Kind kind, Sum* sum, double ms) {
  if (kind == Kind::kStepBegins) ++steps_begun_;  // time between steps counts for none
  if (kind == Kind::kStepBegins || steps_begun_ <= kWarmUpSteps) return;
  if (kind == Kind::kOpEnds) {
    ++sum->calls;
    sum->ms += ms;
  } else {
    gaps_ms_ += ms;
  }
  if (kind == Kind::kStepEnds) ++steps_ended_;
}

Result<OpTimes> OpClock::times() {
  RT_CHECK(!in_step_, "times are asked for inside a step");
  RT_TRY(read_settled());
  RT_CHECK(marked_.empty(), "times are asked for before the stream is settled");
  OpTimes out{.steps = steps_ended_, .left_out = std::min(steps_begun_, kWarmUpSteps), .ops = {}, .gaps_ms = gaps_ms_};
  for (const auto& [kind, sum] : sums_) {
    if (sum.calls == 0) continue;  // of the first steps only
    const auto& [name, dims] = kind;
    out.ops.push_back({.name = std::string(name),
                       .sizes = {dims.sizes().begin(), dims.sizes().end()},
                       .words = {dims.words().begin(), dims.words().end()},
                       .calls = sum.calls,
                       .ms = sum.ms});
  }
  std::ranges::stable_sort(out.ops, std::ranges::greater(), &OpTime::ms);
  return out;
}

}  // namespace cairn
