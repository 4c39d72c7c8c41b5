// cairn _stacks PID...: the stacks of processes, a line of JSON each. Started by the agent when ranks wait too long.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "runtime/agent/stacks.h"
#include "runtime/json/json.h"
#include "tools/commands.h"

namespace cairn::tools {

void add_stacks(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("_stacks", "stacks of processes; started by `cairn train`")->group("");
  const auto pids = std::make_shared<std::vector<pid_t>>();
  command->add_option("PID", *pids)->required();
  command->callback([pids, &session] {
    session.action = [pids]() -> Result<int> {
      agent::read_stacks(*pids, [](const agent::ProcessStacks& stacks) {
        fmt::print("{}\n", json_text(agent::to_json(stacks)));
        std::fflush(stdout);
      });
      return 0;
    };
  });
}

}  // namespace cairn::tools
