#pragma once
// A value of a step under the names that Prometheus and OTLP want: one name for all sources, phases and kinds of event,
// with a label; seconds instead of milliseconds.

#include <string>

namespace cairn::tools {

struct MetricName {
  std::string name;          // "loss", "source_loss", "split_seconds", "events_total"
  std::string label, value;  // "source", "web"; empty: none
  double factor = 1;         // of the number
  bool counts = false;       // it only grows
};
/// `value_name`: one of TrackedStep::values.
MetricName metric_name(const std::string& value_name);

}  // namespace cairn::tools
