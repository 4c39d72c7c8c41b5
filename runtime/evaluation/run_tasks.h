#pragma once
// The tasks of a recipe's `eval`, as a run asks them of its own model: texts whose tokens are scored, and what their
// scores say. Answers to be generated are no such task.

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/evaluation.h"
#include "runtime/core/result.h"
#include "runtime/data/scored_texts.h"
#include "runtime/evaluation/questions.h"
#include "runtime/telemetry/metrics.h"

namespace cairn::evaluation {

class RunTasks {
 public:
  /// `tokens`: of the run's sequences. Errors: those of read_task() and make_questions(); kInvalidInput for two tasks
  /// of one name, a task without items, an item that no sequence has room for; kUnsupported for texts to be generated.
  static Result<RunTasks> read(std::span<const EvalTask> tasks, const TextIds& ids, int64_t tokens);

  std::span<const data::ScoredText> texts() const { return texts_; }
  int64_t items() const;
  /// The names that metrics have: "facts/acc".
  std::vector<std::string> numbers() const;

  /// `scores`: of texts(), in their order.
  std::vector<telemetry::TaskNumbers> told_by(std::span<const data::TextScore> scores) const;

 private:
  Status add(const Task& task, const Question& question, const TextIds& ids, int64_t tokens);
  Status add_text(std::vector<int32_t> ids, int64_t scored, int64_t tokens);

  std::vector<std::pair<Task, std::vector<Question>>> tasks_;
  std::vector<data::ScoredText> texts_;
  int64_t tokens_ = 0;
};

}  // namespace cairn::evaluation
