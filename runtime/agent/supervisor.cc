#include "runtime/agent/supervisor.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "runtime/agent/event_pipe.h"
#include "runtime/json/json.h"

namespace cairn::agent {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kTailLines = 5;        // of a log, in messages
constexpr int64_t kLastLines = 20;       // in Failure
constexpr int64_t kLeaveLimitMs = 2000;  // how long who leaves at once waits for killed children to go

// Keys of the epoll set: what it is in the upper half, which one in the lower.
enum class Source : uint64_t { kSignals = 1, kWake, kEvents, kExit, kWatched };
constexpr uint64_t key_of(Source source, int64_t index) {
  return static_cast<uint64_t>(source) << 32 | static_cast<uint64_t>(index);
}

std::string join_lines(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += "\n    " + line;
  return out;
}

}  // namespace

Restart restart_here(FailureClass which) {
  switch (rule_of(which).remedy) {
    case Remedy::kInPlace:
    case Remedy::kThenMove:
      return Restart::kInPlace;
    case Remedy::kLeave:
      return Restart::kLeave;
    case Remedy::kMove:
    case Remedy::kMoveOnce:
    case Remedy::kNever:
      break;
  }
  return Restart::kEnd;
}

struct Supervisor::Child {
  int64_t rank = 0;
  ChildProcess process;
  LineSplitter lines;
  bool running = true;
  bool killed = false;          // by us
  ExitStatus status;            // once it no longer runs
  int64_t failed_order = 0;     // 1 for the first that failed in this generation, 0 for none
  bool reported_error = false;  // an error event came
  ExitStatus reported;
  std::string error_message;
  int64_t failed_ns = 0;  // these three: when it failed
  Evidence evidence;
  FailureClass failure_class = FailureClass::kError;
  uint64_t heartbeat = 0;
  int64_t moved_ns = 0;

  /// As it said itself, else as it ended.
  const ExitStatus& verdict() const { return reported_error && status.signal == 0 ? reported : status; }
};

Supervisor::Supervisor(SupervisorOptions options, SupervisorClient& client, const Clock& clock)
    : options_(std::move(options)), client_(client), clock_(clock) {
  if (options_.stop_signals.empty()) options_.stop_signals = {SIGTERM, SIGINT};
}

Result<std::unique_ptr<Supervisor>> Supervisor::make(SupervisorOptions options, SupervisorClient& client,
                                                     const Clock& clock) {
  std::unique_ptr<Supervisor> supervisor(new Supervisor(std::move(options), client, clock));
  RT_TRY(supervisor->open_descriptors());
  return supervisor;
}

Status Supervisor::open_descriptors() {
  sigset_t stop;
  sigemptyset(&stop);
  for (const int signal : options_.stop_signals) sigaddset(&stop, signal);
  for (const int signal : options_.told_signals) sigaddset(&stop, signal);
  // An inherited "ignore" would make the kernel reap children by itself, without their status.
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, nullptr);
  if (pthread_sigmask(SIG_BLOCK, &stop, nullptr) != 0) return Error{ErrorCode::kInternal, "cannot block stop signals"};
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return os_error(errno, "epoll_create1");
  signals_.reset(signalfd(-1, &stop, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_) return os_error(errno, "signalfd");
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) return os_error(errno, "eventfd");
  RT_TRY(add_to_epoll(signals_.get(), key_of(Source::kSignals, 0)));
  return add_to_epoll(wake_.get(), key_of(Source::kWake, 0));
}

Supervisor::~Supervisor() {
  kill_all();
  ignore(reap_all(kLeaveLimitMs), "nobody is left to tell");
}

Status Supervisor::add_to_epoll(int fd, uint64_t key) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = key}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return os_error(errno, "epoll_ctl");
  return {};
}

void Supervisor::wake() {
  const uint64_t one = 1;
  // Full means that a wake is pending already.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof one);
}

Status Supervisor::watch(int fd) { return add_to_epoll(fd, key_of(Source::kWatched, fd)); }

void Supervisor::forget(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Supervisor::fail(Failure failure) {
  if (failure_) return;
  failure.generation = generation_;
  const int64_t now = clock_.now_ns();
  if (failure.seen_ns == 0) failure.seen_ns = now;
  if (failure.host) {
    failure.failure_class = FailureClass::kHostLost;
  } else if (failure.failure_class == FailureClass::kError) {
    failure.failure_class = classify(failure.status, failure.pid, {});
  }
  if (cause_deadline_ns_ == 0) recovery_.detected_ns = now;
  // That a rank hangs is found out here as well, with what all ranks wait for: the other host knows its own alone.
  if (failure.failure_class != FailureClass::kSymptom && !failure.hang) {
    failure_ = std::move(failure);
  } else if (!symptom_) {
    symptom_ = std::move(failure);
    if (cause_deadline_ns_ == 0) cause_deadline_ns_ = cause_deadline(now);
  }
}

int64_t Supervisor::cause_deadline(int64_t now_ns) {
  return now_ns + (options_.cause_grace_ms + client_.extra_grace_ms()) * kNsPerMs;
}

void Supervisor::abandon(Error error) {
  {
    const std::lock_guard lock(of_end_);
    if (!abandoned_) abandoned_ = std::move(error);
  }
  wake();
}

std::optional<Error> Supervisor::abandoned() {
  const std::lock_guard lock(of_end_);
  return abandoned_;
}

// --- Start ---------------------------------------------------------------------------------------------------------

Status Supervisor::start_generation() {
  children_.clear();
  failure_.reset();
  symptom_.reset();
  failure_order_ = cause_deadline_ns_ = 0;
  killing_ = false;
  RT_TRY_SET(const std::vector<ChildSpec> specs, client_.prepare_generation(generation_));
  recovery_.prepared_ns = clock_.now_ns();
  if (specs.empty()) return Error{ErrorCode::kInternal, fmt::format("generation {} has no children", generation_)};
  for (size_t k = 0; k < specs.size(); ++k) {
    auto child = std::make_unique<Child>();
    child->rank = specs[k].rank >= 0 ? specs[k].rank : static_cast<int64_t>(k);
    Result<ChildProcess> started = start_child(specs[k]);
    if (!started.ok()) return std::move(started).error().with(fmt::format("rank {}", child->rank));
    child->process = std::move(started).value();
    child->moved_ns = clock_.now_ns();
    child->heartbeat = client_.heartbeat(child->rank);
    children_.push_back(std::move(child));
    ++running_;
    const ChildProcess& process = children_.back()->process;
    RT_TRY(add_to_epoll(process.events.get(), key_of(Source::kEvents, static_cast<int64_t>(k))));
    RT_TRY(add_to_epoll(process.pidfd.get(), key_of(Source::kExit, static_cast<int64_t>(k))));
  }
  recovery_.spawned_ns = clock_.now_ns();
  next_hang_check_ns_ = recovery_.spawned_ns + options_.hang_deadline_ms * kNsPerMs;
  return {};
}

Supervisor::Child* Supervisor::child_of(int64_t rank) {
  const auto at = std::ranges::find_if(children_, [&](const auto& child) { return child->rank == rank; });
  return at == children_.end() ? nullptr : at->get();
}

Result<Outcome> Supervisor::run() {
  RT_CHECK(generation_ == 0 && children_.empty(), "a supervisor runs once");
  next_tick_ns_ = clock_.now_ns() + options_.tick_ms * kNsPerMs;
  while (true) {
    Status status = start_generation();
    if (status.ok()) {
      if (generation_ > 0) outcome_.recoveries.push_back(recovery_);
      client_.on_generation_started(generation_, generation_ > 0 ? &recovery_ : nullptr);
      status = supervise();
    }
    if (!status.ok()) {
      kill_all();
      ignore(reap_all(kLeaveLimitMs), "the first error is the one to tell");
      return std::move(status).error();
    }
    if (leave_signal_ == 0 && !failure_) return outcome_;  // every child exited 0

    double backoff_s = 0;
    bool elsewhere = false;  // nothing of it is a try of the ranks'
    if (leave_signal_ == 0) {
      const RestartInfo info{*failure_, restarts_in_a_row_};
      Restart next = Restart::kInPlace;
      if (!options_.client_decides && !failure_->host) {
        next = outcome_.stop_signal == 0 ? client_.restart_of(*failure_) : restart_here(failure_->failure_class);
      }
      elsewhere = failure_->host || next == Restart::kElsewhere;
      const bool restartable = next == Restart::kInPlace || next == Restart::kElsewhere;
      const bool exhausted = !elsewhere && restarts_in_a_row_ >= options_.restart.max_restarts;
      const bool again = options_.client_decides || (restartable && !exhausted && outcome_.stop_signal == 0);
      if (again && restarts_in_a_row_ > 0 && !options_.client_decides && !elsewhere) {
        backoff_s = std::min(kMaxBackoffS, std::ldexp(options_.restart.backoff_s,
                                                      static_cast<int>(std::min<int64_t>(restarts_in_a_row_ - 1, 60))));
      }
      client_.on_failure(info, again, backoff_s);
      if (!again && next == Restart::kLeave) {
        if (outcome_.stop_signal == 0) outcome_.stop_signal = SIGTERM;
        return outcome_;
      }
      if (!again) {
        outcome_.kind = EndKind::kFailed;
        outcome_.exit_code = failure_->exit_code();
        outcome_.message = failure_->message;
        if (exhausted && options_.restart.max_restarts > 0 && restartable) {
          outcome_.message += fmt::format("\n  given up after {} restart{} in a row without progress",
                                          restarts_in_a_row_, restarts_in_a_row_ == 1 ? "" : "s");
        }
        outcome_.failure = std::move(failure_);
        return outcome_;
      }
      if (backoff_s > 0) RT_TRY(wait_backoff(backoff_s));
      if (outcome_.stop_signal != 0 && leave_signal_ == 0 && !options_.client_decides) {
        outcome_.kind = EndKind::kFailed;  // nothing runs that could be told to save
        outcome_.exit_code = failure_->exit_code();
        outcome_.message = failure_->message + "\n  asked to stop while waiting for the next try";
        outcome_.failure = std::move(failure_);
        return outcome_;
      }
    }
    if (leave_signal_ != 0) {
      outcome_.kind = EndKind::kLeftBySignal;
      outcome_.exit_code = 128 + leave_signal_;
      outcome_.message = fmt::format("left at once ({})", strsignal(leave_signal_));
      return outcome_;
    }
    if (!elsewhere) ++restarts_in_a_row_;
    ++generation_;
    recovery_.generation = generation_;
    recovery_.failed_rank = failure_->rank;
    recovery_.cause = failure_->message;
  }
}

// --- Watch ---------------------------------------------------------------------------------------------------------

/// A child that failed is judged first, however it and the others have ended by then.
bool Supervisor::finished() { return running_ == 0 && failure_order_ == 0 && !symptom_ && client_.all_finished(); }

Status Supervisor::supervise() {
  while (!failure_ && leave_signal_ == 0 && !abandoned() && !finished()) {
    RT_TRY(dispatch_events(next_timeout_ms()));
    run_timers();
    judge();
  }
  if (std::optional<Error> why = abandoned()) return *std::move(why);
  if (!failure_ && leave_signal_ == 0) return {};
  if (failure_) client_.on_failing(*failure_);
  kill_all();
  recovery_.killed_ns = clock_.now_ns();
  RT_TRY(reap_all(leave_signal_ != 0 ? kLeaveLimitMs : -1));
  recovery_.reaped_ns = clock_.now_ns();
  if (failure_ && leave_signal_ == 0) client_.settle(*failure_);
  return {};
}

int64_t Supervisor::next_timeout_ms() const {
  int64_t next_ns = 0;
  const auto consider = [&](int64_t at_ns) { next_ns = next_ns == 0 ? at_ns : std::min(next_ns, at_ns); };
  if (options_.tick_ms > 0) consider(next_tick_ns_);
  if (options_.hang_deadline_ms > 0 && running_ > 0) consider(next_hang_check_ns_);
  if (cause_deadline_ns_ != 0) consider(cause_deadline_ns_);
  if (next_ns == 0) return -1;
  return std::max<int64_t>(0, (next_ns - clock_.now_ns() + kNsPerMs - 1) / kNsPerMs);
}

/// One turn of the loop: waits up to `timeout_ms` (-1: for ever) and handles what is ready.
Status Supervisor::dispatch_events(int64_t timeout_ms) {
  while (read_signals(0)) timeout_ms = 0;  // that came while a callback was at work, also the one that tells of them
  epoll_event ready[64];
  const int n = epoll_wait(epoll_.get(), ready, 64, static_cast<int>(std::min<int64_t>(timeout_ms, 60'000)));
  if (n < 0) return errno == EINTR ? Status() : Status(os_error(errno, "epoll_wait"));
  read_signals(clock_.now_ns());
  for (int i = 0; i < n; ++i) {
    const auto source = static_cast<Source>(ready[i].data.u64 >> 32);
    const auto index = static_cast<size_t>(ready[i].data.u64 & 0xffffffffu);
    switch (source) {
      case Source::kSignals:
        break;  // read above
      case Source::kWake: {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof count);
        if (!abandoned()) client_.on_tick();
        break;
      }
      case Source::kWatched:
        if (!abandoned()) client_.on_readable(static_cast<int>(index));
        break;
      case Source::kEvents:
        read_events(*children_[index]);
        break;
      case Source::kExit:
        RT_TRY(reap(*children_[index]));
        break;
    }
  }
  return {};
}

void Supervisor::run_timers() {
  if (abandoned()) return;
  const int64_t now = clock_.now_ns();
  if (options_.tick_ms > 0 && now >= next_tick_ns_) {
    next_tick_ns_ = now + options_.tick_ms * kNsPerMs;
    client_.on_tick();
  }
  if (options_.hang_deadline_ms > 0 && now >= next_hang_check_ns_) check_hangs();
}

void Supervisor::read_events(Child& child) {
  char bytes[65536];
  while (child.process.events) {
    const ssize_t n = read(child.process.events.get(), bytes, sizeof bytes);
    if (n > 0) {
      child.moved_ns = clock_.now_ns();
      const int64_t dropped = child.lines.dropped();
      child.lines.feed({bytes, static_cast<size_t>(n)}, [&](std::string_view line) { take_event(child, line); });
      if (child.lines.dropped() > dropped) {
        client_.on_notice(fmt::format("rank {}: dropped an event of more than {} bytes", child.rank, kMaxEventBytes));
      }
      // A full buffer may have more behind it, but the others want their turn; a child that ended has no other.
      if (child.running && !killing_) return;
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else {
      if (n == 0 || errno != EAGAIN) child.process.events.reset();  // which takes it out of the epoll set
      return;
    }
  }
}

void Supervisor::take_event(Child& child, std::string_view line) {
  if (line.empty()) return;
  const nlohmann::json event = json_or_nothing(line);
  if (!event.is_object()) {
    client_.on_notice(fmt::format("rank {}: dropped an event that is no JSON object: {}", child.rank,
                                  printable_ascii(line.substr(0, 200))));
    return;
  }
  const auto kind = event.find("event");
  if (kind != event.end() && *kind == "error" && !child.reported_error) {
    const auto code = event.find("exit_code");
    const auto message = event.find("message");
    child.reported.exit_code = code != event.end() && code->is_number_integer() ? code->get<int>() : 70;
    if (child.reported.exit_code == 0) child.reported.exit_code = 70;
    child.error_message =
        message != event.end() && message->is_string() ? message->get<std::string>() : json_text(event);
    child.reported_error = true;
    if (child.failed_order == 0 && !child.killed) mark_failed(child);
  }
  client_.on_event(child.rank, event);
}

Status Supervisor::reap(Child& child) {
  if (!child.running) return {};
  RT_TRY_SET(const std::optional<ExitStatus> status, reap_child(child.process));
  if (!status) return {};
  child.running = false;  // first: the rest of its events is read to the end
  child.status = *status;
  --running_;
  read_events(child);
  if (child.lines.torn()) {
    client_.on_notice(fmt::format("rank {}: its last event was cut off and is dropped", child.rank));
  }
  child.process.events.reset();
  child.process.pidfd.reset();
  // Who was killed for another's sake may have failed by itself before it was.
  if (!status->ok() && child.failed_order == 0 && !(child.killed && status->signal == SIGKILL)) mark_failed(child);
  client_.on_child_exit(child.rank, child.status, child.killed);
  return {};
}

void Supervisor::mark_failed(Child& child) {
  child.failed_order = ++failure_order_;
  child.failed_ns = clock_.now_ns();
  child.evidence = client_.evidence();
  child.failure_class = classify(child.verdict(), child.process.pid, child.evidence);
  client_.on_rank_error(failure_of(child));
}

/// `came_ns`: the earliest moment at which what is found can have come, or 0: after the last look. A callback that
/// hangs in a slow disk must not make two signals of one moment look a second apart.
void Supervisor::take_signals(int64_t came_ns) {
  const std::lock_guard lock(of_signals_);
  const int64_t now = clock_.now_ns();
  if (came_ns == 0) came_ns = looked_ns_;
  signalfd_siginfo info;
  while (read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (std::ranges::find(options_.told_signals, signal) != options_.told_signals.end()) {
      if (std::ranges::find(told_, signal) == told_.end()) told_.push_back(signal);
    } else if (stop_signal_ == 0) {
      stopped_ns_ = now;
      stop_signal_ = signal;
    } else if (signal == SIGINT && came_ns - stopped_ns_ >= kLeaveAfterMs * kNsPerMs) {
      leave_signal_ = signal;
    }
  }
  looked_ns_ = now;
}

/// On the thread of run(). True when that changed something.
bool Supervisor::read_signals(int64_t came_ns) {
  const int left_before = leave_signal_;
  take_signals(came_ns);
  std::vector<int> told;
  {
    const std::lock_guard lock(of_signals_);
    told.swap(told_);
  }
  for (const int signal : told) client_.on_signal(signal);
  if (stop_signal_ == 0 || outcome_.stop_signal != 0) return !told.empty() || leave_signal_ != left_before;
  outcome_.stop_signal = stop_signal_;
  client_.on_stop_requested(outcome_.stop_signal);
  return true;
}

void Supervisor::ask_stop() {
  {
    const std::lock_guard lock(of_signals_);
    if (stop_signal_ != 0) return;
    stopped_ns_ = clock_.now_ns();
    stop_signal_ = SIGTERM;
  }
  wake();
}

bool Supervisor::stop_asked() {
  take_signals(0);
  return stop_signal_ != 0;
}

int Supervisor::leave_signal() {
  take_signals(0);
  return leave_signal_;
}

void Supervisor::check_hangs() {
  const int64_t now = clock_.now_ns();
  const int64_t deadline_ns = options_.hang_deadline_ms * kNsPerMs;
  std::vector<Silence> silent;
  int64_t next = now + deadline_ns;
  for (const auto& child : children_) {
    if (!child->running) continue;
    const uint64_t beat = client_.heartbeat(child->rank);
    if (beat != child->heartbeat) {
      child->heartbeat = beat;
      child->moved_ns = now;
    }
    if (now - child->moved_ns >= deadline_ns) {
      silent.push_back({child->rank, child->process.pid, (now - child->moved_ns) / kNsPerMs,
                        process_state(child->process.pid), client_.place(child->rank)});
    }
    next = std::min(next, child->moved_ns + deadline_ns);
  }
  // The heartbeat is only sampled: look often enough that the deadline is met within an eighth of itself.
  next_hang_check_ns_ = std::clamp(next, now + kNsPerMs, now + std::max(deadline_ns / 8, kNsPerMs));
  if (silent.empty()) return;
  const auto stopped = [](const Silence& s) { return s.state == 'T' || s.state == 't'; };
  std::stable_sort(silent.begin(), silent.end(), [&](const Silence& a, const Silence& b) {
    return stopped(a) != stopped(b) ? stopped(a) : a.silent_ms > b.silent_ms;
  });
  if (!client_.on_hang(silent)) {
    for (const Silence& s : silent) child_of(s.rank)->moved_ns = now;
    return;
  }
  const Silence& first = silent.front();
  std::string detail = fmt::format("shows no sign of life for {:.1f} s", static_cast<double>(first.silent_ms) / 1e3);
  if (stopped(first)) detail += "; the process is stopped (state T)";
  if (first.state == 'D') detail += "; it waits for a disk or a device (state D)";
  if (!first.place.empty()) detail += "; last at " + first.place;
  if (silent.size() > 1) detail += fmt::format("; {} others wait as well", silent.size() - 1);
  blame(*child_of(first.rank), true, std::move(detail));
}

// --- Failure -------------------------------------------------------------------------------------------------------

/// Decides whether the generation has failed, and through whom.
void Supervisor::judge() {
  if (failure_ || (failure_order_ == 0 && !symptom_)) return;
  const Child* cause = nullptr;
  const auto earlier = [](const Child* a, const Child* b) { return b == nullptr || a->failed_order < b->failed_order; };
  bool cause_is_symptom = false;
  for (const auto& child : children_) {
    if (child->failed_order == 0) continue;
    const bool symptom = child->failure_class == FailureClass::kSymptom;
    if (cause == nullptr || (cause_is_symptom && !symptom) ||
        (cause_is_symptom == symptom && earlier(child.get(), cause))) {
      cause = child.get();
      cause_is_symptom = symptom;
    }
  }
  const int64_t now = clock_.now_ns();
  if (cause_deadline_ns_ == 0) recovery_.detected_ns = now;
  const bool only_symptoms = cause == nullptr || cause_is_symptom;
  if (only_symptoms && (running_ > 0 || options_.has_others)) {
    if (cause_deadline_ns_ == 0) cause_deadline_ns_ = cause_deadline(now);
    if (now < cause_deadline_ns_) return;
  }
  if (only_symptoms) {
    const std::string noticed = cause != nullptr
                                    ? fmt::format("noticed as rank {} gave up{}", cause->rank, failure_detail(*cause))
                                    : fmt::format("noticed as {}", symptom_->message);
    // Ranks wait for ranks that wait for others: the one that gave up first need not name the one that hangs. The
    // client may know; and a stopped process waits for nobody. (State t is that of one whose stacks are being read.)
    const auto known = client_.suspect();
    if (Child* const suspected = known ? child_of(known->first) : nullptr; suspected != nullptr) {
      blame(*suspected, true, fmt::format("{}; {}", known->second, noticed));
      return;
    }
    if (known) {
      failure_ = Failure{.generation = generation_,
                         .rank = known->first,
                         .status = {.exit_code = 69},
                         .hang = true,
                         .message = fmt::format("rank {} {}; {}", known->first, known->second, noticed),
                         .failure_class = FailureClass::kHang,
                         .seen_ns = now};
      return;
    }
    for (const auto& child : children_) {
      if (!child->running || process_state(child->process.pid) != 'T') continue;
      const std::string place = client_.place(child->rank);
      blame(*child, true,
            fmt::format("is stopped (state T){}; {}", place.empty() ? "" : ", last seen " + place, noticed));
      return;
    }
  }
  if (cause != nullptr) {
    blame(*cause, false, {});
  } else {
    failure_ = std::move(symptom_);
  }
}

void Supervisor::blame(const Child& child, bool hang, std::string detail) {
  failure_ = failure_of(child);
  if (!hang) return;
  recovery_.detected_ns = clock_.now_ns();
  failure_->hang = true;
  failure_->status = ExitStatus{.exit_code = 69};
  failure_->failure_class = FailureClass::kHang;
  failure_->seen_ns = recovery_.detected_ns;
  failure_->message = fmt::format("rank {} (pid {}) {}", child.rank, child.process.pid, detail);
}

Failure Supervisor::failure_of(const Child& child) const {
  const ExitStatus& status = child.verdict();
  // An error event may come before its sender has left: what it will exit with is what it said.
  return {.generation = generation_,
          .rank = child.rank,
          .status = status,
          .message = fmt::format("rank {} (pid {}) {}{}", child.rank, child.process.pid, describe(status),
                                 failure_detail(child)),
          .failure_class = child.failure_class,
          .pid = child.process.pid,
          .seen_ns = child.failed_ns,
          .last_lines = log_tail(child.process, kLastLines)};
}

std::string Supervisor::failure_detail(const Child& child) const {
  const std::string facts = evidence_text(child.failure_class, child.evidence);
  if (!child.error_message.empty())
    return ": " + child.error_message + (facts.empty() ? "" : fmt::format(" ({})", facts));
  std::string out;
  if (!facts.empty()) {
    out += ": " + facts;
  } else if (child.status.signal == SIGKILL) {
    out += ", not by the supervisor; the kernel does so when memory runs out (dmesg)";
  }
  const std::vector<std::string> tail = log_tail(child.process, kTailLines);
  if (!tail.empty()) out += fmt::format("; the end of {}:{}", child.process.log_path, join_lines(tail));
  return out;
}

void Supervisor::kill_all() {
  killing_ = true;
  for (const auto& child : children_) {
    if (!child->running) continue;
    child->killed = true;
    kill_child(child->process);
  }
}

/// Until all children are gone, or `limit_ms` have passed (-1: no limit).
Status Supervisor::reap_all(int64_t limit_ms) {
  const int64_t begin = clock_.now_ns();
  int64_t reported = begin;
  while (running_ > 0) {
    const int64_t now = clock_.now_ns();
    if (limit_ms >= 0 && now - begin >= limit_ms * kNsPerMs) return {};
    if (now - reported >= options_.stuck_report_ms * kNsPerMs) {
      reported = now;
      for (const auto& child : children_) {
        if (!child->running) continue;
        client_.on_notice(fmt::format("rank {} (pid {}) was killed {:.0f} s ago and is still there (state {})",
                                      child->rank, child->process.pid, static_cast<double>(now - begin) / 1e9,
                                      process_state(child->process.pid)));
      }
    }
    RT_TRY(dispatch_events(limit_ms >= 0 ? std::min<int64_t>(limit_ms, 100) : options_.stuck_report_ms));
    if (leave_signal_ != 0 && limit_ms < 0) limit_ms = kLeaveLimitMs;
  }
  return {};
}

Status Supervisor::wait_backoff(double seconds) {
  const int64_t until = clock_.now_ns() + static_cast<int64_t>(seconds * 1e9);
  while (leave_signal_ == 0 && outcome_.stop_signal == 0) {
    if (std::optional<Error> why = abandoned()) return *std::move(why);
    const int64_t left_ns = until - clock_.now_ns();
    if (left_ns <= 0) break;
    const int64_t left_ms = (left_ns + kNsPerMs - 1) / kNsPerMs;
    const int64_t timer_ms = next_timeout_ms();
    RT_TRY(dispatch_events(timer_ms < 0 ? left_ms : std::min(left_ms, timer_ms)));
    run_timers();
  }
  return {};
}

}  // namespace cairn::agent
