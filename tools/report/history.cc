#include "tools/report/history.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>

#include "ckpt/store/posix_backend.h"
#include "runtime/core/clock.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/terminal.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string text_of(const json& event, const char* key) {
  return event.contains(key) && event[key].is_string() ? event[key].get<std::string>() : std::string();
}
double number_of(const json& event, const char* key, double otherwise = NAN) {
  return event.contains(key) && event[key].is_number() ? event[key].get<double>() : otherwise;
}
int64_t whole_of(const json& event, const char* key, int64_t otherwise = 0) {
  return event.contains(key) && event[key].is_number_integer() ? event[key].get<int64_t>() : otherwise;
}

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

std::string from_text(const Start& start) {
  if (start.source == "fresh") return "from the beginning";
  return fmt::format("from step {} {}", start.step, start.source == "memory" ? "in shared memory" : "on disk");
}

std::string ago(double unix_s) { return telemetry::format_duration(std::max(0.0, SystemClock().unix_s() - unix_s)); }

/// The last step before a moment; 0 before the first.
int64_t step_at(const std::vector<telemetry::StepMetrics>& steps, double time) {
  const auto after =
      std::upper_bound(steps.begin(), steps.end(), time,
                       [](double moment, const telemetry::StepMetrics& step) { return moment < step.time; });
  return after == steps.begin() ? 0 : std::prev(after)->step;
}

Mark::Kind mark_kind(const std::string& event) {
  static const std::map<std::string, Mark::Kind> kKinds = {{"start", Mark::Kind::kRestart},
                                                           {"failure", Mark::Kind::kFailure},
                                                           {"kill", Mark::Kind::kFailure},
                                                           {"save_failed", Mark::Kind::kFailure},
                                                           {"roll_back", Mark::Kind::kBack},
                                                           {"back_to", Mark::Kind::kBack},
                                                           {"outlier", Mark::Kind::kAlarm},
                                                           {"divergence", Mark::Kind::kAlarm},
                                                           {"drop", Mark::Kind::kAlarm},
                                                           {"level_shift", Mark::Kind::kAlarm},
                                                           {"no_way_back", Mark::Kind::kAlarm},
                                                           {"straggler", Mark::Kind::kAlarm},
                                                           {"steps_slow", Mark::Kind::kAlarm},
                                                           {"spare_lost", Mark::Kind::kAlarm},
                                                           {"excluded", Mark::Kind::kAlarm},
                                                           {"wait", Mark::Kind::kAlarm},
                                                           {"save_overdue", Mark::Kind::kAlarm},
                                                           {"copy_failed", Mark::Kind::kAlarm},
                                                           {"hook_failed", Mark::Kind::kAlarm},
                                                           {"track_failed", Mark::Kind::kAlarm},
                                                           {"copy_given_up", Mark::Kind::kAlarm},
                                                           {"stage", Mark::Kind::kChange},
                                                           {"recipe_changed", Mark::Kind::kChange},
                                                           {"initialized", Mark::Kind::kChange},
                                                           {"saved", Mark::Kind::kSave}};
  const auto known = kKinds.find(event);
  return known == kKinds.end() ? Mark::Kind::kNote : known->second;
}

/// Labels and lineage help people: a damaged file is named, and the report comes without it.
void read_beside(const fs::path& run, History& out) {
  if (Result<Lineage> lineage = Lineage::read(run); lineage.ok()) {
    out.lineage = lineage.value().entries();
    if (!lineage.value().problem().empty()) out.unreadable.push_back(lineage.value().problem());
  } else {
    out.unreadable.push_back(lineage.error().message);
  }
  ckpt::PosixBackend io;
  if (Result<ckpt::Labels> labels = ckpt::read_labels(io, run / "checkpoints"); labels.ok()) {
    out.labels = std::move(labels).value();
  } else {
    out.unreadable.push_back(labels.error().message);
  }
}

}  // namespace

std::vector<json> NewLines::take() {
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

double Recovery::start() const { return std::max(0.0, whole - stop - load - step); }

std::string Recovery::text() const {
  const auto seconds = [](double value) { return telemetry::format_duration(value); };
  const std::string all = fmt::format("{} from the failure to the first new step", seconds(whole));
  if (std::isnan(stop)) return fmt::format("{} ({} of it the step)", all, seconds(step));
  return fmt::format("{}: stop {}, load {}, start {}, the step {}", all, seconds(stop), seconds(load), seconds(start()),
                     seconds(step));
}

std::string_view to_text(Mark::Kind kind) {
  switch (kind) {
    case Mark::Kind::kRestart:
      return "restart";
    case Mark::Kind::kFailure:
      return "failure";
    case Mark::Kind::kBack:
      return "back";
    case Mark::Kind::kAlarm:
      return "alarm";
    case Mark::Kind::kChange:
      return "change";
    case Mark::Kind::kSave:
      return "save";
    case Mark::Kind::kNote:
      break;
  }
  return "note";
}

const Start* History::last_agent() const {
  for (auto start = starts.rbegin(); start != starts.rend(); ++start) {
    if (start->generation == 0) return &*start;
  }
  return nullptr;
}

int64_t History::last_step_before(size_t next) const {
  const double until = next < starts.size() ? starts[next].time : INFINITY;
  int64_t step = 0;
  for (const auto* heard : {&steps, &superseded}) {
    for (const telemetry::StepMetrics& metrics : *heard) {
      if (metrics.time < until) step = std::max(step, metrics.step);
    }
  }
  return step;
}

std::vector<double> History::save_seconds() const {
  std::vector<double> out;
  for (const Save& save : saves) out.push_back(save.seconds);
  return out;
}

double median(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return NAN;
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

Result<History> read_history(const fs::path& run) {
  History out;
  Result<telemetry::ToldSteps> told = telemetry::read_told_steps(run / "metrics.jsonl");
  if (!told.ok()) return std::move(told).error().with("no metrics; is this a run folder?");
  out.steps = std::move(told.value().kept);
  out.superseded = std::move(told.value().superseded);
  out.tasks = task_curves(out.steps, run);
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
      out.saves.push_back({.step = whole_of(event, "step"),
                           .seconds = number_of(event, "seconds"),
                           .pause_s = number_of(event, "pause_ms", 0) / 1000});
    }
    if (std::string text = event_text(event); !text.empty()) {
      const double time = number_of(event, "time", 0);
      const int64_t step = kind == "roll_back" ? whole_of(event, "to_step") : whole_of(event, "step", -1);
      out.marks.push_back({.kind = mark_kind(kind),
                           .time = time,
                           .step = step >= 0 ? step : step_at(out.steps, time),
                           .event = kind,
                           .text = std::move(text)});
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
  read_beside(run, out);
  out.holder = holder_of_run(run);
  if (auto goodput = goodput_of(run, out.holder ? SystemClock().unix_s() : 0); goodput.ok()) {
    out.goodput = std::move(goodput).value();
  }
  return out;
}

std::vector<std::string> advice_of(const History& history) {
  std::vector<std::string> out = trouble_advice(history.troubles);
  if (!history.goodput) return out;
  std::vector<double> pauses;
  for (const Save& save : history.saves) pauses.push_back(save.pause_s);
  const double seconds = median(history.save_seconds()), pause = median(pauses);
  std::ranges::move(advice(*history.goodput, std::isnan(seconds) ? 0 : seconds, std::isnan(pause) ? 0 : pause),
                    std::back_inserter(out));
  return out;
}

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
    return fmt::format("not running: its agent was killed; {}. `cairn resume {}` resumes it", last,
                       printable(run.string()));
  return fmt::format("not running: ended with exit code {}, {} ago; {}", agent->exit_code, ago(agent->end_time), last);
}

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
  if (kind == "steps_slow") {
    const std::string host = text_of(event, "host");
    return fmt::format(
        "step {}: steps take {:.1f} x as long as before{}", whole_of(event, "step"), number_of(event, "ratio", 1),
        host.empty() ? "" : fmt::format("; rank {} ({}) is the slowest", whole_of(event, "rank"), printable(host)));
  }
  if (kind == "steps_slow_over")
    return fmt::format("step {}: steps are as fast as before again", whole_of(event, "step"));
  if (kind == "spare_lost")
    return fmt::format("{}, a spare, was lost: {}", printable(text_of(event, "host")),
                       printable(text_of(event, "why")));
  if (kind == "straggler_over")
    return fmt::format("{} is as fast as the others again", printable(text_of(event, "host")));
  if (kind == "excluded")
    return fmt::format("{} is excluded: {}", printable(text_of(event, "host")), printable(text_of(event, "reason")));
  if (kind == "failure" || kind == "save_failed" || kind == "copy_failed" || kind == "copy_given_up" ||
      kind == "hook_failed" || kind == "track_failed")
    return fmt::format("{}: {}", kind, printable(text_of(event, "message")));
  if (kind == "kill") return fmt::format("rank {} was killed by --kill", whole_of(event, "rank"));
  if (kind == "roll_back")
    return fmt::format("rolled back to step {}: {}", whole_of(event, "to_step"), printable(text_of(event, "why")));
  if (kind == "back_to") return fmt::format("back to step {}, by --from-step", whole_of(event, "step"));
  if (kind == "outlier" || kind == "divergence" || kind == "drop" || kind == "level_shift")
    return fmt::format("{} at step {}: {}", kind, whole_of(event, "step"), printable(text_of(event, "why")));
  if (kind == "no_way_back") return fmt::format("not rolled back: {}", printable(text_of(event, "why")));
  if (kind == "stage") return fmt::format("stage {} begins", whole_of(event, "stage"));
  if (kind == "recipe_changed")
    return fmt::format("{}: {} -> {}", printable(text_of(event, "field")),
                       printable(json_text(json_field(event, "old"))), printable(json_text(json_field(event, "new"))));
  if (kind == "wait") return fmt::format("ranks wait: {}", printable(text_of(event, "reason")));
  if (kind == "save_overdue")
    return fmt::format("the save of step {} takes long: it waits for {}", whole_of(event, "step"),
                       printable(text_of(event, "waits_for")));
  if (kind == "stop_requested") return "asked to stop";
  if (kind == "end") return fmt::format("ended with exit code {}", whole_of(event, "exit_code"));
  return kind == "ready" || kind == "respawned" ? std::string() : printable(kind);
}

}  // namespace cairn::tools
