#pragma once
// A recipe as a Lua program: the other way of dsl.h's load_recipe.

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "runtime/config/recipe.h"

namespace cairn::dsl {

/// A whole program, `local T = require "cairn"` first, that resolves to the very canonical JSON of `recipe`: only what
/// differs from the defaults, in the forms that a person uses. For recipes that a recipe file can say: not a seed
/// above 2^63 - 1, which only stored recipes may hold.
std::string recipe_lua(const Recipe& recipe);

/// One stage, from its stored form {"at", "changes"}: T.stage { at = ..., batch = { samples = 512 } }.
std::string stage_lua(const nlohmann::json& stage);

}  // namespace cairn::dsl
