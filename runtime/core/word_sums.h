#pragma once
// A checksum that a loop over an array can take on the way: for 32-bit words x[0..n),
//   low half   sum of x[i],           modulo 2^32
//   high half  sum of i * x[i],       modulo 2^32 (i modulo 2^32)
// so parts add up in any order and threads change nothing. Every flipped bit and every word that was overwritten alone
// is found; damage of several words goes unseen with a chance of about 2^-64. Against accidents, not against people.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cairn {

/// Adds the sums of two disjoint parts.
constexpr uint64_t add_word_sums(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<uint32_t>(a >> 32) + static_cast<uint32_t>(b >> 32)) << 32 |
         static_cast<uint32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

/// The sums of the same words when the first one stands at index `first` instead of 0.
constexpr uint64_t shift_word_sums(uint64_t sums, int64_t first) {
  const uint32_t high = static_cast<uint32_t>(sums >> 32) + static_cast<uint32_t>(sums) * static_cast<uint32_t>(first);
  return static_cast<uint64_t>(high) << 32 | static_cast<uint32_t>(sums);
}

/// The sums of `count` words of which the first one stands at index `first`, at the speed of memory.
uint64_t word_sums(const std::byte* data, int64_t count, int64_t first = 0);

/// One of the runs whose sums a device takes together. They are cut into chunks: how many stand before this one's.
struct WordRun {
  const float* words = nullptr;
  int64_t count = 0;
  int64_t first_chunk = 0;
};
inline constexpr int64_t kSumChunkWords = int64_t{1} << 18;
constexpr int64_t sum_chunks(int64_t count) { return (count + kSumChunkWords - 1) / kSumChunkWords; }

/// What word_sums() is, word by word: for tests.
inline uint64_t word_sums_plain(const std::byte* data, int64_t count, int64_t first = 0) {
  uint32_t low = 0, high = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, data + i * 4, 4);
    low += word;
    high += word * static_cast<uint32_t>(first + i);
  }
  return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace cairn
