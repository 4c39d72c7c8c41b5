#include "tools/run/agent/helper.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/json/json.h"
#include "runtime/telemetry/terminal.h"

namespace cairn::tools {
namespace {

using nlohmann::json;
using SteadyClock = std::chrono::steady_clock;

constexpr double kFirstRestartS = 5, kLongestRestartS = 300, kStartAgainS = 60;
constexpr double kLastRestartS = 1;  // while the run's end waits
constexpr double kToldAfterS = 2;    // that the end of the run waits

SteadyClock::time_point in_seconds(double seconds) {
  return SteadyClock::now() + std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
}

}  // namespace

Helper::Helper(Options options) : options_(std::move(options)), restart_s_(kFirstRestartS) {}

Helper::~Helper() {
  if (process_) agent::end_child(*process_);
}

void Helper::send(char c) {
  if (process_) [[maybe_unused]]
    const ssize_t n = ::write(control_.get(), &c, 1);  // full or gone: it looks by itself
}

void Helper::restart_in(double seconds) {
  restart_at_ = in_seconds(finishing_ ? std::min(kLastRestartS, seconds) : seconds);
}

void Helper::start() {
  const auto later = [&](const std::string& why) {
    if (!std::exchange(told_, true)) options_.not_started(why);
    restart_in(kStartAgainS);
  };
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return later(fmt::format("pipe: {}", std::strerror(errno)));
  const Fd theirs(ends[0]);
  control_.reset(ends[1]);
  lines_ = {};
  std::vector<std::string> argv = {"/proc/self/exe"};
  argv.insert(argv.end(), options_.words.begin(), options_.words.end());
  argv.insert(argv.end(), {"--control-fd", std::to_string(theirs.get())});
  Result<agent::ChildProcess> started =
      agent::start_child({.argv = std::move(argv), .inherit_fds = {theirs.get()}, .log_path = options_.log.string()});
  if (!started.ok()) return later(started.error().message);
  process_ = std::move(started).value();
  if (finishing_) send('f');
}

void Helper::worked() {
  restart_s_ = kFirstRestartS;
  told_ = false;
}

void Helper::finish() {
  finishing_ = true;
  restart_at_ = std::min(restart_at_, in_seconds(kLastRestartS));
  send('f');
}

void Helper::take_events() {
  char bytes[16384];
  for (;;) {
    const ssize_t n = ::read(process_->events.get(), bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    lines_.feed({bytes, static_cast<size_t>(n)}, [&](std::string_view line) {
      const json event = json_or_nothing(line);
      if (event.is_object()) options_.take(event);
    });
  }
}

void Helper::poll() {
  if (finished_) return;
  if (!process_) {
    if (SteadyClock::now() >= restart_at_) start();
    return;
  }
  take_events();
  const Result<std::optional<agent::ExitStatus>> ended = agent::reap_child(*process_);
  if (!ended.ok() || !ended.value()) return;
  take_events();
  const agent::ExitStatus status = *ended.value();
  if (finishing_ && status.ok()) {
    finished_ = true;
    process_.reset();
    return;
  }
  if (!std::exchange(told_, true)) options_.died(agent::describe(status), agent::log_tail(*process_, 3));
  process_.reset();
  restart_in(restart_s_);
  restart_s_ = std::min(kLongestRestartS, 2 * restart_s_);
}

Result<HelperControl> HelperControl::take(int fd) {
  if (::fcntl(fd, F_SETFL, O_NONBLOCK) != 0) return os_error(errno, "--control-fd");
  return HelperControl(fd);
}

void HelperControl::wait(double seconds, bool only_finish) {
  const auto end = in_seconds(seconds);
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - SteadyClock::now());
    pollfd waiting{fd_, POLLIN, 0};
    const int ready = ::poll(&waiting, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return;
    const bool was_finishing = finishing_, news = drain();
    if (news && (!only_finish || (finishing_ && !was_finishing))) return;
  }
}

bool HelperControl::drain() {
  char bytes[64];
  bool news = false;
  for (;;) {
    const ssize_t n = ::read(fd_, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) ::_exit(0);  // the agent is gone, and every moment is a good one to leave
    if (n < 0) return news;
    news = true;
    finishing_ = finishing_ || std::find(bytes, bytes + n, 'f') != bytes + n;
  }
}

std::string EndWait::text() const {
  return fmt::format("{} after {}",
                     interrupted ? "stopped by a signal"
                     : late      ? "at the time limit"
                                 : "given up",
                     telemetry::format_duration(seconds));
}

EndWait wait_at_end(std::span<const int> stop_signals, const std::function<Hurry()>& hurry,
                    const std::function<std::string(double seconds)>& poll,
                    const std::function<void(const std::string& text)>& say) {
  const auto begin = SteadyClock::now();
  sigset_t stop;
  sigemptyset(&stop);
  for (const int signal : stop_signals) sigaddset(&stop, signal);
  bool told = false;
  for (EndWait out;;) {
    out.seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count();
    const std::string waiting = poll(out.seconds);
    const Hurry now = hurry();
    out.late = now == Hurry::kTimeLimit;
    out.interrupted = out.interrupted || now == Hurry::kSignal;
    if (waiting.empty() || out.interrupted || out.late) return out;
    if (!told && out.seconds > kToldAfterS) {
      say(fmt::format("waiting for {}; a signal ends the wait", waiting));
      told = true;
    }
    const timespec pause{0, 50'000'000};
    out.interrupted = ::sigtimedwait(&stop, nullptr, &pause) > 0;
  }
}

}  // namespace cairn::tools
