// cairn report RUN: what a run did, to be read in ten seconds; with --follow, what it does.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/core/clock.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/metrics.h"
#include "runtime/telemetry/terminal.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/run/folder.h"
#include "tools/run/goodput.h"
#include "tools/run/troubles.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr auto kFollowPause = std::chrono::milliseconds(500);

std::string text_of(const json& event, const char* key) {
  return event.contains(key) && event[key].is_string() ? event[key].get<std::string>() : std::string();
}
double number_of(const json& event, const char* key, double otherwise = NAN) {
  return event.contains(key) && event[key].is_number() ? event[key].get<double>() : otherwise;
}
int64_t whole_of(const json& event, const char* key, int64_t otherwise = 0) {
  return event.contains(key) && event[key].is_number_integer() ? event[key].get<int64_t>() : otherwise;
}

/// Lines that have come to the end of a file since the last look; a last one that is not complete waits.
class NewLines {
 public:
  explicit NewLines(fs::path path) : path_(std::move(path)) {}
  std::vector<json> take() {
    std::vector<json> out;
    std::ifstream in(path_, std::ios::binary);
    in.seekg(at_);
    for (std::string line; std::getline(in, line) && !in.eof();) {
      at_ += static_cast<std::streamoff>(line.size()) + 1;
      json value = json_or_nothing(line);
      if (value.is_object()) out.push_back(std::move(value));  // else torn by a kill, or the empty line that ended it
    }
    return out;
  }

 private:
  fs::path path_;
  std::streamoff at_ = 0;
};

double median(std::vector<double> values) {
  if (values.empty()) return NAN;
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// One start of ranks: by an agent (generation 0), or again by the same one after a failure.
struct Start {
  double time = 0;
  int64_t generation = 0, step = 0, world = 0;
  std::string source;  // "memory", "disk" or "fresh"
  std::string mesh;    // empty: an older build's, which does not tell
  std::string by;      // "pid 12 on host"
  bool ended = false;  // an agent's: it said so itself
  int64_t exit_code = 0;
  double end_time = 0;
};

Start start_of(const json& event) {
  Start out{.time = number_of(event, "time", 0),
            .generation = whole_of(event, "generation"),
            .step = whole_of(event, "step"),
            .world = whole_of(event, "world"),
            .source = text_of(event, "source"),
            .mesh = text_of(event, "mesh")};
  if (out.source.empty()) {  // of an older build
    const std::string from = text_of(event, "from");
    out.source = from == "a fresh start" ? "fresh" : from.ends_with("in shared memory") ? "memory" : "disk";
  }
  if (event.contains("pid"))
    out.by = fmt::format("pid {} on {}", whole_of(event, "pid"), printable(text_of(event, "host")));
  return out;
}

struct Layout {
  std::string mesh;
  int64_t first_step = 0, last_step = 0;
  std::vector<double> tokens_per_s;
};

/// A restart of the ranks; in seconds.
struct Recovery {
  double whole = 0;                         // from the failure to the first new step
  double stop = NAN, load = NAN, step = 0;  // the ranks were gone; there was state for new ones; the step itself
  double start() const { return std::max(0.0, whole - stop - load - step); }
  std::string text() const {
    const auto seconds = [](double of) { return telemetry::format_duration(of); };
    const std::string all = fmt::format("{} from the failure to the first new step", seconds(whole));
    if (std::isnan(stop)) return fmt::format("{} ({} of it the step)", all, seconds(step));
    return fmt::format("{}: stop {}, load {}, start {}, the step {}", all, seconds(stop), seconds(load),
                       seconds(start()), seconds(step));
  }
};

/// What metrics.jsonl and events.jsonl say together.
struct History {
  std::vector<telemetry::StepMetrics> steps;
  std::vector<telemetry::StepMetrics> superseded;  // steps that were done again
  std::vector<Start> starts;
  std::vector<Recovery> recoveries;
  std::vector<double> saves;        // seconds
  std::vector<Layout> layouts;      // in the order of their use
  std::vector<double> save_pauses;  // seconds: of training, for a save
  std::optional<Goodput> goodput;   // none before the first step
  Troubles troubles;
  std::optional<RunHolder> holder;  // who has the run now

  const Start* last_agent() const {
    for (auto start = starts.rbegin(); start != starts.rend(); ++start) {
      if (start->generation == 0) return &*start;
    }
    return nullptr;
  }
  /// The step at which an agent that has said no end was last heard of, before the start at `next` (or the end).
  int64_t last_step_before(size_t next) const {
    const double until = next < starts.size() ? starts[next].time : INFINITY;
    int64_t step = 0;
    for (const auto* told : {&steps, &superseded}) {
      for (const telemetry::StepMetrics& metrics : *told) {
        if (metrics.time < until) step = std::max(step, metrics.step);
      }
    }
    return step;
  }
};

Result<History> read_history(const fs::path& run) {
  History out;
  Result<telemetry::ToldSteps> told = telemetry::read_told_steps(run / "metrics.jsonl");
  if (!told.ok()) return std::move(told).error().with("no metrics; is this a run folder?");
  out.steps = std::move(told.value().kept);
  out.superseded = std::move(told.value().superseded);
  size_t agent = 0;  // index of the start of the agent at work
  std::optional<json> respawned;
  for (const json& event : NewLines(run / "events.jsonl").take()) {
    const std::string kind = text_of(event, "event");
    if (kind == "start") {
      out.starts.push_back(start_of(event));
      if (out.starts.back().generation == 0) agent = out.starts.size() - 1;
    } else if (kind == "end" && !out.starts.empty()) {
      Start& of = out.starts[agent];
      of.ended = true;
      of.exit_code = whole_of(event, "exit_code");
      of.end_time = number_of(event, "time", 0);
    } else if (kind == "respawned") {
      respawned = event;
    } else if (kind == "recovered") {
      Recovery recovery{.whole = number_of(event, "seconds"), .step = number_of(event, "step_seconds")};
      if (const std::optional<json> before = std::exchange(respawned, std::nullopt)) {
        recovery.stop = number_of(*before, "ms_to_reap") / 1000;
        recovery.load = number_of(*before, "ms_to_spawn") / 1000 - recovery.stop;
      }
      out.recoveries.push_back(recovery);
    } else if (kind == "saved") {
      out.saves.push_back(number_of(event, "seconds"));
      out.save_pauses.push_back(number_of(event, "pause_ms", 0) / 1000);
    }
  }
  size_t at = 0;
  for (const telemetry::StepMetrics& step : out.steps) {
    while (at + 1 < out.starts.size() && out.starts[at + 1].time <= step.time) ++at;
    if (out.starts.empty() || out.starts[at].mesh.empty()) continue;
    if (out.layouts.empty() || out.layouts.back().mesh != out.starts[at].mesh)
      out.layouts.push_back({out.starts[at].mesh, step.step, step.step, {}});
    out.layouts.back().last_step = step.step;
    out.layouts.back().tokens_per_s.push_back(step.tokens_per_s);
  }
  out.troubles = troubles_of(run);
  out.holder = holder_of_run(run);
  if (auto goodput = goodput_of(run, out.holder ? SystemClock().unix_s() : 0); goodput.ok()) {
    out.goodput = std::move(goodput).value();
  }
  return out;
}

std::string from_text(const Start& start) {
  if (start.source == "fresh") return "from the beginning";
  return fmt::format("from step {} {}", start.step, start.source == "memory" ? "in shared memory" : "on disk");
}

std::vector<std::string> advice_of(const History& history) {
  std::vector<std::string> out = trouble_advice(history.troubles);
  if (!history.goodput) return out;
  const auto typical = [](const std::vector<double>& values) { return values.empty() ? 0.0 : median(values); };
  std::ranges::move(advice(*history.goodput, typical(history.saves), typical(history.save_pauses)),
                    std::back_inserter(out));
  return out;
}

std::string ago(double unix_s) { return telemetry::format_duration(std::max(0.0, SystemClock().unix_s() - unix_s)); }

/// Each life of the run: agents, how they ended, what the next one went on from.
std::vector<std::string> life_lines(const History& history) {
  std::vector<std::string> out;
  std::string mesh;
  for (size_t k = 0; k < history.starts.size(); ++k) {
    const Start& start = history.starts[k];
    std::string line = start.generation > 0 ? fmt::format("ranks again {}", from_text(start))
                       : k == 0             ? fmt::format("began {}", from_text(start))
                                            : fmt::format("resumed {}", from_text(start));
    if (!start.mesh.empty() && mesh.empty()) line += fmt::format(", {}", start.mesh);
    if (!start.mesh.empty() && !mesh.empty() && mesh != start.mesh)
      line += fmt::format(", layout {} -> {}", mesh, start.mesh);
    if (!start.mesh.empty()) mesh = start.mesh;
    out.push_back(std::move(line));
    size_t next = k + 1;
    while (next < history.starts.size() && history.starts[next].generation > 0) ++next;
    if (start.generation > 0 || start.ended) continue;
    if (next == history.starts.size() && history.holder) continue;  // at work
    std::string killed =
        fmt::format("the agent{} was killed without an end, last heard of at step {}",
                    start.by.empty() ? "" : fmt::format(" ({})", start.by), history.last_step_before(next));
    if (next > k + 1) killed += ", after what follows";
    out.push_back(std::move(killed));
  }
  return out;
}

std::string state_text(const History& history, const fs::path& run) {
  const Start* const agent = history.last_agent();
  const std::string last =
      history.steps.empty() ? std::string("no step yet")
                            : fmt::format("step {}, {} ago", history.steps.back().step, ago(history.steps.back().time));
  if (history.holder) return fmt::format("running ({}); {}", history.holder->describe(), last);
  if (agent == nullptr) return fmt::format("not running; {}", last);
  if (!agent->ended)
    return fmt::format("not running: its agent was killed; {}. `cairn resume {}` goes on", last, run.string());
  return fmt::format("not running: ended with exit code {}, {} ago; {}", agent->exit_code, ago(agent->end_time), last);
}

json history_json(const History& history) {
  json starts = json::array(), layouts = json::array();
  for (size_t k = 0; k < history.starts.size(); ++k) {
    const Start& start = history.starts[k];
    size_t next = k + 1;
    while (next < history.starts.size() && history.starts[next].generation > 0) ++next;
    starts.push_back({{"time", start.time},
                      {"generation", start.generation},
                      {"step", start.step},
                      {"source", start.source},
                      {"mesh", start.mesh.empty() ? json() : json(start.mesh)}});
    if (start.generation > 0) continue;
    const bool alive = next == history.starts.size() && history.holder.has_value();
    starts.back()["end"] = start.ended ? "ended" : alive ? "alive" : "killed";
    if (start.ended) starts.back()["exit_code"] = start.exit_code;
  }
  for (const Layout& layout : history.layouts) {
    layouts.push_back({{"mesh", layout.mesh},
                       {"first_step", layout.first_step},
                       {"last_step", layout.last_step},
                       {"tokens_per_s_median", median(layout.tokens_per_s)}});
  }
  json out{{"starts", std::move(starts)}, {"layouts", std::move(layouts)}, {"alive", history.holder.has_value()}};
  if (history.goodput) out["goodput"] = to_json(*history.goodput);
  out.update(to_json(history.troubles));
  out["advice"] = advice_of(history);
  if (history.holder) {
    out["holder"] = {{"host", history.holder->host}, {"pid", history.holder->pid}, {"since", history.holder->since}};
  }
  return out;
}

/// `json_line`: JSON on one line, before those of --follow.
void print_report(const History& history, const fs::path& run, bool as_json, bool json_line) {
  const std::vector<telemetry::StepMetrics>& steps = history.steps;
  std::vector<double> losses, step_ms, lost_ms, speeds;
  double valid = NAN;
  std::vector<std::pair<std::string, double>> valid_sources;
  int64_t snapshots = 0, left_out = 0;
  double lost_total = 0;
  std::map<std::string, double> split_ms;  // of all steps
  for (const telemetry::StepMetrics& step : steps) {
    losses.push_back(step.loss);
    step_ms.push_back(step.step_ms);
    speeds.push_back(step.tokens_per_s);
    if (step.checkpoint_lost_ms > 0) {
      lost_ms.push_back(step.checkpoint_lost_ms);
      lost_total += step.checkpoint_lost_ms;
      snapshots += step.snapshot_left_out ? 0 : 1;
    }
    left_out += step.snapshot_left_out ? 1 : 0;
    if (step.valid_loss) {
      valid = *step.valid_loss;
      valid_sources = step.valid_source_loss;
    }
    for (const auto& [phase, ms] : step.split_ms) split_ms[phase] += ms;
  }
  const double typical_ms = median(step_ms);
  const std::vector<double>& saves = history.saves;
  if (as_json) {
    const auto number = [](double value) { return std::isnan(value) ? json(nullptr) : json(value); };
    json out{{"steps", steps.empty() ? 0 : steps.back().step},
             {"first_loss", losses.empty() ? json() : json(losses.front())},
             {"last_loss", losses.empty() ? json() : json(losses.back())},
             {"last_step_time", steps.empty() ? json() : json(steps.back().time)},
             {"valid_loss", number(valid)},
             {"valid_source_loss", json::object()},
             {"step_ms_median", number(typical_ms)},
             {"split_ms", split_ms},
             {"snapshots", snapshots},
             {"snapshots_left_out", left_out},
             {"snapshot_ms_median", number(median(lost_ms))},
             {"checkpoint_lost_ms", lost_total},
             {"saves", saves.size()},
             {"save_seconds_median", number(median(saves))},
             {"recoveries_seconds", json::array()}};
    for (const Recovery& one : history.recoveries) out["recoveries_seconds"].push_back(one.whole);
    for (const auto& [name, loss] : valid_sources) out["valid_source_loss"][name] = loss;
    out.update(history_json(history));
    if (json_line) {
      fmt::print("{}\n", json_text(out));
    } else {
      print_json(out);
    }
    return;
  }
  if (steps.size() > 1) {
    // The last column of a terminal stays free: some begin a new line once it is filled.
    const int64_t columns = std::min<int64_t>(telemetry::terminal_columns(STDOUT_FILENO, 80), 80) - 1;
    std::vector<telemetry::CurvePoint> curve;
    for (const telemetry::StepMetrics& step : steps) curve.push_back({step.step, step.loss});
    fmt::print("{}\n", telemetry::draw_curve(curve, columns, 8, telemetry::locale_is_utf8()));
  }
  fmt::print("  state          {}\n", state_text(history, run));
  if (!steps.empty()) {
    fmt::print("  loss           {:.3f} -> {:.3f} nats a token ({:.2f} -> {:.2f} bits)", losses.front(), losses.back(),
               losses.front() / std::log(2), losses.back() / std::log(2));
    if (!std::isnan(valid)) fmt::print(", validation {:.3f}", valid);
    for (size_t k = 0; valid_sources.size() > 1 && k < valid_sources.size(); ++k) {
      fmt::print("{}{} {:.3f}{}", k ? ", " : " (", printable(valid_sources[k].first), valid_sources[k].second,
                 k + 1 == valid_sources.size() ? ")" : "");
    }
    fmt::print("\n  speed          {:.1f} steps/s (median step {:.1f} ms), {} tokens/s\n", 1000 / typical_ms,
               typical_ms, format_count(median(speeds)));
  }
  for (size_t k = 0; history.layouts.size() > 1 && k < history.layouts.size(); ++k) {
    const Layout& layout = history.layouts[k];
    fmt::print("  layout         {}: steps {} to {}, {} tokens/s\n", layout.mesh, layout.first_step, layout.last_step,
               format_count(median(layout.tokens_per_s)));
  }
  double split_total = 0;
  for (const auto& [phase, ms] : split_ms) split_total += ms;
  if (split_total > 0) {
    std::vector<std::pair<double, std::string>> shares;
    for (const auto& [phase, ms] : split_ms) shares.emplace_back(ms / split_total, phase);
    std::sort(shares.rbegin(), shares.rend());
    fmt::print("  time           ");
    for (size_t i = 0; i < shares.size() && shares[i].first >= 5e-4; ++i) {
      fmt::print("{}{} {:.1f}%", i ? ", " : "", shares[i].second, 100 * shares[i].first);
    }
    fmt::print(" (of rank 0)\n");
  }
  if (!steps.empty()) {
    fmt::print("  checkpoints    {} snapshots, {:.2f} ms of training lost to each ({:.2f} s in all)", snapshots,
               lost_ms.empty() ? 0.0 : median(lost_ms), lost_total / 1000);
    if (left_out > 0) fmt::print("; {} more were due and left out", left_out);
    if (!saves.empty())
      fmt::print("; {} saved to disk in {:.2f} s each, in the background", saves.size(), median(saves));
    fmt::print("\n");
  }
  if (history.goodput) fmt::print("  goodput        {}\n", goodput_text(*history.goodput));
  const std::vector<std::string> lives = life_lines(history);
  for (size_t k = 0; lives.size() > 1 && k < lives.size(); ++k) fmt::print("  life           {}\n", lives[k]);
  for (const Recovery& one : history.recoveries) fmt::print("  recovery       {}\n", one.text());
  for (const auto& [head, line] : trouble_lines(history.troubles)) fmt::print("  {:<14} {}\n", head, line);
  for (const std::string& line : advice_of(history)) fmt::print("  advice         {}\n", line);
}

/// A line for people of one event; empty for those that only programs want.
std::string event_text(const json& event) {
  const std::string kind = text_of(event, "event");
  if (kind == "start") {
    const Start start = start_of(event);
    return fmt::format("{} {}{}", start.generation > 0 ? "ranks start again" : "an agent starts", from_text(start),
                       start.mesh.empty() ? "" : ", " + start.mesh);
  }
  if (kind == "saved")
    return fmt::format("step {} saved in {}", whole_of(event, "step"),
                       telemetry::format_duration(number_of(event, "seconds", 0)));
  if (kind == "recovered")
    return fmt::format("recovered: {} from the failure to step {}",
                       telemetry::format_duration(number_of(event, "seconds", 0)), whole_of(event, "step"));
  if (kind == "straggler")
    return fmt::format("{} computes {:.1f} x as long as the others: {}", printable(text_of(event, "host")),
                       number_of(event, "ratio", 1), printable(text_of(event, "why")));
  if (kind == "straggler_over")
    return fmt::format("{} is as fast as the others again", printable(text_of(event, "host")));
  if (kind == "excluded")
    return fmt::format("{} is excluded: {}", printable(text_of(event, "host")), printable(text_of(event, "reason")));
  if (kind == "failure" || kind == "save_failed" || kind == "copy_failed" || kind == "copy_given_up")
    return fmt::format("{}: {}", kind, printable(text_of(event, "message")));
  if (kind == "stop_requested") return "asked to stop";
  if (kind == "end") return fmt::format("ended with exit code {}", whole_of(event, "exit_code"));
  return kind == "ready" || kind == "respawned" ? std::string() : kind;
}

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
  if (!as_json) fmt::print("nobody has the run any more\n");
}

Result<int> report(const fs::path& run, bool followed, bool as_json) {
  NewLines metrics(run / "metrics.jsonl"), events(run / "events.jsonl");
  metrics.take();  // before the history is read: what comes meanwhile is told twice, and nothing is lost
  events.take();
  RT_TRY_SET(const History history, read_history(run));
  print_report(history, run, as_json, followed);
  std::fflush(stdout);
  if (followed && history.holder) follow(run, std::move(metrics), std::move(events), as_json);
  return 0;
}

}  // namespace

void add_report(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand(
      "report", "loss curve, speed, goodput, checkpoints, kills, resumes and layouts of a run; whether it is at work");
  struct Args {
    std::string run;
    bool follow = false;
  };
  const auto args = std::make_shared<Args>();
  command->add_option("RUN", args->run, "the run folder")->required();
  command->add_flag("--follow", args->follow,
                    "then print what is new, until the run ends or Ctrl-C; with --json a line "
                    "of JSON each");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 2 not a run folder. How the run ended stands in the report.\n"
      "Examples:\n"
      "  cairn report runs/mine\n"
      "  cairn report runs/mine --follow --json");
  command->callback([args, &session] {
    session.action = [args, &session] { return report(args->run, args->follow, session.json); };
  });
}

}  // namespace cairn::tools
