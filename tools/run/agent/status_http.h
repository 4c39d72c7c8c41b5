#pragma once
// The answers of a host's agent over HTTP about its run (RunBoard): `/healthz` for probes, `/metrics` in the text
// format of Prometheus.

#include <memory>
#include <string>

#include "runtime/core/result.h"
#include "runtime/http/server.h"
#include "tools/run/hosts/run_board.h"

namespace cairn::tools {

/// Empty: it trains, or waits within its deadlines. Else the reason. A run that trains has reported a step, or begun,
/// within `still_s`, or within ten times its last step.
std::string why_unwell(const RunStatus& status, double still_s);

/// The page of `/metrics`, with what is known; an agent that does not lead knows its own state.
std::string metrics_text(const RunStatus& status, double still_s);

struct StatusHttpOptions {
  std::string where;       // ADDRESS:PORT, [ADDRESS]:PORT
  std::string token_file;  // its first line is asked for; empty: nothing is
  double still_s = 0;      // of why_unwell(); 0: no limit
};

/// Errors: kInvalidInput: what `where` says, a token that cannot be read, or none for an address that others reach;
/// kUnavailable: the port is taken.
Result<std::unique_ptr<http::Server>> serve_status(const StatusHttpOptions& options,
                                                   std::shared_ptr<const RunBoard> board);

}  // namespace cairn::tools
