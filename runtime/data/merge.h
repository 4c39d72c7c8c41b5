#pragma once
// Several Megatron pairs -> one: their documents one after the other, and the loss spans of instruction data.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/result.h"

namespace cairn::data {

struct MergeReport {
  int64_t documents = 0, tokens = 0;
  int64_t empty_documents = 0;  // of other programs' pairs, dropped
  int64_t counted = -1;         // tokens whose guessing is learnt; -1: no instruction data
  DType dtype = DType::kU16;
  std::vector<std::string> unknown;  // prefixes of which nothing says what tokenizer made them
};

/// Memory: O(1), but 8 bytes a document of instruction data. Errors, before anything is written: kInvalidInput for
/// fewer than two pairs, an output that exists or is one of them, pairs of different types or of tokenizers that
/// differ (set_origin.h), some with a .loss and some without, and a pair whose documents have several sequences; those
/// of open_megatron and LossSpans. On any error no pair is written and an old one stands.
Result<MergeReport> merge_sets(const std::vector<std::string>& prefixes, const std::string& out, bool overwrite);

}  // namespace cairn::data
