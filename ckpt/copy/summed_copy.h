#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace cairn::ckpt {

/// Copies whole 32-bit words and returns their word_sums (runtime/core/word_sums.h), in one pass over memory and past
/// the caches. As fast as memcpy of as much alone where `to` begins at a multiple of 64 bytes and the processor has
/// AVX-512. Source and target do not overlap.
uint64_t summed_copy(std::byte* to, std::span<const std::byte> from);

}  // namespace cairn::ckpt
