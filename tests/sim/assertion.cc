#include "tests/sim/assertion.h"

#include <fmt/format.h>

#include "runtime/core/check.h"

namespace cairn {

// Instead of runtime/core/check.cc's, which the linker leaves out.
void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  throw sim::AssertionFailed{fmt::format("{}:{}: {}: {}", file, line, condition, message)};
}

}  // namespace cairn
