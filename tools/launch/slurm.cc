// The batch script. Slurm's side of it is checked on Slurm 22.05: with --no-kill and these options of srun the other
// agents outlive a lost node; TERM by --signal reaches every process of the step, and the shell is spared.
#include <fmt/format.h>

#include <cmath>

#include "tools/launch/job.h"
#include "tools/launch/quote.h"
#include "tools/launch/train_words.h"

namespace cairn::tools {
namespace {

/// "1-02:03:00": whole minutes, rounded up.
std::string time_text(double seconds) {
  const auto minutes = static_cast<int64_t>(std::ceil(seconds / 60));
  return fmt::format("{}-{:02}:{:02}:00", minutes / 1440, minutes / 60 % 24, minutes % 60);
}

}  // namespace

Result<std::string> slurm_script(const ClusterConfig& cluster, const TrainJob& job) {
  const SlurmConfig& slurm = cluster.slurm;
  RT_TRY_SET(const std::vector<std::string> words, train_words(cluster, job, slurm.requeue, same_path));
  std::string out = "#!/bin/bash\n";
  const auto option = [&](const std::string& text) { out += "#SBATCH " + text + "\n"; };
  option("--job-name=" + sbatch_word(job.name));
  option(fmt::format("--nodes={}", cluster.all_hosts()));
  option("--ntasks-per-node=1");
  option("--exclusive");
  option("--mem=0");  // all that the nodes have
  option("--no-kill");
  option(slurm.requeue ? "--requeue" : "--no-requeue");
  option("--open-mode=append");
  if (slurm.signal_before_s > 0) option(fmt::format("--signal=TERM@{:.0f}", std::ceil(slurm.signal_before_s)));
  if (slurm.time_s > 0) option("--time=" + time_text(slurm.time_s));
  if (!slurm.partition.empty()) option("--partition=" + sbatch_word(slurm.partition));
  if (!slurm.account.empty()) option("--account=" + sbatch_word(slurm.account));
  for (const std::string& line : slurm.sbatch) option(line);
  out += "\n";
  for (const std::string& variable : cluster.env) {
    const auto [name, value] = split_pair(variable);
    out += fmt::format("export {}={}\n", name, shell_word(value));
  }
  out += fmt::format("cd {} || exit 2\n", shell_word(job.workdir));
  const char* srun = "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none";
  // No exec: a TERM that reaches srun itself has it kill all tasks. No trap: scancel ends the shell, and the job with
  // it.
  out += fmt::format("{} {}\n", srun, shell_words(words));
  if (!slurm.requeue) return out;
  return out + fmt::format(
                   "code=$?\n"
                   "if [ $code -eq {} ]; then scontrol requeue \"$SLURM_JOB_ID\"; fi  # stopped with steps left\n"
                   "exit $code\n",
                   kUnfinished);
}

}  // namespace cairn::tools
