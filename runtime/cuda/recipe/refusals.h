#pragma once
// What of a recipe CUDA cannot train yet, asked before anything starts. It follows from the list of missing kernels
// (missing_ops()): a kernel that leaves that list is no longer refused.

#include <string>
#include <string_view>
#include <vector>

#include "runtime/plan/plan.h"

namespace cairn::cuda {

struct Refusal {
  std::string field;    // of the recipe
  std::string_view op;  // that is missing; empty: another reason
  std::string message;
};

/// Of a plan whose recipe has settled on a device (runtime/plan/device_choice.h). Empty: it can train there.
std::vector<Refusal> refusals(const Plan& plan);

/// Fields for which this op would be refused; empty: no recipe would be refused for it.
std::vector<std::string_view> fields_needing(std::string_view op);

}  // namespace cairn::cuda
