#pragma once
// A person does here what guards of a recipe do: --skip leaves updates out, --lower-lr lowers the rate.

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "tools/run/folder/guard.h"

namespace cairn::tools {

struct GuardArgs {
  std::string skip;      // steps=A..B; empty: none
  std::string lower_lr;  // BY,over=N,back=N; empty: not
};

void add_guard_options(CLI::App& command, GuardArgs& args);

/// Reads --lower-lr. Errors: kInvalidInput with what was found and expected.
Result<std::optional<Lowering>> lowering_by_hand(const GuardArgs& args);

/// The recipe with the steps of --skip in watch.skip_steps. Errors: kInvalidInput with what was found and expected.
Status skip_steps(const GuardArgs& args, Recipe* recipe);

}  // namespace cairn::tools
