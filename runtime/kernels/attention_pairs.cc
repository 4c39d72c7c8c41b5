#include "runtime/kernels/attention_pairs.h"

#include <algorithm>

#include "runtime/core/check.h"
#include "runtime/kernels/gemm_avx512.h"
#include "runtime/kernels/gemm_kernel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

const GemmKernel& pair_kernel() {
  static const GemmKernel kKernel = gemm_kernel(gemm_isa(), DType::kBf16);
  return kKernel;
}

void pack(GemmSide side, const bf16* from, int64_t stride, bool along, int64_t lines, int64_t depth, uint32_t* room) {
  pack_panels(gemm_isa(), pair_kernel(), {from, stride, along, DType::kBf16}, side, 0, lines, 0, depth,
              pair_kernel().steps_of(depth), room);
}

int64_t words(GemmSide side, int64_t lines, int64_t depth) {
  const int64_t width = pair_kernel().width(side);
  return (lines + width - 1) / width * width * pair_kernel().steps_of(depth);
}

RT_INLINE void add_rows_body(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t rows,
                             int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[r * to_row + c] += from[r * from_row + c];
  }
}
RT_CLONES(add_rows)

}  // namespace

bool pairs_run() { return gemm_isa() == GemmIsa::kAmx || gemm_isa() == GemmIsa::kAvx512Bf16; }

PairRegisters::PairRegisters(bool pairs) : AmxTiles(pairs && gemm_isa() == GemmIsa::kAmx) {}

int64_t pair_left_words(int64_t lines, int64_t depth) { return words(GemmSide::kA, lines, depth); }
int64_t pair_right_words(int64_t lines, int64_t depth) { return words(GemmSide::kB, lines, depth); }

PairLeft pair_left_rows(const bf16* from, int64_t stride, int64_t lines, int64_t depth, uint32_t* room) {
  const GemmKernel& kernel = pair_kernel();
  if (kernel.amx && lines % kernel.rows == 0 && depth % (2 * kernel.step_unit) == 0) return {from, stride * 2};
  pack(GemmSide::kA, from, stride, true, lines, depth, room);
  return {room, 0};
}

PairLeft pair_left_columns(const bf16* from, int64_t stride, int64_t lines, int64_t depth, uint32_t* room) {
  pack(GemmSide::kA, from, stride, false, lines, depth, room);
  return {room, 0};
}

void pair_right(const bf16* from, int64_t stride, bool along, int64_t lines, int64_t depth, uint32_t* room) {
  pack(GemmSide::kB, from, stride, along, lines, depth, room);
}

void multiply_pairs(PairLeft a, const uint32_t* b, int64_t rows, int64_t columns, int64_t depth, float* c,
                    int64_t c_row, bool add) {
  const GemmKernel& kernel = pair_kernel();
  const int64_t steps = kernel.steps_of(depth);
  const int64_t a_line_bytes = a.row_bytes == 0 ? steps * 4 : a.row_bytes;
  alignas(64) float tile[kMaxTileElems];
  for (int64_t j = 0; j < columns; j += kernel.columns) {
    for (int64_t i = 0; i < rows; i += kernel.rows) {
      const void* const lines = static_cast<const char*>(a.data) + i * a_line_bytes;
      const int64_t row_count = std::min(kernel.rows, rows - i), column_count = std::min(kernel.columns, columns - j);
      float* const to = c + i * c_row + j;
      if (!add || (kernel.amx && row_count == kernel.rows && column_count == kernel.columns)) {
        kernel.tile(lines, a.row_bytes, b + j * steps, steps, add, to, c_row, {});
      } else {
        kernel.tile(lines, a.row_bytes, b + j * steps, steps, false, tile, kernel.columns, {});
        add_rows(tile, kernel.columns, to, c_row, row_count, column_count);
      }
    }
  }
}

#if defined(__x86_64__)
#define RT_PAIRS __attribute__((target("arch=x86-64-v4,avx512bf16")))

namespace {

constexpr int kVectors = kKeys / 16;
constexpr float kLog2E = 1.44269504f;

/// 2^x for finite x, relative error below 3e-7; 0 and infinity beyond the range. 2^n 2^f with f in [-1/2, 1/2], a
/// minimax fit.
RT_AVX512 RT_INLINE __m512 exp2_512(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.32647285e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.67151299e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55073358e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40222424e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147004e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

/// Lanes of vector `v` of a row that lie in [first, end).
RT_INLINE uint16_t visible_lanes(int64_t first, int64_t end, int v) {
  const uint64_t below_end = end >= 64 ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  const uint64_t below_first = first >= 64 ? ~uint64_t{0} : (uint64_t{1} << first) - 1;
  return static_cast<uint16_t>((below_end & ~below_first) >> (16 * v));
}

RT_PAIRS RT_INLINE void store_low(const __m512* p, bf16* to) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v += 2) {
    _mm512_storeu_si512(to + 16 * v, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[v + 1], p[v])));
  }
}

}  // namespace

RT_PAIRS void pair_softmax(const float* scores, int64_t rows, const VisibleColumns& columns, float scale, float* max,
                           float* sum, float* out, int64_t padded, const float* mask, bf16* low) {
  const __m512 infinity = _mm512_set1_ps(-__builtin_inff());
  const __m512 scales = _mm512_set1_ps(scale * kLog2E);
  for (int64_t r = 0; r < rows; ++r) {
    const float* const row = scores + r * kKeys;
    __m512 p[kVectors];
    const int64_t first = columns.first[r], end = columns.end[r];
    if (first >= end) {  // no maximum yet, perhaps: nothing to take a difference with
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) p[v] = _mm512_setzero_ps();
      store_low(p, low + r * kKeys);
      continue;
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      p[v] = _mm512_mask_mov_ps(infinity, visible_lanes(first, end, v), _mm512_loadu_ps(row + 16 * v));
    }
    const __m512 largest = _mm512_max_ps(_mm512_max_ps(p[0], p[1]), _mm512_max_ps(p[2], p[3]));
    const float tile_max = _mm512_reduce_max_ps(largest) * scale;
    const float new_max = tile_max > max[r] ? tile_max : max[r];
    const __m512 shift = _mm512_set1_ps(-new_max * kLog2E);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      p[v] = _mm512_maskz_mov_ps(visible_lanes(first, end, v), exp2_512(_mm512_fmadd_ps(p[v], scales, shift)));
    }
    const float tile_sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])));
    if (new_max != max[r]) {
      const float shrink = exp_f32(max[r] - new_max);
      sum[r] *= shrink;
      const __m512 shrinks = _mm512_set1_ps(shrink);
      float* const to = out + r * padded;
      for (int64_t c = 0; c < padded; c += 16)
        _mm512_storeu_ps(to + c, _mm512_mul_ps(_mm512_loadu_ps(to + c), shrinks));
      max[r] = new_max;
    }
    sum[r] += tile_sum;
    if (mask != nullptr) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) p[v] = _mm512_mul_ps(p[v], _mm512_loadu_ps(mask + r * kKeys + 16 * v));
    }
    store_low(p, low + r * kKeys);
  }
}

RT_PAIRS void pair_score_gradients(const float* scores, const float* dp, int64_t rows, const VisibleColumns& columns,
                                   float scale, const float* logsumexp, const float* delta, float factor,
                                   const float* mask, const float* slopes, bf16* low, bf16* dlow) {
  const __m512 scales = _mm512_set1_ps(scale * kLog2E), factors = _mm512_set1_ps(factor);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = r * kKeys;
    const __m512 shift = _mm512_set1_ps(-logsumexp[r] * kLog2E), deltas = _mm512_set1_ps(delta[r]);
    __m512 p[kVectors], ds[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m512 exponents = _mm512_fmadd_ps(_mm512_loadu_ps(scores + at + 16 * v), scales, shift);
      p[v] = _mm512_maskz_mov_ps(visible_lanes(columns.first[r], columns.end[r], v), exp2_512(exponents));
      __m512 gradient = _mm512_loadu_ps(dp + at + 16 * v);
      const __m512 kept = mask != nullptr ? _mm512_loadu_ps(mask + at + 16 * v) : _mm512_set1_ps(1.0f);
      gradient = _mm512_fmsub_ps(gradient, kept, deltas);
      ds[v] = _mm512_mul_ps(_mm512_mul_ps(p[v], gradient), factors);
      if (slopes != nullptr) ds[v] = _mm512_mul_ps(ds[v], _mm512_loadu_ps(slopes + at + 16 * v));
      p[v] = _mm512_mul_ps(p[v], kept);
    }
    store_low(p, low + at);
    store_low(ds, dlow + at);
  }
}
#else
void pair_softmax(const float*, int64_t, const VisibleColumns&, float, float*, float*, float*, int64_t, const float*,
                  bf16*) {
  RT_CHECK(false, "no bf16 instructions here");
}
void pair_score_gradients(const float*, const float*, int64_t, const VisibleColumns&, float, const float*, const float*,
                          float, const float*, const float*, bf16*, bf16*) {
  RT_CHECK(false, "no bf16 instructions here");
}
#endif

}  // namespace cairn::kernels
