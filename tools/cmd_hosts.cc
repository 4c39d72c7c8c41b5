// cairn hosts RUN: the hosts that train a run, those that wait, that are away and that are excluded.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/core/clock.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"
#include "tools/commands.h"
#include "tools/run/folder/excluded.h"
#include "tools/run/folder/folder.h"
#include "tools/run/hosts/run_board.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr auto kFollowPause = std::chrono::milliseconds(500);
constexpr double kLateS = 10;  // then the leader is late: it writes each second

struct HostsArgs {
  std::string run;
  bool follow = false;
};

/// The hosts' part of a run folder.
struct Seen {
  std::optional<RunStatus> status;  // nullopt: no leader of several hosts has written
  std::vector<Exclusion> excluded;
  std::optional<RunHolder> holder;  // of a run that has written none
  double age_s = 0;                 // of status, by this machine's clock
};

Result<Seen> look(const fs::path& run) {
  if (is_gone(run / "run.json")) return Error{ErrorCode::kInvalidInput, fmt::format("{}: no run folder", run.string())};
  Seen out;
  RT_TRY_SET(out.excluded, read_excluded(run));
  const fs::path file = hosts_file(run);
  if (is_gone(file)) {
    out.holder = holder_of_run(run);
    return out;
  }
  RT_TRY_SET(const std::string text, read_text_file(file));
  Result<json> parsed = parse_json(text);
  if (!parsed.ok()) return std::move(parsed).error().with(file.string());
  RT_TRY_SET(out.status, run_status_from_json(parsed.value()).with(file.string()));
  out.age_s = std::max(0.0, SystemClock().unix_s() - out.status->time);
  return out;
}

const Exclusion* exclusion_of(const Seen& seen, const HostStatus& host) {
  const auto at = std::ranges::find(seen.excluded, host.index, &Exclusion::index);
  return at == seen.excluded.end() || host.state != "away" ? nullptr : &*at;
}

std::string state_of(const Seen& seen, const HostStatus& host) {
  if (const Exclusion* const out = exclusion_of(seen, host))
    return fmt::format("excluded until it boots: {}", printable(out->reason));
  if (host.state == "away") return "away: " + printable(host.why);
  return (seen.status->leader == host.index ? "leads, " : "") + host.state;
}

std::string head_of(const Seen& seen, const std::string& run) {
  const RunStatus& status = *seen.status;
  const auto place = std::ranges::count_if(status.hosts, [](const HostStatus& host) { return host.place >= 0; });
  std::string out = fmt::format("{}: epoch {}, {}", run, status.epoch, count_text(place, "host"));
  if (status.phase == RunPhase::kEnded)
    return out + fmt::format("; ended with exit code {} at step {} of {}", status.exit_code.value_or(0), status.step,
                             status.of);
  out += fmt::format("; {}, step {} of {}; {:.0f} s ago", phase_name(status.phase), status.step, status.of, seen.age_s);
  if (seen.age_s < kLateS) return out;
  return out +
         "\nThe leader writes this each second while it lives: it is gone, loads a checkpoint, or cannot write here";
}

std::string text_of(const Seen& seen, const std::string& run) {
  if (!seen.status) {
    return fmt::format("{}: one host; {}\n", run,
                       seen.holder ? seen.holder->describe() + " has it" : "no agent has it now");
  }
  std::string out = head_of(seen, run) + "\n";
  out += fmt::format("{:>5}  {:>4}  {:<20}  {:<22}  {:<10}  {}\n", "place", "host", "name", "address", "last beat",
                     "state");
  for (const HostStatus& host : seen.status->hosts) {
    const bool there = host.state != "away" && seen.status->phase != RunPhase::kEnded;
    out += fmt::format("{:>5}  {:>4}  {:<20}  {:<22}  {:<10}  {}\n", host.place >= 0 ? std::to_string(host.place) : "-",
                       host.index, printable(host.name), printable(host.address),
                       there ? fmt::format("{:.1f} s", host.heard_s + seen.age_s) : "", state_of(seen, host));
  }
  for (const Exclusion& one : seen.excluded) {
    const bool listed = std::ranges::any_of(seen.status->hosts,
                                            [&](const HostStatus& host) { return exclusion_of(seen, host) == &one; });
    if (!listed) out += fmt::format("excluded: {}: {}\n", printable(one.name), printable(one.reason, true));
  }
  return out;
}

json json_of(const Seen& seen, const std::string& run) {
  json excluded = json::array();
  for (const Exclusion& one : seen.excluded) {
    excluded.push_back({{"index", one.index},
                        {"name", one.name},
                        {"reason", one.reason},
                        {"class", agent::rule_of(one.failure_class).name},
                        {"time", one.time},
                        {"epoch", one.epoch}});
  }
  json out = seen.status ? to_json(*seen.status) : json::object();
  out["run"] = run;
  out["excluded"] = std::move(excluded);
  if (seen.status) {
    out["age_s"] = seen.age_s;
  } else {
    out["hosts"] = json::array();
    out["held_by"] = seen.holder ? json(seen.holder->describe()) : json();
  }
  return out;
}

/// The part of it that a person sees change.
json changes_of(const Seen& seen) {
  json out = seen.status ? to_json(*seen.status) : json::object();
  for (const char* moving : {"time", "since", "step", "of"}) out.erase(moving);
  for (json& host : out["hosts"]) host.erase("heard_s");
  out["excluded"] = seen.excluded.size();
  out["late"] = seen.age_s >= kLateS;
  return out;
}

Result<int> show(const HostsArgs& args, bool as_json) {
  for (json before;;) {
    RT_TRY_SET(const Seen seen, look(args.run));
    json now = changes_of(seen);
    if (now != before) {
      fmt::print("{}", as_json ? json_text(json_of(seen, args.run)) + "\n" : text_of(seen, args.run));
      std::fflush(stdout);
    }
    before = std::move(now);
    if (!args.follow || !seen.status || seen.status->phase == RunPhase::kEnded) return 0;
    std::this_thread::sleep_for(kFollowPause);
  }
}

}  // namespace

void add_hosts(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("hosts", "the hosts of a run: which train, wait, are away or excluded");
  const auto args = std::make_shared<HostsArgs>();
  command->add_option("RUN", args->run, "the run folder")->required();
  command->add_flag("--follow", args->follow, "print it again whenever a host's state changes, until the run ends");
  add_json_flag(*command, session);
  command->footer(
      "The leader writes what this shows once a second, in RUN/cluster/hosts.json.\n"
      "Exit codes: 0 done, 2 not a run folder, 65 a damaged file.\n"
      "Examples:\n"
      "  cairn hosts runs/mine\n"
      "  cairn hosts runs/mine --follow");
  command->callback([args, &session] { session.action = [args, &session] { return show(*args, session.json); }; });
}

}  // namespace cairn::tools
