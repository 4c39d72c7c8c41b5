#pragma once
// The command of an agent. Only for the renderers.

#include <functional>
#include <string>
#include <vector>

#include "tools/launch/job.h"

namespace cairn::tools {

/// Where a file of the launching host lies on the others.
using PathOf = std::function<std::string(const std::filesystem::path&)>;
inline std::string same_path(const std::filesystem::path& path) { return path.string(); }

/// cairn train RECIPE ... `restarts`: the launcher starts the run again by its exit code. Errors: kInvalidInput: a word
/// that is not one line.
Result<std::vector<std::string>> train_words(const ClusterConfig& cluster, const TrainJob& job, bool restarts,
                                             const PathOf& path_of);

}  // namespace cairn::tools
