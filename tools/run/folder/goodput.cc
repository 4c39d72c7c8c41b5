#include "tools/run/folder/goodput.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "runtime/telemetry/terminal.h"
#include "tools/run/folder/json_lines.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

constexpr double kWorthTelling = 0.01;  // of the time

double number_of(const json& object, const char* key, double otherwise) {
  return object.contains(key) && object[key].is_number() ? object[key].get<double>() : otherwise;
}
std::string text_of(const json& object, const char* key) {
  return object.contains(key) && object[key].is_string() ? object[key].get<std::string>() : std::string();
}

/// A step as it was told, again each time.
struct Told {
  double end = 0, seconds = 0, pause = 0;
  double begin() const { return end - seconds; }
};

struct Steps {
  std::vector<Told> all;  // in the order of the file
  double kept = 0, pauses = 0, again = 0;
  int64_t again_count = 0;

  /// The first one that began after `time`, if any did before `until`.
  const Told* first_after(double time, double until) const {
    const auto found = std::ranges::find_if(all, [&](const Told& step) { return step.end > time; });
    return found != all.end() && found->end <= until ? &*found : nullptr;
  }
  double last_before(double until, double otherwise) const {
    double out = otherwise;
    for (const Told& step : all) {
      if (step.end <= until) out = std::max(out, step.end);
    }
    return out;
  }
};

Steps steps_of(const std::vector<json>& lines) {
  Steps out;
  std::map<int64_t, Told> kept;
  const auto drop = [&](auto from) {
    for (auto step = from; step != kept.end(); ++step) out.again += step->second.seconds, ++out.again_count;
    kept.erase(from, kept.end());
  };
  for (const json& line : lines) {
    if (line.contains("resumed_at") && line["resumed_at"].is_number_integer()) {
      drop(kept.upper_bound(line["resumed_at"].get<int64_t>()));
    } else if (line.contains("step") && line["step"].is_number_integer()) {
      drop(kept.lower_bound(line["step"].get<int64_t>()));
      const Told step{.end = number_of(line, "time", 0),
                      .seconds = number_of(line, "step_ms", 0) / 1000,
                      .pause = number_of(line, "checkpoint_lost_ms", 0) / 1000};
      kept[line["step"].get<int64_t>()] = step;
      out.all.push_back(step);
    }
  }
  for (const auto& [number, step] : kept) {
    const double pause = std::min(step.pause, step.seconds);
    out.kept += step.seconds - pause;
    out.pauses += pause;
  }
  return out;
}

}  // namespace

Result<Goodput> goodput_of(const std::filesystem::path& run, double now) {
  const Steps steps = steps_of(json_lines(run / "metrics.jsonl"));
  if (steps.all.empty())
    return Error{ErrorCode::kUnavailable, fmt::format("{}: no step has been told yet", run.string())};
  Goodput out{.kept = steps.kept, .checkpoints = steps.pauses, .again = steps.again, .steps_again = steps.again_count};
  double begin = 0, heard = 0, away = 0;
  std::optional<double> failed;  // of a failure that no step has followed
  bool died = false;             // what the next start goes on from is told
  std::optional<json> end;
  const std::vector<json> events = json_lines(run / "events.jsonl");
  for (size_t k = 0; k < events.size(); ++k) {
    const json& event = events[k];
    const std::string kind = text_of(event, "event");
    const double time = number_of(event, "time", 0);
    if (kind == "failure" || kind == "kill") {
      if (kind == "failure") ++out.failures;
      if (!failed) failed = time;
      died = true;
    } else if (kind == "end") {
      end = event;
    } else if (kind == "start") {
      const bool again = number_of(event, "generation", 0) > 0;
      double until = INFINITY;
      for (size_t next = k + 1; next < events.size(); ++next) {
        if (text_of(events[next], "event") != "start") continue;
        until = number_of(events[next], "time", 0);
        break;
      }
      if (begin == 0) {
        begin = time;
      } else if (!again) {
        const double last = end ? number_of(*end, "time", heard) : steps.last_before(time, heard);
        const bool asked = end && number_of(*end, "exit_code", 1) == 0;
        (asked ? away : out.down) += std::max(0.0, time - last);
        if (!end && !died) ++out.deaths;  // else it is the failure before: a lost leader's
        died = died || !asked;
      }
      if (died) ++(text_of(event, "source") == "memory" ? out.from_memory : out.from_disk);
      died = false;
      end.reset();
      if (!again) {
        ++out.agents;
        failed.reset();
      }
      const Told* const first = steps.first_after(time, until);
      const double from = failed.value_or(time), works = first != nullptr ? first->begin() : std::min(until, from);
      (again ? out.recoveries : out.starts) += std::max(0.0, works - from);
      if (first != nullptr) failed.reset();
    }
    heard = std::max(heard, time);
  }
  if (begin == 0) begin = steps.all.front().begin();  // no events: a folder that lost them
  heard = std::max({heard, steps.last_before(INFINITY, begin), now});
  out.wall = std::max(0.0, heard - begin - away);
  out.rest = std::max(0.0, out.wall - out.kept - out.checkpoints - out.again - out.starts - out.recoveries - out.down);
  return out;
}

std::string goodput_text(const Goodput& g) {
  std::string out = fmt::format("{:.1f}% of {}", 100 * g.share(g.kept), telemetry::format_duration(g.wall));
  struct Part {
    const char* what;
    double seconds;
    int64_t times;
  };
  std::vector<Part> parts = {{"steps done again", g.again, g.steps_again},
                             {"recoveries", g.recoveries, g.failures},
                             {"starts", g.starts, g.agents},
                             {"down", g.down, 0},
                             {"checkpoints", g.checkpoints, 0},
                             {"between steps", g.rest, 0}};
  std::ranges::stable_sort(parts, std::greater<>(), &Part::seconds);
  const char* separator = ": ";
  for (const Part& part : parts) {
    if (g.share(part.seconds) < 0.001) continue;
    out += fmt::format("{}{} {:.1f}%", std::exchange(separator, ", "), part.what, 100 * g.share(part.seconds));
    if (part.times > 0) out += fmt::format(" ({})", part.times);
  }
  return out;
}

json to_json(const Goodput& g) {
  return {{"share", g.share(g.kept)},
          {"wall_seconds", g.wall},
          {"kept_seconds", g.kept},
          {"checkpoint_seconds", g.checkpoints},
          {"again_seconds", g.again},
          {"start_seconds", g.starts},
          {"recovery_seconds", g.recoveries},
          {"down_seconds", g.down},
          {"other_seconds", g.rest},
          {"steps_again", g.steps_again},
          {"agents", g.agents},
          {"failures", g.failures},
          {"deaths", g.deaths},
          {"from_memory", g.from_memory},
          {"from_disk", g.from_disk}};
}

std::vector<std::string> advice(const Goodput& g, double save_seconds, double pause_seconds) {
  std::vector<std::string> out;
  const int64_t broken = g.failures + g.deaths;
  if (broken > 0 && g.from_disk > 0 && g.share(g.again) > kWorthTelling) {
    // Young 1974: the interval at which pauses and work done again cost least. A save has to end before the next.
    const double between = g.wall / static_cast<double>(broken);
    const double interval = std::max(std::sqrt(2 * pause_seconds * between), 1.2 * save_seconds);
    out.push_back(fmt::format(
        "{} of steps were done again, after {} that went on from a checkpoint on disk. One failure in {} and saves of "
        "{} "
        "suggest a save every {} (checkpoint.save = T.every {{ minutes = {:.2g} }})",
        telemetry::format_duration(g.again), g.from_disk == 1 ? "a start" : fmt::format("{} starts", g.from_disk),
        telemetry::format_duration(between), telemetry::format_duration(save_seconds),
        telemetry::format_duration(interval), interval / 60));
  }
  if (g.share(g.down) > kWorthTelling && g.deaths > 0) {
    out.push_back(
        fmt::format("{} went by between a death of the agent and the next start ({}): have the scheduler start "
                    "it again (docs/operations.md)",
                    telemetry::format_duration(g.down), g.deaths));
  }
  return out;
}

}  // namespace cairn::tools
