// cairn doctor: what this machine has of what runs need, and what to do about the rest.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "tools/commands.h"
#include "tools/machine_check.h"

namespace cairn::tools {

void add_doctor(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("doctor", "what this machine has of what runs need, and what to do");
  const auto folder = std::make_shared<std::string>(".");
  command->add_option("--run", *folder, "the folder whose disk is looked at (default: here)")->type_name("DIR");
  add_json_flag(*command, session);
  command->footer(
      "Changes nothing. A machine without a GPU is fine: runs use the CPU then. One that has a GPU which cannot be "
      "used\n"
      "is not, since a run would refuse to start there unless it is told --device cpu (docs/gpu.md).\n"
      "Exit codes: 0 nothing stands in the way of a run, 2 something does.\n"
      "Examples:\n"
      "  cairn doctor\n"
      "  cairn doctor --run /data/runs --json");
  command->callback([folder, &session] {
    session.action = [folder, &session]() -> Result<int> {
      const Result<host::VisibleGpus> gpus = own_gpus();
      std::vector<MachineCheck> checks = check_cuda(true);
      checks.push_back(check_cudnn());
      for (MachineCheck& one : check_places(gpus, host::Topology::of_host())) checks.push_back(std::move(one));
      for (MachineCheck& one : check_gpu_health()) checks.push_back(std::move(one));
      for (MachineCheck& one : check_nccl_here()) checks.push_back(std::move(one));
      for (MachineCheck& one : check_host(*folder)) checks.push_back(std::move(one));
      const bool ok = !any_problem(checks);
      if (session.json) {
        print_json({{"ok", ok}, {"checks", machine_json(checks)}});
      } else {
        std::fputs(machine_text(checks).c_str(), stdout);
      }
      return ok ? 0 : kRefused;
    };
  });
}

}  // namespace cairn::tools
