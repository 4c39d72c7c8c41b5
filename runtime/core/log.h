#pragma once
// Logging: spdlog, one line an event, to stderr (which the agent points at logs/rank-N.log for ranks).
// A failure is logged once, where it is handled.

#include <spdlog/spdlog.h>

#include <string_view>

namespace cairn {

/// Sets pattern and level once per process; `who` ("agent", "rank 3") stands in each line. Level from CAIRN_LOG
/// (trace, debug, info, warn, error, off), default info.
void init_logging(std::string_view who);

}  // namespace cairn
