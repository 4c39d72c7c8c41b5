#include "tools/report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "runtime/core/count_text.h"
#include "runtime/core/units.h"
#include "runtime/telemetry/terminal.h"
#include "tools/report/curves.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {
namespace {

using nlohmann::json;
using telemetry::StepMetrics;

constexpr int64_t kCurveBytesOfAMark = 2000;          // for each such part the report holds one event
constexpr size_t kMostLabels = 500, kMostText = 300;  // the newest; bytes

json number(double value) { return std::isfinite(value) ? json(value) : json(); }

std::string cut(std::string text) {
  if (text.size() > kMostText) text = text.substr(0, kMostText) + "...";
  return text;
}

json starts_json(const History& history) {
  json out = json::array();
  for (size_t k = 0; k < history.starts.size(); ++k) {
    const Start& start = history.starts[k];
    size_t next = k + 1;
    while (next < history.starts.size() && history.starts[next].generation > 0) ++next;
    out.push_back({{"time", start.time},
                   {"generation", start.generation},
                   {"step", start.step},
                   {"source", start.source},
                   {"mesh", start.mesh.empty() ? json() : json(start.mesh)}});
    if (start.generation > 0) continue;
    const bool alive = next == history.starts.size() && history.holder.has_value();
    out.back()["end"] = start.ended ? "ended" : alive ? "alive" : "killed";
    if (start.ended) out.back()["exit_code"] = start.exit_code;
  }
  return out;
}

json layouts_json(const History& history) {
  json out = json::array();
  for (const Layout& layout : history.layouts) {
    out.push_back({{"mesh", layout.mesh},
                   {"first_step", layout.first_step},
                   {"last_step", layout.last_step},
                   {"tokens_per_s_median", number(median(layout.tokens_per_s))}});
  }
  return out;
}

/// The newest marks. Saves have curves, and would drive out what went wrong.
json marks_json(const History& history, int64_t most, int64_t* left_out) {
  std::vector<const Mark*> marks;
  for (const Mark& mark : history.marks) {
    if (mark.kind != Mark::Kind::kSave) marks.push_back(&mark);
  }
  *left_out = std::max<int64_t>(0, std::ssize(marks) - most);
  json out = json::array();
  for (auto at = marks.begin() + *left_out; at != marks.end(); ++at) {
    out.push_back({{"time", (*at)->time},
                   {"step", (*at)->step},
                   {"kind", to_text((*at)->kind)},
                   {"event", cut((*at)->event)},
                   {"text", cut((*at)->text)}});
  }
  return out;
}

json labels_json(const History& history) {
  json out = json::array();
  for (auto at = history.labels.rbegin(); at != history.labels.rend() && out.size() < kMostLabels; ++at) {
    const auto& [step, entry] = *at;
    out.push_back({{"step", step},
                   {"label", ckpt::to_text(entry.label)},
                   {"why", cut(entry.why)},
                   {"by", cut(entry.by)},
                   {"held", cut(entry.held)}});
  }
  return out;
}

json lineage_json(const History& history) {
  json out = json::array();
  for (const LineageEntry& entry : history.lineage) {
    json changes = json::array();
    for (const json& change : entry.changes) changes.push_back(change);
    out.push_back({{"n", entry.n},
                   {"step", entry.at.step},
                   {"samples", entry.at.samples},
                   {"cause", entry.cause},
                   {"recipe", entry.recipe},
                   {"changes", std::move(changes)}});
    if (entry.roll_back) out.back()["why"] = cut(entry.roll_back->why);
  }
  return out;
}

std::vector<ChannelSummary> channels_of(const std::vector<StepMetrics>& steps) {
  std::map<std::string, std::vector<double>> losses;
  for (const StepMetrics& step : steps) {
    for (const auto& [name, loss] : step.channel_loss) losses[name].push_back(loss);
  }
  std::vector<ChannelSummary> out;
  for (const auto& [name, all] : losses) {
    const auto tenth = static_cast<std::ptrdiff_t>((all.size() + 9) / 10);
    const auto mean = [&](auto begin) {
      return std::accumulate(begin, begin + tenth, 0.0) / static_cast<double>(tenth);
    };
    out.push_back(
        {.name = name, .steps = std::ssize(all), .first = mean(all.begin()), .last = mean(all.end() - tenth)});
  }
  std::ranges::stable_sort(out, std::greater(), &ChannelSummary::last);
  return out;
}

}  // namespace

Summary summary_of(const History& history) {
  Summary out;
  std::vector<double> step_ms, lost_ms, speeds, mfu;
  for (const StepMetrics& step : history.steps) {
    step_ms.push_back(step.step_ms);
    speeds.push_back(step.tokens_per_s);
    if (step.mfu) mfu.push_back(*step.mfu);
    if (step.checkpoint_lost_ms > 0) {
      lost_ms.push_back(step.checkpoint_lost_ms);
      out.lost_ms += step.checkpoint_lost_ms;
      out.snapshots += step.snapshot_left_out ? 0 : 1;
    }
    out.snapshots_left_out += step.snapshot_left_out ? 1 : 0;
    if (step.valid_loss) {
      out.valid_loss = *step.valid_loss;
      out.valid_source_loss = step.valid_source_loss;
      if (!(out.best_valid_loss <= out.valid_loss) && std::isfinite(out.valid_loss)) {
        out.best_valid_loss = out.valid_loss;
        out.best_valid_step = step.step;
      }
    }
    for (const auto& [phase, ms] : step.split_ms) out.split_ms[phase] += ms;
  }
  if (!history.steps.empty()) {
    out.step = history.steps.back().step;
    out.first_loss = history.steps.front().loss;
    out.last_loss = history.steps.back().loss;
  }
  out.channels = channels_of(history.steps);
  out.step_ms = median(std::move(step_ms));
  out.tokens_per_s = median(std::move(speeds));
  out.mfu = median(std::move(mfu));
  out.snapshot_ms = median(std::move(lost_ms));
  return out;
}

json report_json(const History& history, const std::filesystem::path& run, int64_t curve_bytes) {
  const Summary summary = summary_of(history);
  json out{{"run", run.string()},
           {"steps", summary.step},
           {"first_loss", number(summary.first_loss)},
           {"last_loss", number(summary.last_loss)},
           {"last_step_time", history.steps.empty() ? json() : number(history.steps.back().time)},
           {"valid_loss", number(summary.valid_loss)},
           {"valid_source_loss", json::object()},
           {"best_valid_loss", number(summary.best_valid_loss)},
           {"best_valid_step", std::isnan(summary.best_valid_loss) ? json() : json(summary.best_valid_step)},
           {"step_ms_median", number(summary.step_ms)},
           {"tokens_per_s_median", number(summary.tokens_per_s)},
           {"mfu_median", number(summary.mfu)},
           {"split_ms", summary.split_ms},
           {"snapshots", summary.snapshots},
           {"snapshots_left_out", summary.snapshots_left_out},
           {"snapshot_ms_median", number(summary.snapshot_ms)},
           {"checkpoint_lost_ms", summary.lost_ms},
           {"saves", history.saves.size()},
           {"save_seconds_median", number(median(history.save_seconds()))},
           {"recoveries_seconds", json::array()},
           {"state", state_text(history, run)},
           {"starts", starts_json(history)},
           {"layouts", layouts_json(history)},
           {"lives", life_lines(history)},
           {"alive", history.holder.has_value()},
           {"advice", advice_of(history)},
           {"labels", labels_json(history)},
           {"lineage", lineage_json(history)},
           {"unreadable", history.unreadable},
           {"curves", curves_of(history, curve_bytes)}};
  for (const Recovery& one : history.recoveries) out["recoveries_seconds"].push_back(number(one.whole));
  for (const auto& [name, loss] : summary.valid_source_loss) out["valid_source_loss"][name] = loss;
  for (const ChannelSummary& one : summary.channels)
    out["channel_loss"][one.name] = {{"steps", one.steps}, {"first", number(one.first)}, {"last", number(one.last)}};
  for (const TaskCurve& one : history.tasks) {
    const TaskSummary task = summary_of(one);
    out["tasks"][one.name] = {{"last", number(task.last)},        {"last_step", task.last_step},
                              {"best", number(task.best)},        {"best_step", task.best_step},
                              {"change", number(task.change)},    {"trend", to_text(task.trend)},
                              {"evaluations", one.points.size()}, {"own", one.first}};
  }
  if (history.goodput) out["goodput"] = to_json(*history.goodput);
  out.update(to_json(history.troubles));
  int64_t marks_left_out = 0;
  out["marks"] = marks_json(history, curve_bytes / kCurveBytesOfAMark, &marks_left_out);
  out["marks_left_out"] = marks_left_out;
  if (history.holder)
    out["holder"] = {{"host", history.holder->host}, {"pid", history.holder->pid}, {"since", history.holder->since}};
  return out;
}

std::string report_text(const History& history, const std::filesystem::path& run, int64_t columns, bool utf8) {
  const std::vector<StepMetrics>& steps = history.steps;
  const Summary summary = summary_of(history);
  std::string out;
  if (steps.size() > 1) {
    std::vector<telemetry::CurvePoint> curve;
    for (const StepMetrics& step : steps) curve.push_back({step.step, step.loss});
    out += telemetry::draw_curve(curve, columns, 8, utf8) + "\n";
  }
  out += fmt::format("  state          {}\n", state_text(history, run));
  if (!steps.empty()) {
    out += fmt::format("  loss           {:.3f} -> {:.3f} nats a token ({:.2f} -> {:.2f} bits)", summary.first_loss,
                       summary.last_loss, summary.first_loss / std::log(2), summary.last_loss / std::log(2));
    if (!std::isnan(summary.valid_loss)) out += fmt::format(", validation {:.3f}", summary.valid_loss);
    const auto& sources = summary.valid_source_loss;
    for (size_t k = 0; sources.size() > 1 && k < sources.size(); ++k) {
      out += fmt::format("{}{} {:.3f}{}", k ? ", " : " (", printable(sources[k].first), sources[k].second,
                         k + 1 == sources.size() ? ")" : "");
    }
    out += fmt::format("\n  speed          {:.1f} steps/s (median step {:.1f} ms), {} tokens/s\n",
                       1000 / summary.step_ms, summary.step_ms, format_count(summary.tokens_per_s));
  }
  for (const TaskCurve& one : history.tasks) {
    if (!one.first) continue;
    const TaskSummary task = summary_of(one);
    out += fmt::format("  task           {}: {:.4g} at step {}, best {:.4g} at {}, {}{}\n", printable(one.name),
                       task.last, task.last_step, task.best, task.best_step, to_text(task.trend),
                       utf8 && one.points.size() > 1 ? " " + spark(one, 20) : "");
  }
  for (const ChannelSummary& one : summary.channels)
    out += fmt::format("  channel        {}: {:.3f} -> {:.3f} nats a token, in {}\n", printable(one.name), one.first,
                       one.last, count_text(one.steps, "step"));
  for (size_t k = 0; history.layouts.size() > 1 && k < history.layouts.size(); ++k) {
    const Layout& layout = history.layouts[k];
    out += fmt::format("  layout         {}: steps {} to {}, {} tokens/s\n", layout.mesh, layout.first_step,
                       layout.last_step, format_count(median(layout.tokens_per_s)));
  }
  double split_total = 0;
  for (const auto& [phase, ms] : summary.split_ms) split_total += ms;
  if (split_total > 0) {
    std::vector<std::pair<double, std::string>> shares;
    for (const auto& [phase, ms] : summary.split_ms) shares.emplace_back(ms / split_total, phase);
    std::sort(shares.rbegin(), shares.rend());
    out += "  time           ";
    for (size_t i = 0; i < shares.size() && shares[i].first >= 5e-4; ++i) {
      out += fmt::format("{}{} {:.1f}%", i ? ", " : "", printable(shares[i].second), 100 * shares[i].first);
    }
    out += " (of rank 0)\n";
  }
  if (!steps.empty()) {
    out += fmt::format("  checkpoints    {} snapshots, {:.2f} ms of training lost to each ({:.2f} s in all)",
                       summary.snapshots, std::isnan(summary.snapshot_ms) ? 0.0 : summary.snapshot_ms,
                       summary.lost_ms / 1000);
    if (summary.snapshots_left_out > 0)
      out += fmt::format("; {} more were due and left out", summary.snapshots_left_out);
    if (!history.saves.empty())
      out += fmt::format("; {} saved to disk in {:.2f} s each, in the background", history.saves.size(),
                         median(history.save_seconds()));
    out += "\n";
  }
  if (history.goodput) out += fmt::format("  goodput        {}\n", goodput_text(*history.goodput));
  const std::vector<std::string> lives = life_lines(history);
  for (size_t k = 0; lives.size() > 1 && k < lives.size(); ++k) out += fmt::format("  life           {}\n", lives[k]);
  for (const Recovery& one : history.recoveries) out += fmt::format("  recovery       {}\n", one.text());
  for (const auto& [head, line] : trouble_lines(history.troubles)) out += fmt::format("  {:<14} {}\n", head, line);
  for (const std::string& line : advice_of(history)) out += fmt::format("  advice         {}\n", line);
  for (const std::string& line : history.unreadable) out += fmt::format("  unreadable     {}\n", printable(line));
  return out;
}

}  // namespace cairn::tools
