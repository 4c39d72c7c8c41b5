#pragma once
// What a run begins with, as the recipe and the command line say it: `init` and --init-...

#include <cstdint>
#include <filesystem>
#include <string>

#include "runtime/config/checkpoint.h"
#include "runtime/core/result.h"

namespace CLI {
class App;
}

namespace cairn::tools {

/// --init-from, --init-weights-only, --init-only, --init-except, --init-allow-missing, --init-allow-extra.
void add_init_options(CLI::App& command, InitConfig& init);

/// Names the weights that a start would fetch from a Hub before it trains.
struct HubPending {
  std::string name;  // "org/name@commit"; empty: nothing of a Hub is missing
  int64_t files = 0, bytes = 0;
};

/// The recipe's init, over which the command line wins option by option; `path` is made that of one checkpoint or
/// folder, absolute. A model of a Hub is fetched, in the commit that keep_hub_commit() has recorded; with `pending`,
/// only its small files are. Empty when the run has checkpoints of its own: it goes on from them, which `notice` (may
/// be null) says where the command line wants otherwise. Errors: kInvalidInput when there is no such checkpoint, or
/// there are options and nothing that they are of.
Result<InitConfig> effective_init(const InitConfig& recipe, const InitConfig& command_line,
                                  const std::filesystem::path& run, std::string* notice, HubPending* pending = nullptr);

/// Records in the run's folder the commit that `named` stood for, where it is a name of a Hub: a start before the first
/// checkpoint takes it again, wherever the branch is then. `init`: of effective_init(). Errors: kIo, kNoSpace.
Status keep_hub_commit(const std::string& named, const InitConfig& init, const std::filesystem::path& run);

/// From the agent to its ranks.
std::string init_to_json(const InitConfig& init);
Result<InitConfig> init_from_json(const std::string& text);

}  // namespace cairn::tools
