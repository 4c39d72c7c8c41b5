// OpenTelemetry by OTLP/HTTP with JSON (opentelemetry-proto 1.x, collector/metrics/v1): a data point for each value of a
// step, with the step's own time. A batch whose answer was lost is sent again with the same times, and so are the same
// points.
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "runtime/json/json.h"
#include "tools/track/names.h"
#include "tools/track/service.h"
#include "tools/track/web.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

constexpr const char* kPath = "/v1/metrics";

json attribute(const std::string& key, const std::string& value) {
  return {{"key", key}, {"value", {{"stringValue", value}}}};
}

/// The headers in OTEL_EXPORTER_OTLP_HEADERS: "name=value,name=value", values encoded as in a URL.
std::vector<std::string> headers_of_environment() {
  const char* const text = std::getenv("OTEL_EXPORTER_OTLP_HEADERS");
  std::vector<std::string> out;
  std::string_view rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    const size_t equals = one.find('=');
    if (equals == std::string_view::npos) continue;
    std::string value;
    for (size_t at = equals + 1; at < one.size(); ++at) {
      const bool encoded = one[at] == '%' && at + 2 < one.size();
      value += encoded ? static_cast<char>(std::strtol(std::string(one.substr(at + 1, 2)).c_str(), nullptr, 16)) : one[at];
      if (encoded) at += 2;
    }
    out.push_back(fmt::format("{}: {}", one.substr(0, equals), value));
  }
  return out;
}

class Otlp final : public TrackService {
 public:
  explicit Otlp(std::unique_ptr<JsonClient> client) : client_(std::move(client)) {}
  std::string describe() const override { return "OTLP at " + client_->url(); }
  int64_t most_steps() const override { return 200; }

  Status open(const TrackedRun& run, json&) override {
    resource_ = {{"attributes", json::array({attribute("service.name", "cairn"), attribute("cairn.run.name", run.name),
                                             attribute("cairn.run.id", run.id)})}};
    return {};
  }

  Status send(std::span<const TrackedStep> steps, json&) override {
    std::map<std::string, std::pair<bool, json>> metrics;  // a counter; its points
    const auto add = [&](const MetricName& metric, double time, double value) {
      json point{{"timeUnixNano", std::to_string(std::llround(time * 1e6) * 1000)}, {"asDouble", value * metric.factor}};
      if (!metric.label.empty()) point["attributes"] = json::array({attribute(metric.label, metric.value)});
      auto& [counts, points] = metrics["cairn." + metric.name];
      counts = metric.counts;
      points.push_back(std::move(point));
    };
    for (const TrackedStep& step : steps) {
      add({.name = "step"}, step.time, static_cast<double>(step.step));
      for (const auto& [name, value] : step.values) add(metric_name(name), step.time, value);
    }
    return post(metrics);
  }

  Status finish(int64_t, json&) override { return {}; }  // only points have a time

 private:
  Status post(std::map<std::string, std::pair<bool, json>>& metrics) {
    json all = json::array();
    for (auto& [name, metric] : metrics) {
      json points{{"dataPoints", std::move(metric.second)}};
      if (metric.first) points.update({{"aggregationTemporality", 2}, {"isMonotonic", true}});
      all.push_back({{"name", name}, {metric.first ? "sum" : "gauge", std::move(points)}});
    }
    json scope{{"scope", {{"name", "cairn"}}}, {"metrics", std::move(all)}};
    const json body{{"resourceMetrics",
                     json::array({{{"resource", resource_}, {"scopeMetrics", json::array({std::move(scope)})}}})}};
    RT_TRY_SET(const json answer, client_->post(client_->url().ends_with(kPath) ? "" : kPath, body));
    const json& partial = json_field(answer, "partialSuccess");
    const json& rejected = json_field(partial, "rejectedDataPoints");
    const std::string count = rejected.is_string() ? rejected.get<std::string>() : json_text(rejected);
    if (rejected.is_null() || count == "0") return {};
    return Error{ErrorCode::kInvalidInput, fmt::format("{} has rejected {} data points: {}", describe(), count,
                                                       http::printable(json_string(partial, "errorMessage")))};
  }

  std::unique_ptr<JsonClient> client_;
  json resource_;
};

}  // namespace

Result<std::unique_ptr<TrackService>> open_otlp(const Tracker& tracker) {
  const char* const ca_file = std::getenv("OTEL_EXPORTER_OTLP_CERTIFICATE");
  RT_TRY_SET(std::unique_ptr<JsonClient> client,
             JsonClient::make("otlp", tracker.to, headers_of_environment(), ca_file == nullptr ? "" : ca_file));
  return std::unique_ptr<TrackService>(std::make_unique<Otlp>(std::move(client)));
}

}  // namespace cairn::tools
