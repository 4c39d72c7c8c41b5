#pragma once
// `cairn track`, for main.cc.

#include "tools/commands.h"

namespace cairn::tools {

void add_track(CLI::App& app, Session& session);

}  // namespace cairn::tools
