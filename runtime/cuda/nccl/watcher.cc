#include "runtime/cuda/nccl/watcher.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace cairn::cuda {

Watcher::Watcher(Communicators& comms, int64_t deadline_ms, WatcherHooks hooks)
    : comms_(comms),
      deadline_(deadline_ms),
      period_(std::clamp<int64_t>(deadline_ms / 16, 1, 50)),
      hooks_(std::move(hooks)),
      thread_([this] { run(); }) {}

Watcher::~Watcher() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Watcher::watch(const CudaStream& stream, std::string name, std::shared_ptr<const std::vector<int64_t>> others,
                    std::shared_ptr<const Event> begin, std::shared_ptr<const Event> end) {
  const std::lock_guard lock(mutex_);
  Line& line = lines_[&stream];
  line.operations.push_back({.name = std::move(name),
                             .others = std::move(others),
                             .begin = std::move(begin),
                             .end = std::move(end),
                             .number = ++line.last,
                             .step = step_,
                             .phase = phase_,
                             .since = {}});
}

void Watcher::know(int64_t rank, std::vector<std::string> host_of_rank) {
  const std::lock_guard lock(mutex_);
  rank_ = rank;
  host_of_rank_ = std::move(host_of_rank);
  several_hosts_ =
      std::ranges::any_of(host_of_rank_, [&](const std::string& host) { return host != host_of_rank_[0]; });
}

std::string Watcher::host_of(int64_t rank) const {
  const auto at = static_cast<size_t>(rank);
  return at < host_of_rank_.size() ? host_of_rank_[at] : "an unknown host";
}

void Watcher::at(int64_t step, std::string_view phase) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  phase_ = phase;
}

Status Watcher::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

void Watcher::fail(Error error, bool tell) {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_.ok()) return;
    failed_ = error;
  }
  if (hooks_.failed) hooks_.failed(error);
  if (tell && hooks_.give_up) hooks_.give_up(error);  // first: an abort may hang
  comms_.abort(error);
}

Status Watcher::look_at(Line& line) {
  while (!line.operations.empty()) {
    Operation& front = line.operations.front();
    RT_TRY_SET(const bool ended, is_reached(*front.end));
    if (ended) {
      line.operations.pop_front();
      continue;
    }
    if (!front.since) {
      RT_TRY_SET(const bool begun, is_reached(*front.begin));
      if (!begun) return {};
      front.since = Clock::now();
    }
    const auto waited = Clock::now() - *front.since;
    if (waited > period_) RT_TRY(look_at_others(front, waited > deadline_));
    return {};
  }
  return {};
}

Status Watcher::look_at_others(const Operation& operation, bool late) const {
  constexpr size_t kTold = 4;
  std::vector<std::string> stopped, others;
  for (const int64_t rank : *operation.others) {
    const auto seen = hooks_.look_at ? hooks_.look_at(rank) : std::nullopt;
    if (!seen) {
      others.push_back(fmt::format("rank {} is on {}", rank, host_of(rank)));
      continue;
    }
    if (seen->lost) {
      return Error{ErrorCode::kPeerLost, fmt::format("{}: {}{}", operation.name, seen->text,
                                                     several_hosts_ ? ", on " + host_of(rank) : std::string())};
    }
    (seen->stopped ? stopped : others).push_back(seen->text);
  }
  if (!late) return {};
  const std::string place =
      operation.step < 0 ? "before the first step" : fmt::format("step {} ({})", operation.step, operation.phase);
  std::string out =
      fmt::format("{}: not done after {} ms on the device of rank {} on {} (operation {} of its stream, {})",
                  operation.name, deadline_.count(), rank_, host_of(rank_), operation.number, place);
  std::vector<std::string>& told = stopped.empty() ? others : stopped;
  for (size_t k = 0; k < std::min(kTold, told.size()); ++k) out += "; " + told[k];
  if (told.size() > kTold) out += fmt::format("; and {} ranks more", told.size() - kTold);
  return Error{ErrorCode::kTimeout, std::move(out)};
}

Status Watcher::look() {
  const std::lock_guard lock(mutex_);
  for (auto& [stream, line] : lines_) RT_TRY(look_at(line));
  return {};
}

std::string Watcher::longest() const {
  const std::lock_guard lock(mutex_);
  const Operation* found = nullptr;
  for (const auto& [stream, line] : lines_) {
    if (line.operations.empty() || !line.operations.front().since) continue;
    if (found == nullptr || *line.operations.front().since < *found->since) found = &line.operations.front();
  }
  return found == nullptr ? "" : found->name;
}

void Watcher::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, period_, [&] { return stop_; });
    if (stop_ || !failed_.ok()) continue;
    lock.unlock();
    Status found = comms_.poll();
    if (found.ok()) found = look();
    // Asked behind the look: a rank that is gone may have given up before it left, and said why.
    if (std::optional<Error> others = hooks_.others_failed ? hooks_.others_failed() : std::nullopt) {
      const std::string waits = longest();
      fail(waits.empty() ? *std::move(others) : (*std::move(others)).with(waits), false);
    } else if (!found.ok()) {
      fail(std::move(found).error(), true);
    }
    lock.lock();
  }
}

void Watcher::wait_for_rest() {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (!failed_.ok()) return;
      bool rests = true;
      for (auto& [stream, line] : lines_) {
        if (const Status looked = look_at(line); !looked.ok()) return;  // the thread will see it too
        rests = rests && line.operations.empty();
      }
      if (rests) return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace cairn::cuda
