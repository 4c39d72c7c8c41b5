// The batch script. Slurm's side of it is checked on Slurm 22.05: with --no-kill and these options of srun the other
// agents outlive a lost node; TERM by --signal reaches every process of the step, and the shell is spared.
#include <fmt/format.h>

#include <cmath>

#include "tools/launch/job.h"
#include "tools/launch/quote.h"
#include "tools/launch/train_words.h"

namespace cairn::tools {
namespace {

constexpr int kMostTries = 5;

/// A script that queues itself again has these around srun. {0}: the run folder; {1} to {3}: the codes of job.h; {4}:
/// kMostTries.
constexpr const char* kBefore = R"(run={0}
last_word() {{ cat "$run/cluster/end.json" 2>/dev/null; }}
before=$(last_word)
)";
constexpr const char* kAfter = R"sh(code=$?
# srun ends with the highest code of all hosts, also of lost ones. The leader's code is the run's. {3}: another run's.
after=$(last_word)
if [ "$code" -ne {3} ] && [ "$after" != "$before" ]; then
  own=$(printf '%s' "$after" | sed -n 's/.*"code":\([0-9]\{{1,3\}}\)[^0-9].*/\1/p')
  code=${{own:-$code}}
fi
# {1}: stopped with steps left. {2}: the next try may go better. At most {4} tries follow without a new checkpoint.
if [ "$code" -eq {1} ] || [ "$code" -eq {2} ]; then
  newest=$(ls "$run/checkpoints" 2>/dev/null | grep '^step-[0-9]*$' | sort -V | tail -n 1)
  this="$SLURM_JOB_ID ${{newest:-none}}"
  read -r job step tries 2>/dev/null < "$run/requeues"
  case $tries in '' | *[!0-9]* | ????*) tries=0 ;; esac  # others may write there
  if [ "$job $step" = "$this" ]; then tries=$((10#$tries + 1)); else tries=1; fi
  if [ "$tries" -gt {4} ]; then
    echo "not queued again: {4} more tries have saved no step (newest: ${{newest:-none}})" >&2
  elif {{ new=$(mktemp "$run/.requeues-XXXXXX") && echo "$this $tries" > "$new" && mv -fT "$new" "$run/requeues"; }} || [ "${{SLURM_RESTART_COUNT:-0}}" -lt {4} ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
)sh";

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
  const auto around = [&](const char* text) {
    return slurm.requeue
               ? fmt::format(fmt::runtime(text), shell_word(job.run), kUnfinished, kUnavailable, kInUse, kMostTries)
               : std::string();
  };
  return out + around(kBefore) + fmt::format("{} {}\n", srun, shell_words(words)) + around(kAfter);
}

}  // namespace cairn::tools
