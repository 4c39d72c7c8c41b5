#include "runtime/data/loss_weights.h"

#include <algorithm>

#include "runtime/core/check.h"

namespace cairn::data {

std::vector<uint8_t> sources_by_sample(const DataConfig& config) {
  std::vector<uint8_t> out;
  for (const DataSource& source : config.sources) out.push_back(source.weigh == DataSource::Weigh::kSample ? 1 : 0);
  if (std::ranges::count(out, 1) == 0) out.clear();
  return out;
}

void count_documents(std::span<const uint8_t> by_sample, MicroBatch* batch, std::span<DocumentCount> of_source) {
  batch->counts.assign(batch->targets.size(), 0);
  for (int64_t sample = 0; sample < batch->samples; ++sample) {
    const auto source = static_cast<size_t>(batch->sources[static_cast<size_t>(sample)]);
    if (by_sample[source] == 0) continue;
    RT_CHECK(!batch->starts.empty(), "a source without documents weighs by sample");
    const int64_t begin = sample * batch->seq_len, end = begin + batch->seq_len;
    for (int64_t row = begin; row < end;) {
      int64_t next = row + 1;
      while (next < end && batch->starts[next] == batch->starts[row]) ++next;
      const auto first = batch->targets.begin() + row, last = batch->targets.begin() + next;
      const auto counted = (last - first) - std::count(first, last, kNoTarget);
      std::fill(batch->counts.begin() + row, batch->counts.begin() + next, static_cast<int32_t>(counted));
      of_source[source].tokens += static_cast<double>(counted);
      of_source[source].documents += counted > 0 ? 1 : 0;
      row = next;
    }
  }
}

}  // namespace cairn::data
