#pragma once
// --mesh: the layout of a checkpoint that is written.

#include <string_view>

#include "runtime/config/layout.h"
#include "runtime/core/result.h"

namespace cairn::tools {

/// "tp=1,pp=2,dp=2,ep=2,cp=1" in any order; an axis that is not named has size 1.
Result<MeshConfig> parse_mesh(std::string_view text);

}  // namespace cairn::tools
