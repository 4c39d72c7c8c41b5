#pragma once
// The recipe's `eval`. runtime/config/recipe.h says how it is filled.

#include <cstdint>

namespace cairn {

struct EvalConfig {
  int64_t every_steps = 0;  // 0: never
  int64_t steps = 0;        // validation batches
};

}  // namespace cairn
