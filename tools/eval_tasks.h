#pragma once
// `cairn eval --tasks`: tasks and probes over one model, or over the checkpoints of a run, each result kept and
// computed once.

#include <cstdint>
#include <string>
#include <vector>

#include "converters/weight_source.h"
#include "runtime/core/result.h"
#include "runtime/evaluation/task.h"
#include "tools/device_option.h"

namespace cairn::tools {

struct TaskArgs {
  std::string from, tokenizer, precision, steps;
  std::vector<std::string> files;
  evaluation::TaskOptions options;
  DeviceChoice device = DeviceChoice::kAuto;
  convert::WeightsOf weights_of = convert::WeightsOf::kTraining;
  bool follow = false, items = false, json = false;
};

/// Prints a line for each step and task, or one JSON object. Errors: those of reading tasks and models; kInvalidInput
/// for steps of what is no run.
Result<int> eval_tasks(const TaskArgs& args);

}  // namespace cairn::tools
