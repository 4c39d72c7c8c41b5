#pragma once
// The report of one run: text for a terminal, and the JSON that programs read and the page shows.

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tools/report/history.h"

namespace cairn::tools {

/// The loss of a channel: means over the first and the last tenth of the steps that had tokens of it.
struct ChannelSummary {
  std::string name;
  int64_t steps = 0;
  double first = NAN, last = NAN;
};

/// The steps of a run in a few numbers; NaN where there is none.
struct Summary {
  int64_t step = 0;
  double first_loss = NAN, last_loss = NAN;
  double valid_loss = NAN, best_valid_loss = NAN;  // the last evaluation, and the best one
  int64_t best_valid_step = 0;
  std::vector<std::pair<std::string, double>> valid_source_loss;
  std::vector<ChannelSummary> channels;                 // the highest loss at the end first
  double step_ms = NAN, tokens_per_s = NAN, mfu = NAN;  // medians
  int64_t snapshots = 0, snapshots_left_out = 0;
  double snapshot_ms = NAN, lost_ms = 0;   // training stood still: median, in all
  std::map<std::string, double> split_ms;  // of all steps
};
Summary summary_of(const History& history);

/// `curve_bytes`: about what the curves may take (tools/report/curves.h).
nlohmann::json report_json(const History& history, const std::filesystem::path& run, int64_t curve_bytes);

/// Lines of at most `columns`, except those that quote paths and messages.
std::string report_text(const History& history, const std::filesystem::path& run, int64_t columns, bool utf8);

}  // namespace cairn::tools
