#pragma once
// The options of an HTTP server on the command line: where it listens, and the token that it asks for.

#include <cstdint>
#include <string>
#include <utility>

#include "runtime/core/result.h"

namespace cairn::tools {

/// ADDRESS:PORT or [ADDRESS]:PORT, the value of `flag`. Errors: kInvalidInput.
Result<std::pair<std::string, int64_t>> parse_listen(const std::string& flag, const std::string& where);

/// The first line of `file`, the value of `flag`; empty where that is empty. Errors: kInvalidInput where the line is no
/// token; those of reading the file.
Result<std::string> read_listen_token(const std::string& flag, const std::string& file);

}  // namespace cairn::tools
