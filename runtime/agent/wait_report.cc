#include "runtime/agent/wait_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "runtime/json/json.h"

namespace cairn::agent {

using nlohmann::json;

namespace {

constexpr size_t kMostWithStacks = 16;

bool is_stopped(char state) { return state == 'T' || state == 't'; }
bool is_gone(const RankState& rank) {
  return rank.view.pid != 0 && (rank.state == 'Z' || rank.state == 'X' || rank.state == '?' || rank.view.closed);
}

/// The rank's own thread sleeps outside of any operation while the other one is in one: it waits for it, as at the end
/// of a step for its gradients. A thread that computes is in state R.
bool waits_for_itself(const RankState& rank) {
  return !rank.view.inside && rank.view.beside.inside && rank.state == 'S';
}

/// What holds the rank up: its own thread's operation, or that of the thread which it waits for.
const comm::OperationView& holding(const RankState& rank) {
  return waits_for_itself(rank) ? rank.view.beside : static_cast<const comm::OperationView&>(rank.view);
}

std::string reason_for(const RankState& rank) {
  if (is_gone(rank)) return rank.view.closed ? "has left" : "has died";
  if (is_stopped(rank.state)) return fmt::format("is stopped (state {})", rank.state);
  if (rank.view.pid == 0) return rank.host.empty() ? "has not started" : "is not known: its agent has told nothing";
  if (rank.state == 'D') return "waits for a disk or a device (state D)";
  if (holding(rank).inside) return "is inside an operation and waits for nobody";
  return fmt::format("is in no operation of the group: it computes, or waits for something else (state {})",
                     rank.state);
}

std::string place(const RankState& rank) {
  if (rank.view.step < 0) return {};
  return fmt::format(", at step {}{}", rank.view.step,
                     rank.view.phase.empty() ? "" : fmt::format(" ({})", rank.view.phase));
}

std::string who(const RankState& rank) {
  return fmt::format("rank {} (pid {}{})", rank.rank, rank.view.pid, rank.host.empty() ? "" : " on " + rank.host);
}

/// "2", "0 to 3", "0, 2, 5"
std::string list_text(const std::vector<int64_t>& ranks) {
  if (ranks.size() > 2 && ranks.back() - ranks.front() + 1 == static_cast<int64_t>(ranks.size())) {
    return fmt::format("{} to {}", ranks.front(), ranks.back());
  }
  return fmt::format("{}", fmt::join(ranks, ", "));
}

/// The text without its time, which differs from rank to rank.
std::string operation_of(const comm::OperationView& view) {
  return view.text.empty() ? "before its first operation" : view.text.substr(0, view.text.find(", entered "));
}

}  // namespace

WaitFinding find_culprit(const std::vector<RankState>& ranks) {
  WaitFinding out;
  const RankState* longest = nullptr;
  const comm::OperationView* waits = nullptr;  // the operation of `longest` that the chain begins with
  for (const RankState& rank : ranks) {
    for (const comm::OperationView* view : {static_cast<const comm::OperationView*>(&rank.view), &rank.view.beside}) {
      if (!view->inside || (longest != nullptr && view->since_ms <= out.waited_ms)) continue;
      longest = &rank, waits = view;
      out.waited_ms = view->since_ms;
    }
  }
  const auto blame = [&](const RankState& rank) {
    out.culprits = {rank.rank};
    out.reason = reason_for(rank);
    return out;
  };
  // Who cannot go on by itself comes before any guess.
  for (const RankState& rank : ranks) {
    if (is_gone(rank)) return blame(rank);
  }
  for (const RankState& rank : ranks) {
    if (is_stopped(rank.state)) return blame(rank);
  }
  if (longest == nullptr) return out;
  const auto count = static_cast<int64_t>(ranks.size());
  std::vector<const comm::OperationView*> seen;  // of out.chain: a rank may be passed through either of its threads
  for (int64_t at = longest->rank;;) {
    const RankState& rank = ranks[static_cast<size_t>(at)];
    const comm::OperationView& view = seen.empty() ? *waits : holding(rank);
    const auto before = std::find(seen.begin(), seen.end(), &view);
    if (before != seen.end()) {
      out.culprits.assign(out.chain.begin() + (before - seen.begin()), out.chain.end());
      out.deadlock = true;
      out.reason = "wait for each other";
      return out;
    }
    out.chain.push_back(at);
    seen.push_back(&view);
    if (!view.inside || view.awaits < 0 || view.awaits >= count) return blame(rank);
    at = view.awaits;
  }
}

std::string summary_text(const WaitFinding& finding, const std::vector<RankState>& ranks) {
  if (finding.culprits.empty()) return "no rank waits for another\n";
  std::string out;
  if (finding.deadlock) {
    out = fmt::format("ranks {} {}\n", list_text(finding.culprits), finding.reason);
  } else {
    const RankState& first = ranks[static_cast<size_t>(finding.culprits.front())];
    out = fmt::format("{} {}{}; it was {}\n", who(first), finding.reason, place(first), operation_of(first.view));
    if (!first.view.beside.text.empty()) out += fmt::format("  beside it {}\n", operation_of(first.view.beside));
  }
  struct Waiters {
    std::vector<int64_t> ranks;
    int64_t since_ms = 0;
  };
  std::map<std::pair<std::string, int64_t>, Waiters> waits;
  for (const RankState& rank : ranks) {
    const bool culprit = !finding.deadlock && rank.rank == finding.culprits.front();
    if (culprit) continue;
    const auto tell = [&](const comm::OperationView& view, const char* beside) {
      if (!view.inside) return;
      Waiters& waiters = waits[{beside + operation_of(view) + place(rank), view.awaits}];
      waiters.ranks.push_back(rank.rank);
      waiters.since_ms = std::max(waiters.since_ms, view.since_ms);
    };
    tell(rank.view, "");
    tell(rank.view.beside, "beside its own work ");
  }
  for (const auto& [what, waiters] : waits) {
    out += fmt::format("  rank{} {} {} for {:.1f} s{}\n", waiters.ranks.size() > 1 ? "s" : "", list_text(waiters.ranks),
                       what.first, static_cast<double>(waiters.since_ms) / 1e3,
                       what.second >= 0 ? fmt::format(", waiting for rank {}", what.second) : "");
  }
  return out;
}

std::string to_text(const WaitReport& report) {
  std::string out = fmt::format("{}\n{}\n\n", report.title, report.time);
  if (!report.failure.empty()) out += report.failure + "\n\n";
  if (report.of_all) out += summary_text(report.finding, report.ranks);
  if (report.finding.chain.size() > 1)
    out += fmt::format("  chain of waits: {}\n", fmt::join(report.finding.chain, " -> "));
  // Culprits first, then the others in their order.
  std::vector<const RankState*> order;
  for (const int64_t rank : report.finding.culprits) order.push_back(&report.ranks[static_cast<size_t>(rank)]);
  for (const RankState& rank : report.ranks) {
    if (std::find(order.begin(), order.end(), &rank) == order.end()) order.push_back(&rank);
  }
  const std::vector<StackGroup> groups = group_stacks(report.stacks);
  if (groups.size() > 1 || report.stacks.size() > 1) {
    out += "\nTraining threads, equal ones together, fewest first:\n";
    for (const StackGroup& group : groups) {
      out += fmt::format("  rank{} {}\n", group.ranks.size() > 1 ? "s" : "", list_text(group.ranks));
      for (size_t k = 0; k < group.frames.size(); ++k) out += fmt::format("    #{:<2} {}\n", k, group.frames[k]);
    }
  }
  for (const RankState* rank : order) {
    out += fmt::format("\n{}, state {}: {}\n", who(*rank), rank->state, rank->view.description);
    const bool culprit = std::ranges::find(report.finding.culprits, rank->rank) != report.finding.culprits.end();
    if (report.stacks.size() > kMostWithStacks && !culprit) continue;
    const auto stacks = std::ranges::find(report.stacks, rank->rank, &RankStacks::rank);
    if (stacks != report.stacks.end()) out += to_text(stacks->stacks, "  ");
  }
  return out;
}

std::vector<StackGroup> group_stacks(const std::vector<RankStacks>& all) {
  std::vector<StackGroup> out;
  for (const RankStacks& one : all) {
    const std::vector<ThreadStack>& threads = one.stacks.threads;
    if (threads.empty()) continue;
    const auto main = std::ranges::find(threads, one.stacks.pid, &ThreadStack::tid);
    const std::vector<std::string>& frames = main != threads.end() ? main->frames : threads.front().frames;
    const auto same = std::ranges::find(out, frames, &StackGroup::frames);
    if (same != out.end()) {
      same->ranks.push_back(one.rank);
    } else {
      out.push_back({{one.rank}, frames});
    }
  }
  for (StackGroup& group : out) std::ranges::sort(group.ranks);
  std::ranges::stable_sort(out, {}, [](const StackGroup& group) { return group.ranks.size(); });
  return out;
}

json to_json(const RankStacks& stacks) { return {{"rank", stacks.rank}, {"stacks", to_json(stacks.stacks)}}; }

Result<RankStacks> rank_stacks_from_json(const json& in) {
  if (!in.is_object() || !in.contains("rank") || !in.contains("stacks"))
    return Error{ErrorCode::kCorrupt, "stacks of no rank"};
  const std::optional<int64_t> rank = json_integer(in["rank"], 0, INT64_MAX);
  if (!rank) return Error{ErrorCode::kCorrupt, "stacks of no rank"};
  RT_TRY_SET(ProcessStacks stacks, process_stacks_from_json(in["stacks"]));
  return RankStacks{*rank, std::move(stacks)};
}

}  // namespace cairn::agent
