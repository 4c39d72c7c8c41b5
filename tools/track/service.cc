#include "tools/track/service.h"

namespace cairn::tools {

std::string tracker_kind(const Tracker& tracker) {
  switch (tracker.kind) {
    case Tracker::Kind::kWandb:
      return "wandb";
    case Tracker::Kind::kMlflow:
      return "mlflow";
    case Tracker::Kind::kPrometheus:
      return "prometheus";
    case Tracker::Kind::kOtlp:
      break;
  }
  return "otlp";
}

void TrackService::refused(const std::string& warning) {
  if (!std::exchange(warned_, true))
    warnings_.push_back(warning + "; it counts as sent, and so does what is refused later");
}

Result<std::unique_ptr<TrackService>> open_service(const Tracker& tracker) {
  switch (tracker.kind) {
    case Tracker::Kind::kWandb:
      return open_wandb(tracker);
    case Tracker::Kind::kMlflow:
      return open_mlflow(tracker);
    case Tracker::Kind::kPrometheus:
      return open_prometheus(tracker);
    case Tracker::Kind::kOtlp:
      break;
  }
  return open_otlp(tracker);
}

}  // namespace cairn::tools
