#pragma once
// "A" or "A..B" of a command line: steps of a run.

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::tools {

struct StepRange {
  int64_t first = 0, last = 0;
};

/// Steps from 1, in order. Errors: kInvalidInput naming `option`.
Result<StepRange> step_range(std::string_view option, const std::string& text);

}  // namespace cairn::tools
