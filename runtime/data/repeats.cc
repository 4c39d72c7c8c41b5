#include "runtime/data/repeats.h"

#include <algorithm>

namespace cairn::data {

bool has_repeats(const MaskRepeats& mask, std::span<const int32_t> tokens) {
  const auto count = static_cast<int64_t>(tokens.size());
  for (int64_t period = 1; period <= mask.period && period * mask.count <= count; ++period) {
    int64_t same = 0;  // tokens in a row that are those `period` before them
    for (int64_t at = period; at < count; ++at) {
      same = tokens[at] == tokens[at - period] ? same + 1 : 0;
      if (same == period * (mask.count - 1)) return true;
    }
  }
  return false;
}

void find_repeats(const MaskRepeats& mask, MicroBatch* batch) {
  batch->repeats.assign(mask.period > 0 ? batch->inputs.size() : 0, 0);
  if (mask.period == 0) return;
  std::vector<int32_t> text;
  for (int64_t sample = 0; sample < batch->samples; ++sample) {
    const bool apart = !batch->apart.empty() && batch->apart[static_cast<size_t>(sample)] != 0;
    const int64_t begin = sample * batch->seq_len, end = begin + batch->seq_len;
    for (int64_t row = begin; row < end;) {
      int64_t next = apart ? row + 1 : end;
      while (next < end && batch->starts[next] == batch->starts[row]) ++next;
      text.assign(batch->inputs.begin() + row, batch->inputs.begin() + next);
      if (!apart) text.push_back(batch->targets[next - 1]);  // the token behind the window
      if (has_repeats(mask, text)) std::fill(batch->repeats.begin() + row, batch->repeats.begin() + next, 1);
      row = next;
    }
  }
}

int64_t mask_repeats(MicroBatch* batch) {
  int64_t out = 0;
  for (size_t row = 0; row < batch->repeats.size(); ++row) {
    if (batch->repeats[row] == 0 || batch->targets[row] == kNoTarget) continue;
    batch->targets[row] = kNoTarget;
    ++out;
  }
  return out;
}

}  // namespace cairn::data
