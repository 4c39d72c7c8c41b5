#pragma once
// One record a step, and metrics.jsonl: JSON lines, appended whole, so a kill tears at most the last line and a resumed
// run goes on in the same file. First line {"schema":1,"run":ID}; {"resumed_at":S} marks that steps after S follow
// again: of two lines of one step the later one counts.

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "runtime/telemetry/sample_watch.h"

namespace cairn::telemetry {

/// A step whose forward and backward ran again, on the same batch and weights.
struct ComputedAgain {
  /// Whether each rank had the same numbers; two of three times; or never twice.
  enum class Found { kSame, kTransient, kPersistent } found = Found::kSame;
  bool audit = false;          // watch.audit has asked; else the step was an outlier
  std::vector<int64_t> ranks;  // whose numbers differed
  int64_t since = 0;           // of an audit: the step of the last one that found nothing
};
std::string_view to_text(ComputedAgain::Found found);

/// A comparison of the weights that ranks hold alike, as the step has read them.
struct ReplicaCheck {
  std::vector<int64_t> ranks;  // whose weights are not those of most others; empty: all are equal
  bool tied = false;           // no set of ranks was the largest, and `ranks` has all that differ
  int64_t since = 0;           // the last step behind which an earlier comparison found all equal
};

/// Results of an evaluation of a task: "acc", "acc_stderr", "n" and the like (docs/evaluating.md).
struct TaskNumbers {
  std::string task;
  std::vector<std::pair<std::string, double>> numbers;
};

/// By watch.early_stop: the metric has not become better in `evaluations` in a row.
struct EarlyEnd {
  std::string metric;
  double best = 0;
  int64_t best_step = 0, evaluations = 0;
};

struct StepMetrics {
  int64_t step = 0, samples = 0, tokens = 0;  // after this step, since the beginning of training
  double time = 0;                            // unix seconds
  double loss = 0;                            // nats a token, mean over the global batch
  std::vector<std::pair<std::string, double>> source_loss;
  std::vector<std::pair<std::string, double>> channel_loss;  // of instruction data that have channels (data/channels.h)
  std::optional<double> mtp_loss;        // model.mtp: the mean of its modules' losses, each a mean over its own targets
  std::optional<int64_t> masked_tokens;  // data.mask_repeats: of the step, that count in no loss for it
  double grad_norm = 0, lr = 0;
  double tokens_per_s = 0, step_ms = 0;
  double checkpoint_lost_ms = 0;   // the rank stood still for a snapshot
  bool snapshot_left_out = false;  // one was due, and the copy before was under way or no slot was free
  std::optional<double> valid_loss;
  std::vector<std::pair<std::string, double>> valid_source_loss;  // of the sources that have validation windows
  std::vector<TaskNumbers> tasks;                                 // of eval.tasks
  bool tasks_left_out = false;                                    // they were due, and eval.budget had no time for them
  std::optional<double> tasks_ms;                                 // that they took
  std::optional<EarlyEnd> ended_early;                            // the run ends here
  std::optional<double> end_loss;                                 // the run's last step: of its batch, after its update
  std::optional<double> loss_scale;                               // fp16: of this step
  /// Steps of the run without an update, this one included: gradients overflowed in fp16, or a guard has left it out.
  int64_t skipped = 0;
  std::vector<int64_t> skipped_steps;  // the newest that a guard or watch.skip_steps has left out, ascending
  std::string skip_why;                // of this step, where a guard has done so
  std::optional<ComputedAgain> again;
  std::optional<ReplicaCheck> replicas;
  std::optional<double> max_attention_score;  // qk_clip: before softmax, of all layers and heads
  int64_t clipped_heads = 0;                  // qk_clip: whose projections were scaled down
  std::vector<OutlierSample> outliers;        // samples whose loss is unlike that of their source's others
  /// Milliseconds of world rank 0's training thread by phase (runtime/telemetry/trace.h), from the end of one record to
  /// that of the next: "log" is that of the step before. Empty in records of older runs.
  std::vector<std::pair<std::string, double>> split_ms;
  std::optional<double> tflops;  // model FLOP a second of all ranks, 10^12
  std::optional<double> mfu;     // tflops over the peak that the run was told

  /// A guard or watch.skip_steps has left this step's update out.
  bool was_skipped() const { return !skipped_steps.empty() && skipped_steps.back() == step; }
};

/// An error of the machine, which a step's audit or its comparison of replicas has found.
struct MachineError {
  std::string_view kind;       // "transient" or "persistent", of an audit; "replica"
  std::vector<int64_t> ranks;  // that have erred, or, where `tied`, of which some have
  bool tied = false;
  int64_t since = 0;  // the last step whose state was found to be sound
};
std::vector<MachineError> machine_errors(const StepMetrics& metrics);

/// The step's value of that name (runtime/config/metric_name.h), if it has one.
std::optional<double> value_of(const StepMetrics& metrics, std::string_view name);

/// All numbers of the step that have such a name, but for standard errors and counts.
std::vector<std::pair<std::string, double>> named_values(const StepMetrics& metrics);

nlohmann::json to_json(const StepMetrics& metrics);
/// Errors: kCorrupt naming the field that is missing or ill-typed.
Result<StepMetrics> step_metrics_from_json(const nlohmann::json& json);

/// Lines at the end of a file that people read along. A line that does not fit on the disk is lost, and none behind it.
class LineFile {
 public:
  /// For appending, made when it is missing; its last line may have been torn by whoever wrote it before.
  static Result<LineFile> open(const std::filesystem::path& path);
  Status append(std::string line);
  Status sync();
  bool was_empty() const { return was_empty_; }

 private:
  std::filesystem::path path_;
  Fd fd_;
  bool was_empty_ = false, torn_ = false;
};

/// metrics.jsonl of one run. Any thread may call.
class MetricsWriter {
 public:
  /// Opens for appending; an empty file gets the schema line.
  static Result<std::unique_ptr<MetricsWriter>> open(const std::filesystem::path& path, const std::string& run);
  Status write(const StepMetrics& metrics);
  /// Training goes on after `step`. A file that holds more than the schema line is told so: {"resumed_at": step}.
  Status resumed(int64_t step);
  /// Lines for steps of which nobody has told yet, from their news (StepMetrics as JSON, in order; what is no such JSON
  /// is passed over).
  Status catch_up(std::span<const std::string> news);
  /// Before a checkpoint of `step`: the lines up to that step are in the file and the file is synced. Who writes them
  /// is waited for as long as a line may take to be told, then `news` has to do.
  Status complete(int64_t step, std::span<const std::string> news);

 private:
  MetricsWriter() = default;
  Status line(const nlohmann::json& json);
  Status told(const StepMetrics& metrics);
  Status tell_untold(std::vector<StepMetrics> news);
  LineFile file_;
  std::mutex mutex_;  // of all that follows, and the file but for its sync
  std::condition_variable changed_;
  int64_t last_ = 0;  // step told last
  bool begun_ = false;
};

/// What a metrics.jsonl tells; a torn last line is dropped.
struct ToldSteps {
  std::vector<StepMetrics> kept;        // ascending, each step once: the last line of a step counts
  std::vector<StepMetrics> superseded;  // steps that a later start had not, and did again; in the order in which it did
};
Result<ToldSteps> read_told_steps(const std::filesystem::path& path);

/// The steps kept.
Result<std::vector<StepMetrics>> read_metrics(const std::filesystem::path& path);

}  // namespace cairn::telemetry
