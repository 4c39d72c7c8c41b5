#include "ckpt/persist/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace cairn::ckpt {

void stream_copy(std::byte* to, std::span<const std::byte> from) {
  std::span<const std::byte> nothing;
  stream_copy(to, from, nothing);
}

void stream_copy(std::byte* to, std::span<const std::byte> from, [[maybe_unused]] std::span<const std::byte>& ahead) {
  const std::byte* at = from.data();
  size_t left = from.size();
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (left >= head + kLine) {
    std::memcpy(to, at, head);
    to += head;
    at += head;
    left -= head;
    // A whole line at once, or it would go to memory in parts. Wider registers are no faster here.
    for (; left >= kLine; to += kLine, at += kLine, left -= kLine) {
      if (!ahead.empty()) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead.data()), _MM_HINT_T1);
        ahead = ahead.subspan(std::min(kLine, ahead.size()));
      }
      const auto* const in = reinterpret_cast<const __m128i*>(at);
      auto* const out = reinterpret_cast<__m128i*>(to);
      const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
      const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
  }
#endif
  if (left > 0) std::memcpy(to, at, left);
}

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace cairn::ckpt
