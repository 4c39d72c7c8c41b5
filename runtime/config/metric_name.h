#pragma once
// What a person calls a number of a step: "loss", "valid_loss", "valid_source_loss/NAME", "eval/TASK/NUMBER".

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

/// Accuracies, probabilities and margins are better when they are higher; losses, perplexities and bits lower.
bool lower_is_better(std::string_view name);

}  // namespace cairn
