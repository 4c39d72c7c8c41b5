#include "tools/request_options.h"

#include <CLI/CLI.hpp>

#include "tools/number_option.h"

namespace cairn::tools {

void add_request_options(CLI::App& command, RequestArgs& args) {
  command
      .add_option("--time-limit", args.time_limit,
                  "save and stop so that the run has ended that long after this start, such as 11h30min (default: "
                  "SLURM_JOB_END_TIME, where it is set; none: no limit)")
      ->type_name("TIME");
  command
      .add_option("--on-usr", args.on_usr,
                  "what SIGUSR1 and SIGUSR2 ask for: save, and training continues (default), or stop")
      ->type_name("save|stop")
      ->check(CLI::IsMember({"save", "stop"}));
  command
      .add_option(
          "--exit-when-unfinished", args.exit_when_unfinished,
          "exit code of a stop that was asked for (signal, RUN/stop, --stop-at, time limit) while steps remain, "
          "for a job that queues itself again (default: 0)")
      ->type_name("CODE")
      ->transform(whole_number(1, 125));
  command
      .add_option("--stop-at", args.stop_at,
                  "save and stop once this step is done; the rates and the order of data stay those of the whole run")
      ->type_name("N")
      ->transform(whole_number(1, int64_t{1} << 50));
}

}  // namespace cairn::tools
