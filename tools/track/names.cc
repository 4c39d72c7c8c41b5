#include "tools/track/names.h"

namespace cairn::tools {

MetricName metric_name(const std::string& value_name) {
  MetricName out;
  const size_t slash = value_name.find('/');
  out.name = value_name.substr(0, slash);
  if (slash != std::string::npos) {
    out.value = value_name.substr(slash + 1);
    out.label = out.name == "events" ? "event" : out.name == "split_ms" ? "phase" : "source";
  }
  if (out.name == "events") {
    out.name = "events_total";
    out.counts = true;
  } else if (out.name.ends_with("_ms")) {
    out.name.replace(out.name.size() - 2, 2, "seconds");
    out.factor = 1e-3;
  } else if (out.name.ends_with("_per_s")) {
    out.name += "econd";
  }
  return out;
}

}  // namespace cairn::tools
