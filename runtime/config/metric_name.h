#pragma once
// Names of the numbers of a step: "loss", "valid_loss", "valid_source_loss/NAME", "eval/TASK/NUMBER".

#include <cstddef>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn {

struct MetricName {
  static constexpr std::string_view kSource = "valid_source_loss/", kTask = "eval/";
  enum class Kind { kLoss, kValidLoss, kValidSourceLoss, kTask } kind = Kind::kLoss;
  std::string of;      // the source's or the task's name
  std::string number;  // of the task's result: "acc"
};

/// Errors: kInvalidInput naming the forms.
Result<MetricName> parse_metric(std::string_view name);

/// Orders the numbers of a task: the one that stands for it where only one is shown comes first, "acc" before
/// "acc_norm".
size_t number_rank(std::string_view number);

/// Accuracies, probabilities and margins are better when they are higher; losses, perplexities and bits lower.
bool lower_is_better(std::string_view name);

}  // namespace cairn
