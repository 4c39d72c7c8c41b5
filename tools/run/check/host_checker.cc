#include "tools/run/check/host_checker.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <string_view>

#include "runtime/agent/child_process.h"
#include "runtime/agent/event_pipe.h"
#include "runtime/cluster/connection.h"
#include "runtime/comm/rendezvous_hub.h"
#include "runtime/json/json.h"

namespace cairn::tools {
namespace {

using nlohmann::json;
}  // namespace

/// The process of one order.
struct HostChecker::Measurement {
  int64_t round = 0, deadline_ns = 0;
  comm::RendezvousHub hub;
  agent::ChildProcess child;
  agent::LineSplitter lines;
  bool stopped = false;

  /// What has come by its events.
  void read(const std::function<void(hosts::Measured)>& tell) {
    std::array<char, 1 << 16> buffer;
    for (;;) {
      const ssize_t n = ::read(child.events.get(), buffer.data(), buffer.size());
      if (n <= 0) return;
      lines.feed({buffer.data(), static_cast<size_t>(n)}, [&](std::string_view line) {
        json event = json_or_nothing(line);
        if (!event.is_object()) return;
        event["round"] = round;
        Result<hosts::Message> result = hosts::decode(hosts::Measured::kKind, event);
        if (result.ok()) {
          tell(std::get<hosts::Measured>(std::move(result).value()));
        } else {
          tell({round, hosts::Measured::Failed{.message = result.error().message}});
        }
      });
    }
  }
};

HostChecker::HostChecker(Callbacks callbacks, std::string program)
    : callbacks_(std::move(callbacks)),
      program_(std::move(program)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { run(); }) {}

HostChecker::~HostChecker() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake();
  thread_.join();
}

void HostChecker::wake() {
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof(one)) < 0) return;  // it is awake already
}

void HostChecker::start(hosts::Measure order) {
  {
    const std::lock_guard lock(mutex_);
    todo_.emplace_back(std::move(order));
  }
  wake();
}

void HostChecker::put(hosts::PutMeasured value) {
  {
    const std::lock_guard lock(mutex_);
    todo_.emplace_back(std::move(value));
  }
  wake();
}

void HostChecker::stop() {
  {
    const std::lock_guard lock(mutex_);
    todo_.emplace_back(hosts::EndMeasure{});
  }
  wake();
}

/// The child is tied to this thread.
void HostChecker::run() {
  std::optional<Measurement> now;
  const auto tell_end = [&](int64_t round, const std::string& failed) {
    callbacks_.tell({round, hosts::Measured::Ended{failed}});
  };
  const auto begin = [&](const hosts::Measure& order) {
    const int64_t round = order.round;
    const auto made = [&]() -> Status {
      RT_TRY_SET(comm::RendezvousHub hub,
                 comm::RendezvousHub::make([this, round](const std::string& key, const std::string& value) {
                   callbacks_.publish({static_cast<uint64_t>(round), key, value});
                 }));
      RT_TRY_SET(const Fd meet, hub.add(0));
      RT_TRY_SET(agent::ChildProcess child,
                 agent::start_child({.argv = {program_, "_measure", "--order", json_text(hosts::encode(order)),
                                              "--meet-fd", std::to_string(meet.get())},
                                     .env = {{"OMP_WAIT_POLICY", "passive"}, {"OMP_PROC_BIND", "false"}},
                                     .inherit_fds = {meet.get()},
                                     .log_path = "/dev/null"}));
      now.emplace(Measurement{.round = round,
                              .deadline_ns = cluster::steady_after(order.limit_s),
                              .hub = std::move(hub),
                              .child = std::move(child),
                              .lines = {}});
      return {};
    }();
    if (!made.ok()) tell_end(round, made.error().message);
  };
  for (;;) {
    std::array<pollfd, 4> ready{{{wake_.get(), POLLIN, 0},
                                 {now ? now->hub.fd() : -1, POLLIN, 0},
                                 {now ? now->child.events.get() : -1, POLLIN, 0},
                                 {now ? now->child.pidfd.get() : -1, POLLIN, 0}}};
    int wait_ms = -1;
    if (now && !now->stopped) {
      const int64_t left_ns = now->deadline_ns - cluster::steady_ns();
      wait_ms = static_cast<int>(std::max<int64_t>(0, (left_ns + 999'999) / 1'000'000));
    }
    ::poll(ready.data(), ready.size(), wait_ms);
    uint64_t count = 0;
    if (::read(wake_.get(), &count, sizeof(count)) < 0 && errno != EAGAIN) return;
    decltype(todo_) todo;
    bool ends = false;
    {
      const std::lock_guard lock(mutex_);
      todo.swap(todo_);
      ends = ends_;
    }
    // Nothing wakes this thread again: the process alone is left to wait for.
    if (ends) todo.clear();
    if (now) {
      if (ready[1].revents != 0) now->hub.poll();
      if (ready[2].revents != 0) now->read(callbacks_.tell);
      const bool late = !now->stopped && cluster::steady_ns() >= now->deadline_ns;
      if (late || ends) {
        now->stopped = true;
        agent::kill_child(now->child);
      }
      const Result<std::optional<agent::ExitStatus>> ended = agent::reap_child(now->child);
      if (!ended.ok() || ended.value()) {
        now->read(callbacks_.tell);
        const bool well = ended.ok() && (now->stopped || ended.value()->ok());
        if (!ends)
          tell_end(now->round, well ? "" : ended.ok() ? agent::describe(*ended.value()) : ended.error().message);
        now.reset();
      }
    }
    if (ends && !now) return;
    for (const auto& one : todo) {
      const auto end_now = [&] {
        if (!now) return;
        agent::kill_child(now->child);
        pollfd gone{now->child.pidfd.get(), POLLIN, 0};
        ::poll(&gone, 1, 1000);
        ignore(agent::reap_child(now->child).ok() ? Status() : Status(), "it was killed");
        now.reset();
      };
      if (const auto* const order = std::get_if<hosts::Measure>(&one)) {
        end_now();
        begin(*order);
      } else if (std::holds_alternative<hosts::EndMeasure>(one)) {
        if (now) {
          now->read(callbacks_.tell);
          const int64_t round = now->round;
          end_now();
          tell_end(round, "");
        }
      } else if (const auto& put = std::get<hosts::PutMeasured>(one);
                 now && put.round == static_cast<uint64_t>(now->round)) {
        now->hub.put(put.key, put.value);
      }
    }
  }
}

}  // namespace cairn::tools
