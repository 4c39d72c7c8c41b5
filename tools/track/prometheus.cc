// Prometheus by a file, as the textfile collector of its node exporter reads it: the newest value of each name. The
// file is replaced at once; nothing of before is in it.
#include <fmt/format.h>

#include <map>
#include <utility>

#include "runtime/core/new_file.h"
#include "runtime/json/json.h"
#include "tools/track/names.h"
#include "tools/track/service.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// In quotes, as the text format has them.
std::string label_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? "\\n" : std::string(1, c);
  }
  return "\"" + out + "\"";
}

class Prometheus final : public TrackService {
 public:
  explicit Prometheus(fs::path file) : file_(std::move(file)) {}
  std::string describe() const override { return "Prometheus' file " + file_.string(); }

  Status open(const TrackedRun& run, json&) override {
    labels_ = fmt::format("run={},run_id={}", label_text(run.name), label_text(run.id));
    return {};
  }

  Status send(std::span<const TrackedStep> steps, json& note) override {
    json& values = note["values"];
    if (!values.is_object()) values = json::object();
    for (const TrackedStep& step : steps) {
      for (const auto& [name, value] : step.values) values[name] = value;
      values["step"] = step.step;
      values["last_step_timestamp_seconds"] = step.time;
    }
    return write(values);
  }

  Status finish(const TrackedEnd& end, json& note) override {
    json& values = note["values"];
    if (!values.is_object()) values = json::object();
    for (const auto& [name, value] : end.late.values) values[name] = value;
    values["exit_code"] = end.exit_code;
    return write(values);
  }

 private:
  Status write(const json& values) const {
    std::map<std::string, std::pair<bool, std::string>> families;  // a counter; its lines
    for (const auto& [name, value] : values.items()) {
      if (!value.is_number()) continue;
      const MetricName metric = metric_name(name);
      auto& [counts, lines] = families["cairn_" + metric.name];
      counts = metric.counts;
      lines += fmt::format("cairn_{}{{{}{}}} {}\n", metric.name, labels_,
                           metric.label.empty() ? "" : fmt::format(",{}={}", metric.label, label_text(metric.value)),
                           value.get<double>() * metric.factor);
    }
    std::string text;
    for (const auto& [name, family] : families) {
      text += fmt::format("# HELP {0} {1} of the newest step of a Cairn run.\n# TYPE {0} {2}\n{3}", name,
                          name.substr(6), family.first ? "counter" : "gauge", family.second);
    }
    return place_file(file_, text, Durable::kNo);
  }

  fs::path file_;
  std::string labels_;
};

}  // namespace

Result<std::unique_ptr<TrackService>> open_prometheus(const Tracker& tracker) {
  if (!tracker.to.ends_with(".prom")) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("prometheus: the collector reads only names that end in \".prom\", not \"{}\"", tracker.to)};
  }
  return std::unique_ptr<TrackService>(std::make_unique<Prometheus>(tracker.to));
}

}  // namespace cairn::tools
