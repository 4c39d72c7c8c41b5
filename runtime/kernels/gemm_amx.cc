#include "runtime/kernels/gemm_amx.h"

#include <algorithm>
#include <type_traits>

#include "runtime/core/check.h"
#include "runtime/kernels/gemm_avx512.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define RT_AMX __attribute__((target("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16")))

namespace cairn::kernels {
namespace {

constexpr int64_t kLine = 64, kTileWords = 256;  // bytes of a tile's row; a register

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16) == 0 || (d & kTiles) == 0) return false;
  if (__builtin_cpu_supports("x86-64-v4") == 0 || __builtin_cpu_supports("avx512bf16") == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

/// As LDTILECFG reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kConfig;

RT_AMX void configure() { _tile_loadconfig(&kConfig); }
RT_AMX void release() {
  _tile_release();
  _mm_sfence();  // rows written past the caches are ordered with nothing else
}

RT_AMX RT_INLINE void write_rows(GemmRows& out, int64_t count) {
  constexpr int64_t kAhead = 8;  // rows between the one that is written and the one that is fetched
  count = std::min(count, out.rows);
  out.rows -= count;
  for (; count > 0; --count, out.from += kAmxColumns, out.to += out.row_bytes) {
    if (!out.past) {
      for (int64_t c = 0; c < (out.round ? 1 : 2); ++c)
        _mm_prefetch(out.to + kAhead * out.row_bytes + 64 * c, _MM_HINT_T0);
    }
    __m512 sums[2];
#pragma GCC unroll 2
    for (int64_t v = 0; v < 2; ++v) {
      sums[v] = _mm512_loadu_ps(out.from + 16 * v);
      if (out.bias != nullptr) sums[v] = _mm512_add_ps(sums[v], _mm512_loadu_ps(out.bias + 16 * v));
      if (out.before != nullptr) sums[v] = _mm512_add_ps(_mm512_loadu_ps(out.before + 16 * v), sums[v]);
    }
    if (out.before != nullptr) out.before += out.before_row;
    if (out.round) {
      auto* const line = reinterpret_cast<__m512i*>(out.to);
      const auto rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(sums[1], sums[0]));
      out.past ? _mm512_stream_si512(line, rounded) : _mm512_storeu_si512(line, rounded);
      continue;
    }
    auto* const to = reinterpret_cast<float*>(out.to);
#pragma GCC unroll 2
    for (int64_t v = 0; v < 2; ++v) {
      const __m512 sum = _mm512_add_ps(_mm512_setzero_ps(), sums[v]);  // as what is added to a zero
      out.past ? _mm512_stream_ps(to + 16 * v, sum) : _mm512_storeu_ps(to + 16 * v, sum);
    }
  }
}

/// The floats of 16 bf16.
RT_AMX RT_INLINE __m512 widened(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/// The first `count` (may be <= 0 or beyond 16) of 16 elements; zero behind.
template <typename T>
RT_AMX RT_INLINE __m512 load_floats(const char* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) return _mm512_castsi512_ps(load_part(from, count * 4));
  return _mm512_cvtph_ps(_mm512_castsi512_si256(load_part(from, std::min<int64_t>(count, 16) * 2)));
}

/// Bf16 for each of 32 floats, whose sum is the float as long as it has no more digits than they and none of them is
/// below 2^-126, where AMX takes zero for them.
template <int64_t kPieces>
RT_AMX RT_INLINE void split(__m512 low, __m512 high, __m512i (&pieces)[kPieces]) {
#pragma GCC unroll 3
  for (int64_t p = 0; p < kPieces; ++p) {
    pieces[p] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    if (p == kPieces - 1) break;
    low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(pieces[p])));
    high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(pieces[p], 1)));
  }
}

/// What pack_amx() packs, but for its options.
struct Block {
  const char* from = nullptr;
  int64_t row_bytes = 0, lines = 0, depth = 0, steps = 0, panel_steps = 0;
  uint32_t* out = nullptr;
};

/// Two register tiles side by side: lines [line, line + 32), steps [s, s + 16).
template <GemmSide kSide, bool kAlong>
RT_AVX512 RT_INLINE void pack_two(const Block& block, int64_t line, int64_t s) {
  constexpr int64_t kWidth = kSide == GemmSide::kA ? kAmxRows : kAmxColumns;
  __m512i low[16], high[16];
#pragma GCC unroll 16
  for (int64_t i = 0; i < 16; ++i) {
    if constexpr (kAlong) {
      const char* const row = block.from + (line + i) * block.row_bytes + s * 4;
      const int64_t bytes = block.depth * 2 - s * 4;
      low[i] = load_part(row, line + i < block.lines ? bytes : 0);
      high[i] = load_part(row + 16 * block.row_bytes, line + 16 + i < block.lines ? bytes : 0);
    } else {
      const int64_t d = 2 * (s + i);
      // What the same lines have in the next steps: a task's lines are few, so no prefetcher sees a stream of them.
      const char* const ahead = block.from + (d + 2 * kAmxSteps) * block.row_bytes + line * 2;
      _mm_prefetch(ahead, _MM_HINT_T0);
      _mm_prefetch(ahead + block.row_bytes, _MM_HINT_T0);
      if (d < block.depth) {
        step_words<true>(block.from + d * block.row_bytes, block.row_bytes, d + 1 < block.depth, line, block.lines,
                         &low[i], &high[i]);
      } else {
        low[i] = high[i] = _mm512_setzero_si512();
      }
    }
  }
  if constexpr (kAlong == (kSide == GemmSide::kB)) {
    transpose(low);
    transpose(high);
  }
  uint32_t* const to = block.out + line / kWidth * kWidth * block.panel_steps + s * kWidth + line % kWidth * 16;
#pragma GCC unroll 16
  for (int64_t i = 0; i < 16; ++i) {
    _mm512_storeu_si512(to + 16 * i, low[i]);
    _mm512_storeu_si512(to + 256 + 16 * i, high[i]);
  }
}

/// The same of float or f16, all pieces: 16 steps of each from s on.
template <typename T, GemmSide kSide, bool kAlong>
RT_AMX RT_INLINE void pack_two_in_pieces(const Block& block, int64_t line, int64_t s) {
  constexpr int64_t kWidth = kSide == GemmSide::kA ? kAmxRows : kAmxColumns, kPieces = amx_pieces(DTypeOf<T>::value);
  constexpr int64_t kBytes = sizeof(T);
  const int64_t d0 = s / kPieces * 2;
  __m512i tiles[kPieces][2][16];
  for (int64_t i = 0; i < 16; ++i) {
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; ++half) {
      __m512 low, high;
      if constexpr (kAlong) {
        const int64_t l = line + 16 * half + i, count = l < block.lines ? block.depth - d0 : 0;
        const char* const row = block.from + l * block.row_bytes + d0 * kBytes;
        low = load_floats<T>(row, count);
        high = load_floats<T>(row + 16 * kBytes, count - 16);
      } else {
        const int64_t d = d0 + 2 * i, first = line + 16 * half, count = block.lines - first;
        const char* const row = block.from + d * block.row_bytes + first * kBytes;
        const char* const ahead = row + 2 * kAmxSteps * block.row_bytes;
        _mm_prefetch(ahead, _MM_HINT_T0);
        _mm_prefetch(ahead + block.row_bytes, _MM_HINT_T0);
        low = load_floats<T>(row, d < block.depth ? count : 0);
        high = load_floats<T>(row + block.row_bytes, d + 1 < block.depth ? count : 0);
      }
      __m512i pieces[kPieces];
      split(low, high, pieces);
      const __m512i paired = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                              6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
#pragma GCC unroll 3
      for (int64_t p = 0; p < kPieces; ++p) {
        tiles[p][half][i] = kAlong ? pieces[p] : _mm512_permutexvar_epi16(paired, pieces[p]);
      }
    }
  }
  uint32_t* const to = block.out + line / kWidth * kWidth * block.panel_steps + s * kWidth + line % kWidth * 16;
  for (int64_t p = 0; p < kPieces; ++p) {
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; ++half) {
      __m512i(&tile)[16] = tiles[p][half];
      if constexpr (kAlong == (kSide == GemmSide::kB)) transpose(tile);
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) {
        _mm512_storeu_si512(to + p * kAmxSteps * kWidth + half * 256 + 16 * i, tile[i]);
      }
    }
  }
}

template <typename T, GemmSide kSide, bool kAlong>
RT_AMX void pack(const Block& block) {
  constexpr int64_t kWidth = kSide == GemmSide::kA ? kAmxRows : kAmxColumns;
  constexpr int64_t kSteps = amx_pieces(DTypeOf<T>::value) * kAmxSteps;
  const int64_t lines = (block.lines + kWidth - 1) / kWidth * kWidth;
  const auto both = [&](int64_t line, int64_t s) RT_AMX {
    if constexpr (std::is_same_v<T, bf16>) return pack_two<kSide, kAlong>(block, line, s);
    pack_two_in_pieces<T, kSide, kAlong>(block, line, s);
  };
  if constexpr (kAlong) {
    for (int64_t line = 0; line < lines; line += 32) {
      for (int64_t s = 0; s < block.steps; s += kSteps) both(line, s);
    }
  } else {
    for (int64_t s = 0; s < block.steps; s += kSteps) {
      for (int64_t line = 0; line < lines; line += 32) both(line, s);
    }
  }
}

template <typename T>
void pack_any(GemmSide side, bool along, const Block& block) {
  if (side == GemmSide::kA) return along ? pack<T, GemmSide::kA, true>(block) : pack<T, GemmSide::kA, false>(block);
  return along ? pack<T, GemmSide::kB, true>(block) : pack<T, GemmSide::kB, false>(block);
}

/// Registers 0 to 3 from the tile, or zero; and to it.
RT_AMX RT_INLINE void begin_sums(bool add, const float* tile, int64_t tile_row) {
  const int64_t row_bytes = tile_row * 4;
  const float* const low = tile + 16 * tile_row;
  if (add) {
    _tile_loadd(0, tile, row_bytes);
    _tile_loadd(1, tile + 16, row_bytes);
    _tile_loadd(2, low, row_bytes);
    _tile_loadd(3, low + 16, row_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}
RT_AMX RT_INLINE void store_sums(float* tile, int64_t tile_row) {
  const int64_t row_bytes = tile_row * 4;
  float* const low = tile + 16 * tile_row;
  _tile_stored(0, tile, row_bytes);
  _tile_stored(1, tile + 16, row_bytes);
  _tile_stored(2, low, row_bytes);
  _tile_stored(3, low + 16, row_bytes);
}

/// A piece of 32 rows of A into registers 4 and 5, of 32 columns of B into 6 and 7; all four products of them.
RT_AMX RT_INLINE void load_a(const uint32_t* piece) {
  _tile_stream_loadd(4, piece, kLine);
  _tile_stream_loadd(5, piece + kTileWords, kLine);
}
RT_AMX RT_INLINE void load_b(const uint32_t* piece) {
  _tile_loadd(6, piece, kLine);
  _tile_loadd(7, piece + kTileWords, kLine);
}
RT_AMX RT_INLINE void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

struct PieceProduct {
  int64_t a, b;  // pieces
};

template <int64_t kPieces, size_t kProducts>
RT_AMX RT_INLINE void tile_in_pieces(const PieceProduct (&products)[kProducts], const void* a_words, const uint32_t* b,
                                     int64_t steps, bool add, float* tile, int64_t tile_row, const GemmBeside& beside) {
  constexpr int64_t kPiece = 2 * kTileWords;
  const auto* a = static_cast<const uint32_t*>(a_words);
  const char* fetch = beside.fetch;
  begin_sums(add, tile, tile_row);
  for (int64_t s = 0; s < steps; s += kPieces * kAmxSteps, a += kPieces * kPiece, b += kPieces * kPiece) {
#pragma GCC unroll 6
    for (size_t p = 0; p < kProducts; ++p) {
      if (p == 0 || products[p].a != products[p - 1].a) load_a(a + products[p].a * kPiece);
      if (p == 0 || products[p].b != products[p - 1].b) load_b(b + products[p].b * kPiece);
      add_products();
      if (p % 2 != 0) continue;  // with every piece's steps, once
      for (int64_t l = 0; l < beside.fetch_lines; ++l) _mm_prefetch(fetch + l * kLine, _MM_HINT_T1);
      fetch += beside.fetch_lines * kLine;
      if (beside.out_rows > 0) write_rows(*beside.out, beside.out_rows);
    }
  }
  store_sums(tile, tile_row);
}

}  // namespace

bool amx_runs() {
  static const bool kRuns = has_amx();
  return kRuns;
}

AmxTiles::AmxTiles(bool wanted) : wanted_(wanted) {
  if (wanted_) configure();
}

AmxTiles::~AmxTiles() {
  if (wanted_) release();
}

// Registers 0 to 3 hold sums, 4 and 5 tiles of A, 6 and 7 of B. A comes by, B stays in the first-level cache: loads of
// A that say so leave it there (1,290 instead of 1,230 GFLOP/s a core with B in turns).
RT_AMX void amx_tile(const void* a_words, int64_t a_row_bytes, const uint32_t* b, int64_t steps, bool add, float* tile,
                     int64_t tile_row, const GemmBeside& beside) {
  constexpr int64_t kTileBytes = 1024;
  const bool packed = a_row_bytes == 0;
  const int64_t a_row = packed ? kLine : a_row_bytes, a_low = 16 * a_row, a_next = packed ? 2 * kTileBytes : kLine;
  const auto* a = static_cast<const char*>(a_words);
  const char* fetch = beside.fetch;
  begin_sums(add, tile, tile_row);
  for (int64_t s = 0; s < steps; s += kAmxSteps) {
    _tile_stream_loadd(4, a, a_row);
    _tile_loadd(6, b, kLine);
    for (int64_t l = 0; l < beside.fetch_lines; ++l) _mm_prefetch(fetch + l * kLine, _MM_HINT_T1);
    fetch += beside.fetch_lines * kLine;
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileWords, kLine);
    _tile_dpbf16ps(1, 4, 7);
    if (beside.out_rows > 0) write_rows(*beside.out, beside.out_rows);
    _tile_stream_loadd(5, a + a_low, a_row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    a += a_next;
    b += kAmxColumns * kAmxSteps;
  }
  store_sums(tile, tile_row);
}

RT_AMX void amx_tile_f32(const void* a, int64_t /*a_row_bytes*/, const uint32_t* b, int64_t steps, bool add,
                         float* tile, int64_t tile_row, const GemmBeside& beside) {
  // Of the pieces of A and B that registers hold, one changes from product to product: 14 loads for 24 products.
  static constexpr PieceProduct kSum[] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};
  tile_in_pieces<3>(kSum, a, b, steps, add, tile, tile_row, beside);
}

RT_AMX void amx_tile_f16(const void* a, int64_t /*a_row_bytes*/, const uint32_t* b, int64_t steps, bool add,
                         float* tile, int64_t tile_row, const GemmBeside& beside) {
  static constexpr PieceProduct kSum[] = {{1, 1}, {1, 0}, {0, 0}, {0, 1}};
  tile_in_pieces<2>(kSum, a, b, steps, add, tile, tile_row, beside);
}

RT_AMX void amx_write(GemmRows& out, int64_t count) { write_rows(out, count); }

void pack_amx(GemmSide side, const GemmOperand& from, int64_t lines, int64_t depth, int64_t steps, int64_t panel_steps,
              uint32_t* out) {
  const Block block{static_cast<const char*>(from.data),
                    from.stride * dtype_size_bytes(from.dtype),
                    lines,
                    depth,
                    steps,
                    panel_steps,
                    out};
  if (from.dtype == DType::kF32) return pack_any<float>(side, from.along, block);
  if (from.dtype == DType::kBf16) return pack_any<bf16>(side, from.along, block);
  pack_any<f16>(side, from.along, block);
}

}  // namespace cairn::kernels

#else

namespace cairn::kernels {

bool amx_runs() { return false; }
AmxTiles::AmxTiles(bool wanted) : wanted_(wanted) {}
AmxTiles::~AmxTiles() = default;
void amx_tile(const void*, int64_t, const uint32_t*, int64_t, bool, float*, int64_t, const GemmBeside&) {
  RT_CHECK(false, "no AMX here");
}
void amx_tile_f32(const void*, int64_t, const uint32_t*, int64_t, bool, float*, int64_t, const GemmBeside&) {
  RT_CHECK(false, "no AMX here");
}
void amx_tile_f16(const void*, int64_t, const uint32_t*, int64_t, bool, float*, int64_t, const GemmBeside&) {
  RT_CHECK(false, "no AMX here");
}
void amx_write(GemmRows&, int64_t) { RT_CHECK(false, "no AMX here"); }
void pack_amx(GemmSide, const GemmOperand&, int64_t, int64_t, int64_t, int64_t, uint32_t*) {
  RT_CHECK(false, "no AMX here");
}

}  // namespace cairn::kernels
#endif
