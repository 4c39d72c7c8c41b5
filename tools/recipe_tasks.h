#pragma once
// The tasks of a recipe's `eval`, with the recipe's own tokenizer: what a start checks and each rank asks.

#include <optional>

#include "runtime/core/result.h"
#include "runtime/evaluation/run_tasks.h"
#include "runtime/plan/plan.h"

namespace cairn::tools {

/// nullopt: the recipe has none. Errors: those of making the tokenizer and of evaluation::RunTasks::read().
Result<std::optional<evaluation::RunTasks>> recipe_tasks(const Plan& plan);

}  // namespace cairn::tools
