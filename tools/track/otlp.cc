// OpenTelemetry by OTLP/HTTP with JSON (opentelemetry-proto 1.x, collector/metrics/v1): a data point for each value of
// a step, with the step's own time. A batch whose answer was lost is sent again with the same times, and so are the
// same points. OTLP forbids to send again what was refused for good.
#include <fmt/format.h>

#include <algorithm>
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
constexpr const char* kHeaders = "OTEL_EXPORTER_OTLP_HEADERS";

json attribute(const std::string& key, const std::string& value) {
  return {{"key", key}, {"value", {{"stringValue", value}}}};
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpaces = " \t";
  const size_t begin = text.find_first_not_of(kSpaces);
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(kSpaces) + 1 - begin);
}

/// The headers in OTEL_EXPORTER_OTLP_HEADERS: "name=value, name=value", values encoded as in a URL.
std::vector<std::string> headers_of_environment() {
  const char* const text = std::getenv(kHeaders);
  std::vector<std::string> out;
  std::string_view rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    const size_t equals = one.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view written = trimmed(one.substr(equals + 1));
    std::string value;
    for (size_t at = 0; at < written.size(); ++at) {
      const bool encoded = written[at] == '%' && at + 2 < written.size();
      value += encoded ? static_cast<char>(std::strtol(std::string(written.substr(at + 1, 2)).c_str(), nullptr, 16))
                       : written[at];
      if (encoded) at += 2;
    }
    out.push_back(fmt::format("{}: {}", trimmed(one.substr(0, equals)), value));
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

  Status send(std::span<const TrackedStep> steps, json&) override { return send_points(steps, true); }

  /// Only points have a time here: an end has none, and late events have their own.
  Status finish(const TrackedEnd& end, json&) override {
    return end.late.values.empty() ? Status() : send_points({&end.late, 1}, false);
  }

 private:
  /// `stepped`: each has a point for its number. A batch that is too large goes in halves.
  Status send_points(std::span<const TrackedStep> steps, bool stepped) {
    Status sent = post(steps, stepped);
    if (sent.ok() || !client_->refused()) return sent;
    if (client_->too_large() && steps.size() > 1) {
      RT_TRY(send_points(steps.first(steps.size() / 2), stepped));
      return send_points(steps.subspan(steps.size() / 2), stepped);
    }
    refused(sent.error().message);
    return {};
  }

  Status post(std::span<const TrackedStep> steps, bool stepped) {
    std::map<std::string, std::pair<bool, json>> metrics;  // a counter; its points
    const auto add = [&](const MetricName& metric, double time, double value) {
      json point{{"timeUnixNano", std::to_string(std::llround(time * 1e6) * 1000)},
                 {"asDouble", value * metric.factor}};
      if (!metric.label.empty()) point["attributes"] = json::array({attribute(metric.label, metric.value)});
      auto& [counts, points] = metrics["cairn." + metric.name];
      counts = metric.counts;
      points.push_back(std::move(point));
    };
    for (const TrackedStep& step : steps) {
      if (stepped) add({.name = "step"}, step.time, static_cast<double>(step.step));
      for (const auto& [name, value] : step.values) add(metric_name(name), step.time, value);
    }
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
    refused(fmt::format("{} has rejected {} data points: {}", describe(), count,  // OTLP forbids to send them again
                        http::printable(json_string(partial, "errorMessage"))));
    return {};
  }

  std::unique_ptr<JsonClient> client_;
  json resource_;
};

}  // namespace

Result<std::unique_ptr<TrackService>> open_otlp(const Tracker& tracker) {
  const char* const ca_file = std::getenv("OTEL_EXPORTER_OTLP_CERTIFICATE");
  RT_TRY_SET(
      std::unique_ptr<JsonClient> client,
      JsonClient::make("otlp", tracker.to, kHeaders, headers_of_environment(), ca_file == nullptr ? "" : ca_file));
  return std::unique_ptr<TrackService>(std::make_unique<Otlp>(std::move(client)));
}

}  // namespace cairn::tools
