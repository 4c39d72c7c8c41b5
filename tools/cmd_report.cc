// cairn report RUN...: what runs did, to be read in ten seconds; side by side; as a page; with --follow, what they do.
#include <fmt/format.h>
#include <unistd.h>

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
#include "runtime/core/new_file.h"
#include "runtime/core/units.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/metrics.h"
#include "runtime/telemetry/terminal.h"
#include "tools/commands.h"
#include "tools/report/compare.h"
#include "tools/report/history.h"
#include "tools/report/page.h"
#include "tools/report/report.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr auto kFollowPause = std::chrono::milliseconds(500);
constexpr int64_t kCurveBytes = 2'800'000;  // of all runs of a report: five of 100,000 steps make a page of 3 MB
constexpr auto kLeastBetweenPages = std::chrono::seconds(2);
constexpr int kTimesAPage = 20;       // the time between two pages, in times of making one: 5 % of a core at most
constexpr int64_t kPageReloadS = 10;  // of a page of runs at work

struct Args {
  std::vector<std::string> runs;
  std::string html;
  bool follow = false;
};

/// News until the run ends: of each look the newest step, each validation, each event.
void follow(const fs::path& run, NewLines metrics, NewLines events, bool as_json) {
  for (bool alive = true; alive;) {
    alive = holder_of_run(run).has_value();  // before the last look at the files
    std::optional<telemetry::StepMetrics> newest;
    const auto tell_step = [&] {
      if (!newest) return;
      fmt::print("step {}  loss {:.4f}  lr {:.2e}  {} tok/s  {:.1f} ms{}\n", newest->step, newest->loss, newest->lr,
                 format_count(newest->tokens_per_s), newest->step_ms,
                 newest->valid_loss ? fmt::format("  valid {:.4f}", *newest->valid_loss) : "");
      newest.reset();
    };
    for (const json& line : metrics.take()) {
      if (as_json) fmt::print("{}\n", json_text(line));
      Result<telemetry::StepMetrics> step = telemetry::step_metrics_from_json(line);
      if (as_json || !step.ok()) continue;
      newest = std::move(step).value();
      if (newest->valid_loss) tell_step();
    }
    tell_step();
    for (const json& event : events.take()) {
      const std::string text = event_text(event);
      if (as_json) {
        fmt::print("{}\n", json_text(event));
      } else if (!text.empty()) {
        fmt::print("{}\n", text);
      }
    }
    std::fflush(stdout);
    if (alive) std::this_thread::sleep_for(kFollowPause);
  }
  if (!as_json) fmt::print("the run has ended\n");
}

/// A report of each run, in the order of the command line. What `each` takes of a history is all that stays of it.
template <typename Each>
Status read_runs(const Args& args, const Each& each) {
  for (const std::string& run : args.runs) {
    RT_TRY_SET(const History history, read_history(run));
    each(history, run);
  }
  return {};
}

int64_t bytes_a_run(const Args& args) { return kCurveBytes / std::ssize(args.runs); }

json written_report(json runs, bool followed) {
  return {
      {"written", SystemClock().unix_s()}, {"follow_seconds", followed ? kPageReloadS : 0}, {"runs", std::move(runs)}};
}

/// Writes the page, again whenever the files of a run grow, until no process has any of the runs.
Result<int> write_pages(const Args& args, bool as_json) {
  std::vector<uintmax_t> sizes;
  for (bool first = true, alive = true; alive; first = false) {
    const auto began = std::chrono::steady_clock::now();
    std::vector<uintmax_t> now;
    alive = false;  // asked before the last look at the files
    for (const std::string& run : args.runs) {
      alive = alive || (args.follow && holder_of_run(run).has_value());
      for (const char* name : {"metrics.jsonl", "events.jsonl"}) {
        std::error_code failed;
        now.push_back(fs::file_size(fs::path(run) / name, failed));
      }
    }
    if (first || !alive || now != sizes) {
      sizes = std::move(now);
      json runs = json::array();
      RT_TRY(read_runs(args, [&](const History& history, const std::string& run) {
        runs.push_back(report_json(history, run, bytes_a_run(args)));
      }));
      json report = written_report(std::move(runs), alive);
      const std::string page = report_page(report);
      // One that is written again needs no disk: the run that is followed may be saving to it.
      RT_TRY(first ? write_output(args.html, page) : place_file(args.html, page, Durable::kNo));
      if (as_json && first) fmt::print("{}\n", json_text(report));
      if (!as_json && first)
        fmt::print("{}: {}, {}\n", args.html, count_text(std::ssize(args.runs), "run"), format_bytes(std::ssize(page)));
      if (!as_json && first && alive) fmt::print("written again while the run trains; Ctrl-C ends that\n");
      std::fflush(stdout);
    }
    if (!alive) break;
    const auto took = std::chrono::steady_clock::now() - began;
    std::this_thread::sleep_for(std::max<std::chrono::nanoseconds>(kLeastBetweenPages, kTimesAPage * took));
  }
  return 0;
}

/// The last column of a terminal stays free: some begin a new line once it is filled.
int64_t report_columns() { return std::min<int64_t>(telemetry::terminal_columns(STDOUT_FILENO, 80), 80) - 1; }

Result<int> compare(const Args& args, bool as_json) {
  json runs = json::array();
  std::vector<ComparedRun> compared;
  RT_TRY(read_runs(args, [&](const History& history, const std::string& run) {
    if (as_json) {
      runs.push_back(report_json(history, run, bytes_a_run(args)));
    } else {
      compared.push_back(compared_run(history, run));
    }
  }));
  if (as_json) {
    fmt::print("{}\n", json_text(json{{"runs", std::move(runs)}}));
  } else {
    fmt::print("{}", compare_text(compared, report_columns(), telemetry::locale_is_utf8()));
  }
  return 0;
}

Result<int> report_one(const fs::path& run, bool followed, bool as_json) {
  NewLines metrics(run / "metrics.jsonl"), events(run / "events.jsonl");
  metrics.take();  // before the history is read: what comes meanwhile is printed twice, and nothing is lost
  events.take();
  RT_TRY_SET(const History history, read_history(run));
  if (as_json) {
    fmt::print("{}\n", json_text(report_json(history, run, kCurveBytes)));
  } else {
    fmt::print("{}", report_text(history, run, report_columns(), telemetry::locale_is_utf8()));
  }
  std::fflush(stdout);
  if (followed && history.holder) follow(run, std::move(metrics), std::move(events), as_json);
  return 0;
}

Result<int> report(const Args& args, bool as_json) {
  if (!args.html.empty()) return write_pages(args, as_json);
  if (args.runs.size() == 1) return report_one(args.runs.front(), args.follow, as_json);
  if (args.follow)
    return Error{ErrorCode::kInvalidInput,
                 "--follow prints the news of one run, and several were given: with --html FILE it shows all of them"};
  return compare(args, as_json);
}

}  // namespace

void add_report(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand(
      "report", "curves, speed, goodput, checkpoints, kills, resumes of runs; side by side; as a page");
  const auto args = std::make_shared<Args>();
  command->add_option("RUN", args->runs, "run folders; several are compared")->required();
  command->add_option("--html", args->html, "write a page with all curves to FILE: one file, which needs no network")
      ->type_name("FILE");
  command->add_flag(
      "--follow", args->follow,
      "then print what is new, until the run ends or Ctrl-C, with --json a line of JSON each; with --html "
      "write the page again");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 not a run folder. How the run ended stands in the report.\n"
      "Examples:\n"
      "  cairn report runs/mine\n"
      "  cairn report runs/mine --follow --json\n"
      "  cairn report runs/a runs/b\n"
      "  cairn report runs/a runs/b --html report.html --follow");
  command->callback([args, &session] { session.action = [args, &session] { return report(*args, session.json); }; });
}

}  // namespace cairn::tools
