#pragma once
// The models whose steps are counted: the shapes of bench/gpu/models.cc, and one with experts.

#include <string>
#include <vector>

#include "runtime/config/recipe.h"

namespace cairn::testing {

struct NamedModel {
  std::string name;
  Recipe recipe;
};
/// Recipes with the default of each option that `bench/gpu_all` does not write, and one micro-batch a step.
std::vector<NamedModel> counted_models();
/// The same options, of two layers that a double computes in a second.
std::vector<NamedModel> tiny_models();

}  // namespace cairn::testing
