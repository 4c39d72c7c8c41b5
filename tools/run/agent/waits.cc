#include "tools/run/agent/waits.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/agent/child_process.h"
#include "runtime/core/clock.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kStackPatienceMs = 10'000;  // for the stacks of all ranks

int64_t clock_ns() { return SystemClock().now_ns(); }

/// Of ranks of this host, by their processes.
std::vector<agent::RankStacks> of_ranks(std::vector<agent::ProcessStacks> stacks,
                                        const std::vector<agent::RankState>& ranks) {
  std::vector<agent::RankStacks> out;
  for (agent::ProcessStacks& one : stacks) {
    for (const agent::RankState& rank : ranks) {
      if (!rank.host.empty() || rank.view.pid != one.pid) continue;
      out.push_back({rank.rank, std::move(one)});
      break;
    }
  }
  return out;
}

}  // namespace

std::vector<agent::RankState> states_of(const comm::ShmWorld& world) {
  std::vector<agent::RankState> out;
  for (const comm::RankView& view : world.ranks()) {
    const char state = view.pid > 0 ? agent::process_state(static_cast<pid_t>(view.pid)) : '?';
    out.push_back({static_cast<int64_t>(out.size()), view, state, {}});
  }
  return out;
}

RunWaits::RunWaits(fs::path run, std::string name, double deadline_s, RunCallbacks callbacks, RanksElsewhere elsewhere,
                   std::string host)
    : run_(std::move(run)),
      name_(std::move(name)),
      deadline_s_(deadline_s),
      callbacks_(std::move(callbacks)),
      elsewhere_(std::move(elsewhere)),
      host_(std::move(host)) {}

std::vector<agent::RankState> RunWaits::states(const comm::ShmWorld& world) const {
  std::vector<agent::RankState> out = states_of(world);
  if (elsewhere_.put_in) elsewhere_.put_in(out);
  return out;
}

/// A rank in a wait for half of its deadline: who keeps it waiting is found out, and all stacks are read,
/// while everybody still stands where it is. At the deadline the ranks give up and leave.
void RunWaits::look(const comm::ShmWorld* world) {
  if (sending_ && (sending_->probe.take() || clock_ns() >= sending_->until_ns)) finish_sending();
  if (probe_ && (probe_->take() || clock_ns() >= probe_until_ns_)) {
    take_stacks(0);
    write_report();
    tell_asked();
  }
  if (world == nullptr || world->aborted()) return;
  const auto limit_ms = static_cast<int64_t>(500 * deadline_s_);
  const std::vector<comm::RankView> views = world->ranks();
  const comm::OperationView* longest = nullptr;
  int64_t rank = 0;
  const auto view_at = [&](size_t r, bool beside) -> const comm::OperationView& {
    return beside ? views[r].beside : static_cast<const comm::OperationView&>(views[r]);
  };
  bool longest_beside = false, asked = false;
  for (size_t r = 0; r < views.size(); ++r) {
    for (const bool beside : {false, true}) {
      const comm::OperationView& view = view_at(r, beside);
      // What the other agents answer is here before it is needed.
      if (view.inside && view.since_ms >= limit_ms / 2 && elsewhere_.ask && !asked) {
        asked = true;
        elsewhere_.ask();
      }
      if (!view.inside || view.since_ms < limit_ms) continue;
      if (longest == nullptr || view.since_ms > longest->since_ms)
        longest = &view, rank = static_cast<int64_t>(r), longest_beside = beside;
    }
  }
  int64_t finished = 0;
  for (const comm::RankView& view : views) finished += view.operations + view.beside.operations;
  if (std::exchange(finished_, finished) != finished) still_since_ns_ = clock_ns();
  if (wait_) {  // the same wait, or over?
    const comm::OperationView& before = view_at(static_cast<size_t>(wait_->rank), wait_->beside);
    if (!wait_->over) {
      if (wait_->elsewhere ? finished == wait_->operation : before.inside && before.operations == wait_->operation)
        return;
      callbacks_.say(fmt::format("rank {} continues", wait_->rank));
      callbacks_.record({{"event", "wait_over"}, {"rank", wait_->rank}});
      wait_->over = true;  // whoever hangs from now on is another
    }
    if (probe_) return;                                               // its stacks are still being read
    if (longest == nullptr && clock_ns() < others_until_ns_) return;  // or those of other hosts are on their way
    wait_.reset();
  }
  if (longest == nullptr) {
    if (!look_elsewhere(*world, limit_ms, asked)) return;
  } else {
    wait_ = LongWait{.rank = rank, .operation = longest->operations, .beside = longest_beside};
  }
  wait_->report.ranks = states(*world);
  wait_->report.finding = agent::find_culprit(wait_->report.ranks);
  tell();
  ask_others();
  probe_stacks();
}

/// No rank here waits. One that was stopped outside of any operation does not, but ranks of other hosts wait for it.
bool RunWaits::look_elsewhere(const comm::ShmWorld& world, int64_t limit_ms, bool asked) {
  const int64_t still_ms = (clock_ns() - still_since_ns_) / 1'000'000;
  if (!elsewhere_.ask || still_ms < limit_ms / 2) return false;
  if (!asked) elsewhere_.ask();
  if (still_ms < limit_ms) return false;
  for (const agent::RankState& rank : states(world)) {
    for (const bool beside : {false, true}) {
      const comm::OperationView& view = beside ? rank.view.beside : static_cast<const comm::OperationView&>(rank.view);
      if (rank.host.empty() || !view.inside || view.since_ms < limit_ms) continue;
      wait_ = LongWait{.rank = rank.rank, .operation = finished_, .beside = beside, .elsewhere = true};
      return true;
    }
  }
  return false;
}

void RunWaits::ask(const comm::ShmWorld* world, const std::string& by) {
  if (world == nullptr || world->aborted()) {
    callbacks_.say(fmt::format("{}: no rank runs now; nothing to report", by));
    return;
  }
  if (probe_ || (wait_ && !wait_->over)) {
    callbacks_.say(fmt::format("{}: a report is there, or being written: {}", by, wait_->path.string()));
    return;
  }
  wait_ = LongWait{.over = true, .asked_by = by};
  wait_->report.ranks = states(*world);
  if (host_.empty()) {
    wait_->report.finding = agent::find_culprit(wait_->report.ranks);
  } else {
    wait_->report.of_all = false;
    std::erase_if(wait_->report.ranks, [](const agent::RankState& rank) { return rank.view.pid <= 0; });
  }
  wait_->report.title = fmt::format("{}: asked for by {}", name_, by);
  ask_others();
  write_report();
  probe_stacks();
  if (!probe_) tell_asked();  // that there are no stacks has been told
}

void RunWaits::tell_asked() {
  if (wait_->asked_by.empty() || !wait_->written) return;
  callbacks_.say(fmt::format("{}: where each rank is: {}", wait_->asked_by, wait_->file()));
  callbacks_.record({{"event", "report"}, {"by", wait_->asked_by}, {"report", wait_->file()}});
}

/// Reads the stacks of all ranks of wait_ in a process of its own.
void RunWaits::probe_stacks() {
  std::vector<pid_t> pids;
  const auto add = [&](const agent::RankState& rank) {
    const auto pid = static_cast<pid_t>(rank.view.pid);
    if (rank.host.empty() && pid > 0 && std::find(pids.begin(), pids.end(), pid) == pids.end()) pids.push_back(pid);
  };
  for (const int64_t rank : wait_->report.finding.culprits) add(wait_->report.ranks[static_cast<size_t>(rank)]);
  for (const agent::RankState& rank : wait_->report.ranks) add(rank);
  Result<agent::StackProbe> probe = agent::StackProbe::start("/proc/self/exe", pids);
  if (probe.ok()) {
    probe_ = std::move(probe).value();
    probe_until_ns_ = clock_ns() + kStackPatienceMs * 1'000'000;
  } else {
    callbacks_.say("warning: no stacks: " + probe.error().message);
  }
}

void RunWaits::take_stacks(int64_t limit_ms) {
  if (!probe_) return;
  // Those of other hosts may be here already.
  for (agent::RankStacks& one : of_ranks(probe_->finish(limit_ms), wait_->report.ranks))
    wait_->report.stacks.push_back(std::move(one));
  probe_.reset();
}

void RunWaits::ask_others() {
  const auto is_elsewhere = [](const agent::RankState& rank) { return !rank.host.empty(); };
  if (!elsewhere_.ask_stacks || std::ranges::none_of(wait_->report.ranks, is_elsewhere)) return;
  others_until_ns_ = clock_ns() + kStackPatienceMs * 1'000'000;
  elsewhere_.ask_stacks(wait_->report.finding.culprits);
}

void RunWaits::take(std::vector<agent::RankStacks> stacks) {
  if (!wait_) return;
  for (agent::RankStacks& one : stacks) {
    if (std::ranges::find(wait_->report.stacks, one.rank, &agent::RankStacks::rank) == wait_->report.stacks.end())
      wait_->report.stacks.push_back(std::move(one));
  }
  if (!probe_) write_report();  // else it is written anew when those of this host are there
}

void RunWaits::send_stacks(const comm::ShmWorld* world, std::function<void(std::vector<agent::RankStacks>)> to) {
  if (world == nullptr || sending_) return;
  std::vector<agent::RankState> ranks = states_of(*world);
  std::vector<pid_t> pids;
  for (const agent::RankState& rank : ranks) {
    if (rank.view.pid > 0) pids.push_back(static_cast<pid_t>(rank.view.pid));
  }
  Result<agent::StackProbe> probe = agent::StackProbe::start("/proc/self/exe", pids);
  if (!probe.ok()) return callbacks_.say("warning: no stacks: " + probe.error().message);
  sending_.emplace(
      Sending{std::move(probe).value(), clock_ns() + kStackPatienceMs * 1'000'000, std::move(ranks), std::move(to)});
}

void RunWaits::finish_sending() {
  Sending done = std::move(*sending_);
  sending_.reset();
  done.to(of_ranks(done.probe.finish(0), done.ranks));
}

/// Not fsynced: a restart waits for it.
void RunWaits::write_report() {
  agent::WaitReport& report = wait_->report;
  const fs::path reports = run_ / "reports";
  std::error_code problem;
  fs::create_directory(reports, problem);  // not the run's folder anew, which may have been moved
  if (wait_->path.empty()) {
    int64_t step = 0;
    for (const agent::RankState& rank : report.ranks) step = std::max(step, rank.view.step);
    std::error_code unknown;
    do {
      wait_->path = reports / fmt::format("step-{:08}-{}{}{}.txt", step, ++reports_, host_.empty() ? "" : "-", host_);
    } while (fs::exists(wait_->path, unknown));
  }
  const std::time_t now = std::time(nullptr);
  char time[32] = {};
  std::tm parts{};
  std::strftime(time, sizeof time, "%Y-%m-%d %H:%M:%S UTC", ::gmtime_r(&now, &parts));
  report.time = time;
  const Status written = problem ? Status(os_error(problem.value(), reports.string()))
                                 : write_unsynced_text_file(wait_->path, agent::to_text(report));
  wait_->written = wait_->written || written.ok();  // without stacks it is there already
  if (written.ok() || wait_->told) return;
  wait_->told = true;
  callbacks_.say(fmt::format("warning: the report could not be written{}: {}",
                             wait_->written ? " anew, with the stacks" : "", written.error().message));
}

void RunWaits::tell() {
  const agent::WaitFinding& finding = wait_->report.finding;
  wait_->report.title = fmt::format("{}: ranks have waited for {:.1f} s of the {:g} s they may", name_,
                                    static_cast<double>(finding.waited_ms) / 1e3, deadline_s_);
  write_report();
  callbacks_.say(agent::summary_text(finding, wait_->report.ranks) +
                 (wait_->written ? "  stacks of all ranks: " + wait_->file() : ""));
  callbacks_.record({{"event", "wait"},
                     {"culprits", finding.culprits},
                     {"reason", finding.reason},
                     {"waited_ms", finding.waited_ms},
                     {"report", wait_->file()}});
}

std::optional<std::pair<int64_t, std::string>> RunWaits::suspect() const {
  if (!wait_ || wait_->over) return std::nullopt;
  if (wait_->report.finding.culprits.empty() || wait_->report.finding.deadlock) return std::nullopt;
  const agent::RankState& rank = wait_->report.ranks[static_cast<size_t>(wait_->report.finding.culprits.front())];
  return std::pair(rank.rank, fmt::format("keeps the others waiting: it {}; {}", wait_->report.finding.reason,
                                          rank.view.description));
}

fs::path RunWaits::report_failure(const agent::Failure& failure, const comm::ShmWorld& world) {
  if (wait_ && wait_->over) {
    take_stacks(0);
    write_report();
    wait_.reset();
  }
  if (!wait_) {
    wait_ = LongWait{.rank = failure.rank};
    wait_->report.ranks = states(world);
    wait_->report.finding = agent::find_culprit(wait_->report.ranks);
    wait_->report.finding.culprits = {failure.rank};
    wait_->report.finding.reason = failure.hang ? "hangs" : "failed";
    wait_->report.finding.deadlock = false;
    wait_->report.finding.chain.clear();
    if (failure.hang) probe_stacks();  // of others it would only delay the restart
  }
  take_stacks(kStackPatienceMs);
  wait_->report.title = fmt::format("{}: generation {} has failed", name_, failure.generation);
  wait_->report.failure = failure.message;
  write_report();
  fs::path path = wait_->file();
  wait_.reset();
  return path;
}

}  // namespace cairn::tools
