// One ssh for each host. ssh passes no signal on, so each agent has a small reader beside it, which takes names of
// signals from the connection's input. When the connection is lost the reader ends and the agent stays: what trains
// does not depend on the host that launched it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/launch/job.h"
#include "tools/launch/quote.h"
#include "tools/launch/train_words.h"

namespace cairn::tools {

Result<std::vector<HostCommand>> ssh_commands(const ClusterConfig& cluster, const TrainJob& job) {
  RT_TRY_SET(std::vector<std::string> words, train_words(cluster, job, false, same_path));
  words.insert(words.end(), {"--hosts", fmt::format("{}", fmt::join(cluster.ssh.names, ",")), "--host-index", ""});
  std::string environment;
  for (const std::string& variable : cluster.env) {
    const auto [name, value] = split_pair(variable);
    environment += fmt::format("export {}={} && ", name, shell_word(value));
  }
  std::vector<HostCommand> out;
  for (size_t k = 0; k < cluster.ssh.names.size(); ++k) {
    HostCommand command{.host = cluster.ssh.names[k],
                        .words = {"ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"}};
    command.words.insert(command.words.end(), cluster.ssh.options.begin(), cluster.ssh.options.end());
    words.back() = std::to_string(k);
    // $$ is the shell, which becomes the agent; the reader is no child of it.
    command.words.insert(
        command.words.end(),
        {command.host, fmt::format("cd {} && {}{{ (while read -r s; do kill -s \"$s\" $$; done <&3 >/dev/null 2>&1 &) "
                                   "3<&0; exec {} </dev/null; }}",
                                   shell_word(job.workdir), environment, shell_words(words))});
    out.push_back(std::move(command));
  }
  return out;
}

}  // namespace cairn::tools
