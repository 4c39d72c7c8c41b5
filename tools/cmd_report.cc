// cairn report RUN: what a run did, to be read in ten seconds.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "runtime/telemetry/metrics.h"
#include "runtime/telemetry/terminal.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::vector<json> read_events(const fs::path& path) {
  std::vector<json> out;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    json event = json::parse(line, nullptr, false);
    if (event.is_object()) out.push_back(std::move(event));
  }
  return out;
}

double median(std::vector<double> values) {
  if (values.empty()) return NAN;
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

Result<int> report(const fs::path& run, bool as_json) {
  Result<std::vector<telemetry::StepMetrics>> read = telemetry::read_metrics(run / "metrics.jsonl");
  if (!read.ok()) return std::move(read).error().with("no metrics; is this a run folder?");
  const std::vector<telemetry::StepMetrics> steps = std::move(read).value();
  if (steps.size() < 2)
    return Error{ErrorCode::kInvalidInput, fmt::format("{} has fewer than two finished steps", run.string())};
  std::vector<double> losses, step_ms, lost_ms, recoveries, saves;
  double valid = NAN;
  int64_t snapshots = 0;
  double lost_total = 0;
  std::map<std::string, double> split_ms;  // of all steps
  for (const telemetry::StepMetrics& step : steps) {
    losses.push_back(step.loss);
    step_ms.push_back(step.step_ms);
    if (step.checkpoint_lost_ms > 0) {
      lost_ms.push_back(step.checkpoint_lost_ms);
      lost_total += step.checkpoint_lost_ms;
      ++snapshots;
    }
    if (step.valid_loss) valid = *step.valid_loss;
    for (const auto& [phase, ms] : step.split_ms) split_ms[phase] += ms;
  }
  std::vector<double> recovered_steps;  // of them the first new step itself
  for (const json& event : read_events(run / "events.jsonl")) {
    const std::string kind = event.value("event", "");
    if (kind == "recovered") {
      recoveries.push_back(event.value("seconds", NAN));
      recovered_steps.push_back(event.value("step_seconds", NAN));
    }
    if (kind == "saved") saves.push_back(event.value("seconds", NAN));
  }
  const double typical_ms = median(step_ms);
  if (as_json) {
    print_json(json{{"steps", steps.back().step},
                    {"first_loss", losses.front()},
                    {"last_loss", losses.back()},
                    {"valid_loss", std::isnan(valid) ? json(nullptr) : json(valid)},
                    {"step_ms_median", typical_ms},
                    {"split_ms", split_ms},
                    {"snapshots", snapshots},
                    {"snapshot_ms_median", lost_ms.empty() ? json(nullptr) : json(median(lost_ms))},
                    {"checkpoint_lost_ms", lost_total},
                    {"saves", saves.size()},
                    {"save_seconds_median", saves.empty() ? json(nullptr) : json(median(saves))},
                    {"recoveries_seconds", recoveries}});
    return 0;
  }
  fmt::print("{}\n", telemetry::draw_curve(losses, 72, 8, telemetry::locale_is_utf8()));
  fmt::print("  loss           {:.3f} -> {:.3f} nats a token ({:.2f} -> {:.2f} bits)", losses.front(), losses.back(),
             losses.front() / std::log(2), losses.back() / std::log(2));
  if (!std::isnan(valid)) fmt::print(", validation {:.3f}", valid);
  fmt::print("\n  speed          {:.1f} steps/s (median step {:.1f} ms), {} tokens/s\n", 1000 / typical_ms, typical_ms,
             format_count(median([&] {
               std::vector<double> speeds;
               for (const telemetry::StepMetrics& step : steps) speeds.push_back(step.tokens_per_s);
               return speeds;
             }())));
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
  fmt::print("  checkpoints    {} snapshots, {:.2f} ms of training lost to each ({:.2f} s in all)", snapshots,
             lost_ms.empty() ? 0.0 : median(lost_ms), lost_total / 1000);
  if (!saves.empty()) fmt::print("; {} saved to disk in {:.2f} s each, in the background", saves.size(), median(saves));
  fmt::print("\n");
  for (size_t k = 0; k < recoveries.size(); ++k) {
    fmt::print("  recovery       {} from the failure to the first new step ({} of it the step)\n",
               telemetry::format_duration(recoveries[k]), telemetry::format_duration(recovered_steps[k]));
  }
  return 0;
}

}  // namespace

void add_report(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("report", "loss curve, speed, checkpoints and recoveries of a run");
  const auto run = std::make_shared<std::string>();
  command->add_option("RUN", *run, "the run folder")->required();
  add_json_flag(*command, session);
  command->callback([run, &session] { session.action = [run, &session] { return report(*run, session.json); }; });
}

}  // namespace cairn::tools
