#pragma once
// The files a command reads: names and patterns.

#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::data {

/// The files that a pattern of the shell (*, ?, [...]) matches, in the order of their names' bytes; a path that exists,
/// or is no pattern, stands for itself. Errors: kInvalidInput when none matches, kIo for a folder that cannot be read.
Result<std::vector<std::string>> matching_paths(const std::string& path);

/// The same for inputs of a command, without folders that match. Errors: those of matching_paths; kInvalidInput for **,
/// and for a file that two inputs name where one of them is a pattern.
Result<std::vector<std::string>> expand_patterns(const std::vector<std::string>& inputs);

/// Checks that no pipe is named twice: its second reader would find nothing. Errors: kInvalidInput.
Status check_read_once(const std::vector<std::string>& paths);

}  // namespace cairn::data
