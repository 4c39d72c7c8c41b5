#pragma once
// The recipe's `log`, `hooks` and `restart`: work of the agent. runtime/config/recipe.h says how it
// is filled.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

/// Where a run's metrics and events go besides its own folder.
struct Tracker {
  enum class Kind { kWandb, kMlflow, kPrometheus, kOtlp } kind = Kind::kWandb;
  std::string to;       // MLflow, OTLP: a URL; Prometheus: a file; W&B: a folder, empty: RUN/wandb
  std::string project;  // W&B's project, MLflow's experiment
  std::string entity;   // W&B: whose project
  std::vector<std::string> tags;
  double finish_s = 60;  // how long the end of the run waits for what is not sent yet
};

struct LogConfig {
  int64_t every_steps = 1;
  bool tensorboard = true;
  std::vector<Tracker> trackers;
};

/// A command that the agent runs when something happens.
struct Hook {
  std::vector<std::string> events;
  std::vector<std::string> run;  // argv; {step}, {dir}, {run} in it are put in
  double timeout_s = 600;
  int64_t at_most = 0;  // times within `within_s`; 0: any
  double within_s = 0;
};

struct RestartConfig {
  int64_t max_restarts = 3;  // in a row without a new completed checkpoint or 100 steps
  double backoff_s = 0.0;    // before the 2nd restart in a row; doubles each time
  double deadline_s = 60;    // of every collective and p2p wait
};

}  // namespace cairn
