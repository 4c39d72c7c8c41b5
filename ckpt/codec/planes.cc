// Splitting and joining byte planes: as fast as memory for 2 and 4 bytes, the sizes that training state has.
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstring>

#include "ckpt/codec/codec.h"
#include "runtime/core/check.h"

namespace cairn::ckpt {
namespace {

// Elements [first, count): any element size.
void split_rest(const std::byte* from, size_t elem, size_t count, size_t first, std::byte* to) {
  for (size_t plane = 0; plane < elem; ++plane) {
    for (size_t i = first; i < count; ++i) to[plane * count + i] = from[i * elem + plane];
  }
}
void join_rest(const std::byte* from, size_t elem, size_t count, size_t first, std::byte* to) {
  for (size_t plane = 0; plane < elem; ++plane) {
    for (size_t i = first; i < count; ++i) to[i * elem + plane] = from[plane * count + i];
  }
}

#if defined(__SSE2__)
__m128i load(const std::byte* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
void store(std::byte* at, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), v); }

// Each of these does whole groups of 16 elements and returns how many elements that were.
size_t split_4(const std::byte* from, size_t count, std::byte* to) {
  const __m128i low = _mm_set1_epi32(0xff);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m128i a = load(from + 4 * i), b = load(from + 4 * i + 16);
    const __m128i c = load(from + 4 * i + 32), d = load(from + 4 * i + 48);
    for (int plane = 0; plane < 4; ++plane) {
      const __m128i shift = _mm_cvtsi32_si128(8 * plane);
      const auto byte_of = [&](__m128i v) { return _mm_and_si128(_mm_srl_epi32(v, shift), low); };
      const __m128i ab = _mm_packs_epi32(byte_of(a), byte_of(b)), cd = _mm_packs_epi32(byte_of(c), byte_of(d));
      store(to + static_cast<size_t>(plane) * count + i, _mm_packus_epi16(ab, cd));
    }
  }
  return i;
}
size_t join_4(const std::byte* from, size_t count, std::byte* to) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m128i p0 = load(from + i), p1 = load(from + count + i);
    const __m128i p2 = load(from + 2 * count + i), p3 = load(from + 3 * count + i);
    const __m128i low = _mm_unpacklo_epi8(p0, p1), high = _mm_unpackhi_epi8(p0, p1);
    const __m128i low2 = _mm_unpacklo_epi8(p2, p3), high2 = _mm_unpackhi_epi8(p2, p3);
    store(to + 4 * i, _mm_unpacklo_epi16(low, low2));
    store(to + 4 * i + 16, _mm_unpackhi_epi16(low, low2));
    store(to + 4 * i + 32, _mm_unpacklo_epi16(high, high2));
    store(to + 4 * i + 48, _mm_unpackhi_epi16(high, high2));
  }
  return i;
}
size_t split_2(const std::byte* from, size_t count, std::byte* to) {
  const __m128i low = _mm_set1_epi16(0xff);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m128i a = load(from + 2 * i), b = load(from + 2 * i + 16);
    store(to + i, _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low)));
    store(to + count + i, _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
  }
  return i;
}
size_t join_2(const std::byte* from, size_t count, std::byte* to) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m128i p0 = load(from + i), p1 = load(from + count + i);
    store(to + 2 * i, _mm_unpacklo_epi8(p0, p1));
    store(to + 2 * i + 16, _mm_unpackhi_epi8(p0, p1));
  }
  return i;
}
#endif

}  // namespace

void split_planes(std::span<const std::byte> from, int64_t elem_bytes, std::span<std::byte> to) {
  RT_CHECK(elem_bytes >= 1 && from.size() == to.size(), "{} bytes into {}, elements of {}", from.size(), to.size(),
           elem_bytes);
  const auto elem = static_cast<size_t>(elem_bytes);
  const size_t count = from.size() / elem;
  size_t first = 0;
#if defined(__SSE2__)
  if (elem == 4) first = split_4(from.data(), count, to.data());
  if (elem == 2) first = split_2(from.data(), count, to.data());
#endif
  split_rest(from.data(), elem, count, first, to.data());
  if (count * elem < from.size()) std::memcpy(to.data() + count * elem, from.data() + count * elem, from.size() % elem);
}

void join_planes(std::span<const std::byte> from, int64_t elem_bytes, std::span<std::byte> to) {
  RT_CHECK(elem_bytes >= 1 && from.size() == to.size(), "{} bytes into {}, elements of {}", from.size(), to.size(),
           elem_bytes);
  const auto elem = static_cast<size_t>(elem_bytes);
  const size_t count = from.size() / elem;
  size_t first = 0;
#if defined(__SSE2__)
  if (elem == 4) first = join_4(from.data(), count, to.data());
  if (elem == 2) first = join_2(from.data(), count, to.data());
#endif
  join_rest(from.data(), elem, count, first, to.data());
  if (count * elem < from.size()) std::memcpy(to.data() + count * elem, from.data() + count * elem, from.size() % elem);
}

}  // namespace cairn::ckpt
