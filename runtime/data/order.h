#pragma once
// The stateless sample order: which window of a source its k-th sample is, and which source a position draws from.
// Everything here is arithmetic; nothing is built, stored or loaded. Version kOrderVersion names all of it: change a
// function and the number must change, for a checkpoint resumes by it. Versions 1 and 2 share these functions; since 2
// a state also says how sources, weights and windows changed on the way.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/random.h"

namespace cairn::data {

constexpr int32_t kOrderVersion = 2;

constexpr uint64_t order_key(uint64_t seed, uint64_t stream, uint64_t epoch) {
  return mix64(mix64(mix64(seed) ^ stream) ^ epoch);
}

/// A bijection of [0, n) chosen by `key`: an 8-round Feistel network on the next power of four, walked until it lands
/// inside. Fewer than four passes on average. 0 <= i < n; 0 for n < 2. n below 2^62.
int64_t permute(int64_t n, uint64_t key, int64_t i);

/// Windows of `seq_len` inputs (and the token after them) that `tokens` tokens hold: (tokens - 1) div seq_len.
constexpr int64_t window_count(int64_t tokens, int64_t seq_len) { return tokens < 1 ? 0 : (tokens - 1) / seq_len; }

/// The source that draw number `draws` = sum(taken) of a blend stage takes: the greatest shortfall w_i * max(draws, 1)
/// - taken_i, the lowest index among equals, in double precision. `weights` sum to 1. Source: Megatron-LM,
/// core/datasets/helpers.cpp. `left`, if not empty, holds what each source still has: a source with 0 leaves the
/// contest. Returns -1 when all did.
int64_t blend_next(std::span<const double> weights, std::span<const int64_t> taken, int64_t draws,
                   std::span<const int64_t> left = {});

}  // namespace cairn::data
