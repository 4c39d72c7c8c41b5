#pragma once
// The loss of instruction data weighed by sample: T.instruct { weigh = "sample" }.
//
// A document of a step has n tokens that count. Where a source has N such tokens in D documents of the step, each
// weighs N / (D n): every document weighs alike, and the source as much as its tokens do. The source's loss is the mean
// over its documents of the mean over their tokens; the step's loss is the mean over tokens of all sources, as ever. N
// and D are of the whole step, added up over the ranks as integers, so no layout changes a weight.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/config/data.h"
#include "runtime/data/dataset.h"

namespace cairn::data {

/// For each source whether it weighs by sample; empty where none does.
std::vector<uint8_t> sources_by_sample(const DataConfig& config);

/// A source's part in the loss of a step.
struct DocumentCount {
  double documents = 0, tokens = 0;  // integers
  /// The weight of a token in a document of which `count` tokens count: a float, as a gradient takes it.
  float weight(int32_t count) const { return static_cast<float>(tokens / (documents * count)); }
};

/// Fills batch->counts, of samples that load_samples() has filled and whose targets are final, and adds their documents
/// to `of_source`. A document is what rows with the same `starts` are; one of which no token counts is none.
void count_documents(std::span<const uint8_t> by_sample, MicroBatch* batch, std::span<DocumentCount> of_source);

}  // namespace cairn::data
