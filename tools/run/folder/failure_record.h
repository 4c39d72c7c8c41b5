#pragma once
// What ended a generation of ranks, for programs: RUN/failure.json, and where launchers look for the reason of an end.
// Threads: none of its own.

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/agent/supervisor.h"
#include "runtime/core/result.h"

namespace cairn::tools {

/// {"host", "rank", "class", "fault", "exit", "signal", "hang", "message", "last_lines", "first_seen": unix seconds,
/// "generation", "others": [{"host", "rank", "class", "after_ms"}]}. `first_seen`: of the failure.
nlohmann::json failure_record(const agent::Failure& failure, double first_seen);

/// The failures of `record` for the next one, the latest kMostEarlier: [{"host", "rank", "class", "message",
/// "first_seen", "step"}], in the order in which they happened.
nlohmann::json earlier_failures(const nlohmann::json& record);
inline constexpr size_t kMostEarlier = 100;

/// RUN/failure.json: `record`, and as "earlier" those that lie there already. Not synced: a restart may wait for it.
/// Errors: those of the file.
Status write_failure(const std::filesystem::path& run, nlohmann::json record);

/// Tells whoever has started this process why it ends with `exit_code`, where they have said where: the file of
/// TORCHELASTIC_ERROR_FILE, and /dev/termination-log (CAIRN_TERMINATION_LOG names another one), which is never made.
/// `record`: failure_record() with a "message", or an object with that alone. What cannot be written is left.
void tell_launcher(const nlohmann::json& record, int exit_code);

}  // namespace cairn::tools
