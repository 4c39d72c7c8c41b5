#pragma once
// Train, validation and test parts of one source.

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data/token_file.h"

namespace cairn::data {

enum class Part { kTrain, kValid, kTest };

/// Bounds of three parts of `count` things by Megatron-LM's rule: parts divided by their sum, part k is
/// [round(c_k * count), round(c_{k+1} * count)) with c the running sum in float64 and halves rounded to even (GPT-NeoX
/// rounds otherwise: its 9,1,0 of 15 is 13 and 2). Missing parts are 0; no parts at all means all is train.
/// Errors: kInvalidInput for more than three parts, a part that is negative or not finite, or a sum of 0.
/// Source: Megatron-LM, core/datasets/blended_megatron_dataset_{config,builder}.py.
Result<std::array<int64_t, 4>> split_bounds(const std::vector<double>& parts, int64_t count);

/// The three parts of a source; an empty one is null. A source of two or more sequences (documents) is cut between
/// them, as Megatron does. A source of ONE sequence, so every plain token file, has nothing to cut between: the same
/// rule is then applied to its tokens, so validation is the end of the text (or what the parts say).
/// Errors: kInvalidInput as above, or when no tokens are left to train on.
Result<std::array<std::unique_ptr<TokenSource>, 3>> split_source(std::shared_ptr<const TokenSource> source,
                                                                 const std::vector<double>& parts);

}  // namespace cairn::data
