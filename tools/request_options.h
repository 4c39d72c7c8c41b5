#pragma once
// What may be asked of a run, on the command line of `train` and `resume`.

#include "tools/run/agent/requests.h"

namespace CLI {
class App;
}

namespace cairn::tools {

/// --time-limit, --on-usr, --exit-when-unfinished, --stop-at.
void add_request_options(CLI::App& command, RequestArgs& args);

}  // namespace cairn::tools
