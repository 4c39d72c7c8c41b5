#include "tools/launch/train_words.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "tools/launch/quote.h"

namespace cairn::tools {

Result<std::vector<std::string>> train_words(const ClusterConfig& cluster, const TrainJob& job, bool restarts,
                                             const PathOf& path_of) {
  std::vector<std::string> out = {job.program, "train", path_of(job.recipe)};
  for (const std::filesystem::path& file : job.with_files) out.insert(out.end(), {"--with", path_of(file)});
  out.insert(out.end(), job.recipe_words.begin(), job.recipe_words.end());
  // How many there are is settled here: the launcher starts no more, whatever becomes of the file.
  out.insert(out.end(), {"--run", job.run, "--cluster", path_of(job.cluster_file), "--nproc",
                         std::to_string(cluster.ranks_per_host)});
  if (cluster.spares > 0) out.insert(out.end(), {"--spares", std::to_string(cluster.spares)});
  if (cluster.hosts_min < cluster.hosts) out.insert(out.end(), {"--hosts-min", std::to_string(cluster.hosts_min)});
  if (restarts) out.insert(out.end(), {"--exit-when-unfinished", std::to_string(kUnfinished)});
  const bool said = std::ranges::any_of(
      job.train_words, [](const std::string& word) { return word == "--threads" || word.starts_with("--threads="); });
  if (const double cpu = cluster.kubernetes.resources.cpu; cpu > 0 && !said) {  // the pod's limit of processor time
    const auto whole = static_cast<int64_t>(std::ceil(cpu)) / cluster.ranks_per_host;
    out.insert(out.end(), {"--threads", std::to_string(std::clamp<int64_t>(whole, 1, 1024))});
  }
  out.insert(out.end(), job.train_words.begin(), job.train_words.end());
  for (const std::string& word : out) RT_TRY(check_line(fmt::format("`{}`", word.substr(0, 60)), word));
  RT_TRY(check_line("the working directory", job.workdir));
  return out;
}

}  // namespace cairn::tools
