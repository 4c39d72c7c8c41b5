#include "tools/run/agent/hooks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/agent/child_process.h"
#include "runtime/config/metric_name.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/terminal.h"
#include "tools/run/agent/helper.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using SteadyClock = std::chrono::steady_clock;

constexpr int kNice = 10;
constexpr double kGraceS = 5;  // from SIGTERM to SIGKILL, or a shorter timeout
constexpr double kGoneS = 2;   // from SIGKILL until a command counts as one that nothing ends

double seconds_since(SteadyClock::time_point begin) {
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

/// The path of a program: of those without a slash, the first of its name in PATH.
std::string program_path(const std::string& name) {
  const char* const path = std::getenv("PATH");
  if (name.find('/') != std::string::npos || path == nullptr) return name;
  std::string_view rest = path;
  for (;;) {
    const size_t colon = rest.find(':');
    const fs::path candidate = fs::path(rest.substr(0, colon)) / name;
    std::error_code problem;
    if (fs::is_regular_file(candidate, problem) && ::access(candidate.c_str(), X_OK) == 0) return candidate.string();
    if (colon == std::string_view::npos) return name;
    rest.remove_prefix(colon + 1);
  }
}

}  // namespace

std::string_view hook_event_of(const json& event) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 12> kNames = {
      {{"start", "started"},
       {"saved", "saved"},
       {"copied", "copied"},
       {"evaluated", "evaluated"},
       {"outlier", "outlier"},
       {"divergence", "divergence"},
       {"roll_back", "rolled_back"},
       {"recovered", "recovered"},
       {"failure", "failed"},
       {"sdc", "sdc"},
       {"end", "ended"},
       {"best", "best"}}};
  const std::string kind = json_string(event, "event");
  const auto* const known = std::ranges::find(kNames, kind, [](const auto& name) { return name.first; });
  if (known == kNames.end()) return {};
  if (kind == "start" && json_count(event, "generation") != 0) return {};  // "recovered" follows
  return known->second;
}

std::vector<std::string> hook_argv(const std::vector<std::string>& run, int64_t step, const std::string& dir,
                                   const std::string& run_folder) {
  const std::array<std::pair<std::string_view, std::string>, 3> values = {
      {{"{step}", std::to_string(step)}, {"{dir}", dir}, {"{run}", run_folder}}};
  std::vector<std::string> out;
  for (const std::string& word : run) {
    std::string text;
    for (size_t at = 0; at < word.size();) {
      const auto* const value = std::ranges::find_if(
          values, [&](const auto& one) { return std::string_view(word).substr(at).starts_with(one.first); });
      text += value == values.end() ? word.substr(at, 1) : value->second;
      at += value == values.end() ? 1 : value->first.size();
    }
    out.push_back(std::move(text));
  }
  return out;
}

std::string hooks_not_run(size_t count) {
  return fmt::format("{} of the recipe {} not run: --hooks", count_text(static_cast<int64_t>(count), "hook"),
                     count == 1 ? "is" : "are");
}

struct RunHooks::Call {
  std::string on, dir;
  int64_t step = 0;
  json event;
};

struct RunHooks::One {
  Hook hook;
  size_t number = 0;  // from 1
  std::optional<Call> waiting;
  Call current;
  std::optional<agent::ChildProcess> process;
  SteadyClock::time_point began;
  std::optional<SteadyClock::time_point> asked_to_end;  // SIGTERM
  bool killed = false;
  std::string why_ended;  // by this agent
  bool failed_before = false;
  std::deque<SteadyClock::time_point> starts;  // within the hook's span

  std::string name() const { return fmt::format("hook {} ({})", number, hook.run.front()); }
  bool may_start() {
    while (!starts.empty() && seconds_since(starts.front()) > hook.within_s) starts.pop_front();
    return hook.at_most == 0 || std::ssize(starts) < hook.at_most;
  }
  void end(std::string why) {
    if (asked_to_end) return;
    why_ended = std::move(why);
    asked_to_end = SteadyClock::now();
    agent::signal_group(*process, SIGTERM);
  }
  void kill() {
    agent::signal_group(*process, SIGKILL);
    killed = true;
  }
};

RunHooks::RunHooks(const std::vector<Hook>& hooks, const std::vector<Keep>& keep, fs::path run)
    : run_(fs::absolute(run).lexically_normal()), keep_(keep) {
  for (const Hook& hook : hooks) {
    all_.push_back(std::make_unique<One>());
    all_.back()->hook = hook;
    all_.back()->number = all_.size();
    wants_best_ = wants_best_ || std::ranges::find(hook.events, "best") != hook.events.end();
  }
}

RunHooks::~RunHooks() {
  for (const auto& one : all_) {
    if (one->process) agent::signal_group(*one->process, SIGKILL);
  }
  // A killed command is gone at once, or nothing that this process does ends it.
  const SteadyClock::time_point begin = SteadyClock::now();
  for (const auto& one : all_) {
    while (one->process && seconds_since(begin) < kGoneS) {
      const Result<std::optional<agent::ExitStatus>> reaped = agent::reap_child(*one->process);
      if (!reaped.ok() || reaped.value()) one->process.reset();
      if (one->process) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
}

void RunHooks::hear(const json& event, int64_t step) {
  const std::string on(hook_event_of(event));
  if (on.empty()) return;
  const json& own = json_field(event, "step");
  Call call{.on = on, .step = own.is_number_integer() ? own.get<int64_t>() : step, .event = event};
  if (on == "saved" || on == "best" || on == "copied")
    call.dir = (run_ / "checkpoints" / ckpt::step_dir_name(call.step)).string();
  call.event["on"] = on;
  call.event["step"] = call.step;
  call.event["run"] = run_.string();
  if (!call.dir.empty()) call.event["dir"] = call.dir;
  for (const auto& one : all_) {
    if (std::ranges::find(one->hook.events, on) == one->hook.events.end()) continue;
    one->waiting = call;
    if (!one->process && one->may_start()) start(*one);
  }
  if (on == "saved" && wants_best_) tell_best(call.step);
}

/// Whether the step is the one that T.best keeps now.
void RunHooks::tell_best(int64_t step) {
  const auto rule = std::ranges::find(keep_, Keep::Kind::kBest, &Keep::kind);
  if (rule == keep_.end()) return;
  ckpt::PosixBackend io;
  const Result<ckpt::Catalog> catalog = ckpt::list_checkpoints(io, run_ / "checkpoints");
  if (!catalog.ok()) return callbacks_.say("warning: hooks of \"best\": " + catalog.error().message);
  const ckpt::CheckpointInfo* best = nullptr;
  const auto value_of = [&](const ckpt::CheckpointInfo& info) { return info.metric(rule->metric); };
  const bool lower = lower_is_better(rule->metric);
  for (const ckpt::CheckpointInfo& info : catalog.value().checkpoints) {
    const std::optional<double> value = value_of(info);
    if (!info.complete || info.bad() || !value || !std::isfinite(*value)) continue;
    if (best == nullptr || (lower ? *value < *value_of(*best) : *value > *value_of(*best))) best = &info;
  }
  if (best == nullptr || best->step != step) return;
  callbacks_.record({{"event", "best"},
                     {"step", step},
                     {"dir", best->dir.string()},
                     {"metric", rule->metric},
                     {"value", *value_of(*best)}});
}

void RunHooks::start(One& one) {
  one.current = *std::exchange(one.waiting, std::nullopt);
  one.asked_to_end.reset();
  one.killed = false;
  if (one.hook.at_most > 0) one.starts.push_back(SteadyClock::now());
  const Call& call = one.current;
  std::vector<std::string> argv = hook_argv(one.hook.run, call.step, call.dir, run_.string());
  argv.front() = program_path(argv.front());
  Result<agent::ChildProcess> started =
      agent::start_child({.argv = std::move(argv),
                          .env = {{"CAIRN_RUN", run_.string()}, {"CAIRN_STEP", std::to_string(call.step)}},
                          .log_path = (run_ / "logs" / fmt::format("hook-{}.log", one.number)).string(),
                          .input = json_text(call.event) + "\n",
                          .foreign = true,
                          .nice = kNice});
  if (!started.ok()) return failed(one, call, started.error().message, {});
  one.process = std::move(started).value();
  one.began = SteadyClock::now();
}

void RunHooks::failed(One& one, const Call& call, const std::string& how, const std::vector<std::string>& last_lines) {
  if (!std::exchange(one.failed_before, true)) {
    std::string text = fmt::format("warning: {} of {}, step {}: {}", one.name(), call.on, call.step, how);
    for (const std::string& line : last_lines) text += "\n  " + line;
    callbacks_.say(text);
  }
  callbacks_.record(
      {{"event", "hook_failed"}, {"hook", one.number}, {"on", call.on}, {"step", call.step}, {"message", how}});
}

/// Reaps a command that has ended, and ends the rest of its group.
void RunHooks::take_end(One& one) {
  siginfo_t info{};
  const bool ended =
      ::waitid(P_PID, static_cast<id_t>(one.process->pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
  if (!ended) return;
  agent::signal_group(*one.process, SIGKILL);  // before it is reaped: its number is its group's
  const Result<std::optional<agent::ExitStatus>> reaped = agent::reap_child(*one.process);
  if (!reaped.ok() || !reaped.value()) return;
  const agent::ExitStatus status = *reaped.value();
  const std::vector<std::string> last_lines = agent::log_tail(*one.process, 3);
  one.process.reset();
  if (one.asked_to_end) return failed(one, one.current, one.why_ended, last_lines);
  if (!status.ok()) return failed(one, one.current, agent::describe(status), last_lines);
  one.failed_before = false;
}

void RunHooks::poll() {
  for (const auto& owned : all_) {
    One& one = *owned;
    if (one.process) take_end(one);
    if (one.process && seconds_since(one.began) > one.hook.timeout_s)
      one.end(fmt::format("was ended: it took longer than {}", telemetry::format_duration(one.hook.timeout_s)));
    if (one.process && one.asked_to_end && !one.killed &&
        seconds_since(*one.asked_to_end) > std::min(kGraceS, one.hook.timeout_s)) {
      one.kill();
    }
    if (!one.process && one.waiting && one.may_start()) start(one);
  }
}

void RunHooks::finish(std::span<const int> stop_signals, const std::function<Hurry()>& hurry) {
  const EndWait waited = wait_at_end(
      stop_signals, hurry,
      [this](double seconds) {
        poll();
        std::vector<std::string> out;
        for (const auto& one : all_) {
          if ((one->process || (one->waiting && one->may_start())) && seconds < one->hook.timeout_s)
            out.push_back(one->name());
        }
        return fmt::format("{}", fmt::join(out, ", "));
      },
      callbacks_.say);
  for (const auto& one : all_) {
    if (one->waiting) {
      const std::string why = waited.interrupted || waited.late ? waited.text()
                              : one->may_start()                ? "the command before it took the hook's timeout"
                                                                : "at_most leaves no room";
      failed(*one, *std::exchange(one->waiting, std::nullopt), fmt::format("was not run: the run ends ({})", why), {});
    }
    if (one->process) one->end(fmt::format("was ended: the run ends ({})", waited.text()));
    if (one->process && waited.late) one->kill();
  }
  const std::array<int, 0> no_signals{};
  wait_at_end(
      no_signals, [] { return Hurry::kNone; },
      [&](double seconds) {
        poll();
        const bool some = std::ranges::any_of(all_, [](const auto& one) { return one->process.has_value(); });
        return std::string(some && seconds < (waited.late ? 0 : kGraceS) + kGoneS ? "hooks that end" : "");
      },
      [](const std::string&) {});
  for (const auto& one : all_) leave(*one);
}

/// A command that SIGKILL does not end (another user's, or one that waits for a dead disk) is left to the system.
void RunHooks::leave(One& one) {
  if (!one.process) return;
  agent::signal_group(*one.process, SIGKILL);
  callbacks_.say(fmt::format("warning: {} of {}, step {}: process {} does not end, and is left behind", one.name(),
                             one.current.on, one.current.step, one.process->pid));
  one.process.reset();
}

}  // namespace cairn::tools
