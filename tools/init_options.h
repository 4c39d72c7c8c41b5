#pragma once
// What a run begins with, as the recipe and the command line say it: `init` and --init-...

#include <filesystem>
#include <string>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"

namespace CLI {
class App;
}

namespace cairn::tools {

/// --init-from, --init-weights-only, --init-only, --init-except, --init-allow-missing, --init-allow-extra.
void add_init_options(CLI::App& command, InitConfig& init);

/// The recipe's init, over which the command line wins option by option; `path` is made that of one checkpoint,
/// absolute. Empty when the run has checkpoints of its own: it goes on from them, which `notice` (may be null) says
/// where the command line wants otherwise. Errors: kInvalidInput when there is no such checkpoint, or there are options
/// and nothing that they are of.
Result<InitConfig> effective_init(const InitConfig& recipe, const InitConfig& command_line,
                                  const std::filesystem::path& run, std::string* notice);

/// From the agent to its ranks.
std::string init_to_json(const InitConfig& init);
Result<InitConfig> init_from_json(const std::string& text);

}  // namespace cairn::tools
