#pragma once
// `cairn hosts`, for main.cc.

#include "tools/commands.h"

namespace cairn::tools {

void add_hosts(CLI::App& app, Session& session);

}  // namespace cairn::tools
