#pragma once
// The recipe's `eval`. runtime/config/recipe.h says how it is filled.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

/// A file of items that a run answers while it trains (runtime/evaluation/task.h).
struct EvalTask {
  std::string file;
  int64_t shots = -1;  // items with their answers before each item; -1: the file's own number
  int64_t limit = 0;   // items, drawn by `seed`; 0: all
  uint64_t seed = 0;
  std::vector<std::string> transforms;  // by name, in order
};

struct EvalConfig {
  int64_t every_steps = 0;  // 0: never
  int64_t steps = 0;        // validation batches
  std::vector<EvalTask> tasks;
  int64_t tasks_steps = 0;  // steps from one evaluation of the tasks to the next; 0: every_steps
  double budget = 0;        // largest part of the run's time that the tasks may take; 0: any
};

}  // namespace cairn
