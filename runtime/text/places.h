#pragma once
// Which ids of a text stand on which side of a byte of it, for a tokenizer that cuts marks out of a text first and
// knows nothing of bytes behind that: what lies between two marks is encoded once more up to the place.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/text/added_tokens.h"
#include "runtime/text/tokenizer.h"

namespace cairn::text {

/// Appends the ids of `parts`, which cover a text. `encode` appends those of its bytes [begin, end), which are no mark.
/// Returns a Place for each of `bytes`, which ascend. Errors: those of `encode` and Tokenizer::decode.
Result<std::vector<Place>> encode_with_places(
    const Tokenizer& tokenizer, std::span<const TextPart> parts, std::span<const size_t> bytes,
    const std::function<Status(size_t begin, size_t end, std::vector<int32_t>* ids)>& encode,
    std::vector<int32_t>* ids);

}  // namespace cairn::text
