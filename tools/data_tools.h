#pragma once
// The commands of `cairn data` share these.

#include "runtime/core/result.h"
#include "runtime/data/tokenize.h"
#include "tools/commands.h"

namespace CLI {
class App;
}

namespace cairn::tools {

/// data::tokenize_file(), with a line of progress on a terminal.
Result<data::TokenizeReport> tokenize_live(data::TokenizeArgs args);

/// Adds `cairn data chat`.
void add_data_chat(CLI::App& command, Session& session);
/// Adds `cairn data samples`.
void add_data_samples(CLI::App& command, Session& session);

}  // namespace cairn::tools
