#pragma once
// Text that repeats a few tokens again and again, whose targets do not count: data.mask_repeats. Logs, tables of
// zeros and broken pages are of this kind; a batch with one of them may throw a training off its course.
//
// Tokens t repeat with period p from a to b where t[i] = t[i - p] for all i in [a + p, b); they do so (b - a) / p
// times.

#include <cstdint>
#include <span>

#include "runtime/config/data.h"
#include "runtime/data/dataset.h"

namespace cairn::data {

/// Whether some stretch of `tokens` repeats with a period of at most `mask.period` tokens, `mask.count` times or more.
bool has_repeats(const MaskRepeats& mask, std::span<const int32_t> tokens);

/// Fills batch->repeats from what load_samples() has read, which an objective may move later: rows of samples with
/// repeats; of a sample that came with rows, of single documents. Empty where nothing is masked.
void find_repeats(const MaskRepeats& mask, MicroBatch* batch);

/// The targets of these rows become kNoTarget. Returns how many there were.
int64_t mask_repeats(MicroBatch* batch);

}  // namespace cairn::data
