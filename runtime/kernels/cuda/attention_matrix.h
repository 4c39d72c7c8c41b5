#pragma once
// Attention by matrix units: what its kernels share. For .cu files; T is bf16 or f16.
//
// A block has a tile of rows, queries or keys, and visits tiles of columns. A warp has kFragments * 16 of the rows. It
// keeps scores and sums as fragments (matrix_units.h), and rounds scores to T where they are multiplied again: those of
// a product are the left matrix of the next. A tile in shared memory is [rows, kD], zero beyond what there is.

#include "runtime/kernels/cuda/attention_args.h"
#include "runtime/kernels/cuda/matrix_units.h"

namespace cairn::kernels::cuda {

constexpr int64_t kWidestMatrixHead = 128;
constexpr int kSquare = 16;  // rows of a left matrix, and what two are multiplied over
constexpr int kChunk = 8;    // channels of 16 bytes
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// Whether the matrix units take it. What they do not take goes to the cores that add floats.
template <typename T>
bool by_matrix_units(const AttentionArgs<T>& of) {
  return sizeof(T) == 2 && of.in_wide_packs && of.head_dim <= kWidestMatrixHead && !of.rounded_alibi;
}
/// Scores are products times a scale above 0, no more.
template <typename T>
bool is_plain(const AttentionArgs<T>& of) {
  return of.scale > 0 && of.cap <= 0 && of.slopes == nullptr && of.rate.threshold == 0;
}

/// Which tile a block has. Heads are taken some at a time, so that their keys and values stay in the cache that the
/// blocks share; of these the first tiles come first, of all heads.
struct TileOrder {
  unsigned tiles = 0, heads = 0, pairs = 0, at_once = 0;  // pairs: heads of all samples

  TileOrder(unsigned tiles, int64_t heads, int64_t samples)
      : tiles(tiles), heads(static_cast<unsigned>(heads)), pairs(static_cast<unsigned>(heads * samples)) {
    constexpr unsigned kAbout = 64;
    const unsigned groups = pairs < 2 * kAbout ? 1 : pairs / kAbout;
    at_once = (pairs + groups - 1) / groups;
  }
  unsigned blocks() const { return tiles * pairs; }

  struct Place {
    int head, sample, tile;
  };
  __device__ Place place(unsigned block) const {
    const unsigned group = block / (tiles * at_once), left = pairs - group * at_once;
    const unsigned in_group = left < at_once ? left : at_once, rest = block - group * tiles * at_once;
    const unsigned pair = group * at_once + rest % in_group;
    return {static_cast<int>(pair % heads), static_cast<int>(pair / heads), static_cast<int>(rest / in_group)};
  }
};

/// Of a thread: its lane, and where in a tile the lane says matrices begin.
template <int kD>
struct Lane {
  int g, t;               // of fragments
  int square, two_right;  // bytes: of a matrix of 16 rows and channels; of two right ones of 8 rows and 16 channels
  int lane;

  __device__ Lane() : lane(static_cast<int>(threadIdx.x) % kWarp) {
    g = lane / 4;
    t = lane % 4;
    square = place(lane % 16, lane / 16);
    two_right = place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  /// Bytes from a tile's begin to this chunk of a row. The eight rows of a matrix lie in different banks.
  static __device__ __forceinline__ int place(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
  }
  static constexpr int kRowBytes = kD * 2;
};

/// From chunk 0 or 1 of a row to the i-th two: all tiles begin at multiples of 256 bytes. Each address is made where it
/// is used, as it would fill registers.
__device__ __forceinline__ SharedAt further(SharedAt at, int i) {
#ifdef __CUDACC__
  return at ^ static_cast<uint32_t>(i << 5);
#else
  return reinterpret_cast<SharedAt>(reinterpret_cast<uintptr_t>(at) ^ static_cast<uintptr_t>(i << 5));
#endif
}

/// What a thread copies of tiles: the same chunk of every kAtOnce-th row.
template <int kD, int kThreads>
struct Copies {
  static constexpr int kChunks = kD / kChunk, kAtOnce = kThreads / kChunks;
  static_assert(kAtOnce % 8 == 0);  // then the chunk has the same place in all of these rows

  int above;  // rows above its first one; as many as there can be where the chunk is behind head_dim
  int place;  // bytes of the first one from a tile's begin

  __device__ explicit Copies(int head_dim) {
    constexpr int kAll = 1 << 30;
    above = chunk() * kChunk < head_dim ? row() : kAll;
    place = Lane<kD>::place(row(), chunk());
  }
  static __device__ int row() { return static_cast<int>(threadIdx.x) / kChunks; }
  static __device__ int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }
  /// Elements from a tile's first one to the thread's first one.
  static __device__ int64_t first(int64_t stride) { return row() * stride + chunk() * kChunk; }

  /// Begins to copy rows [0, kRows), zeros beyond `rows` and head_dim, from the thread's first element on.
  template <int kRows, typename T>
  __device__ __forceinline__ void begin(const T* from, int64_t stride, int rows, SharedAt tile) const {
    static_assert(kRows % kAtOnce == 0);
    const int left = rows - above;
#pragma unroll
    for (int r = 0; r < kRows; r += kAtOnce) {
      begin_copy<16>(tile + place + r * Lane<kD>::kRowBytes, from, r < left);
      from += kAtOnce * stride;
    }
  }
};

template <int kFragments, int kColumns>
__device__ __forceinline__ void clear(float (&sums)[kFragments][kColumns][4]) {
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0;
  }
}

/// sums[m][n] = `left` [16 * kFragments, kD] times the transpose of `right` [8 * kColumns, kD]: rows of tiles.
template <typename T, int kD, int kFragments, int kColumns>
__device__ __forceinline__ void multiply_rows(float (&sums)[kFragments][kColumns][4], const Lane<kD>& lane,
                                              SharedAt left, SharedAt right) {
  clear(sums);
  // Few sums go with many others: there what is read ahead would not fit into registers.
  [[maybe_unused]] constexpr int kAhead = kColumns > 4 ? kD / kSquare : 2;
#pragma unroll kAhead
  for (int i = 0; i < kD / kSquare; ++i) {
    uint32_t a[kFragments][4];
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      load_matrices(a[m], further(left + lane.square, i) + m * kSquare * Lane<kD>::kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t b[4];
      load_matrices(b, further(right + lane.two_right, i) + n * 8 * Lane<kD>::kRowBytes);
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        add_product<T>(sums[m][n], a[m], b[0], b[1]);
        add_product<T>(sums[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// sums[m][n] += scores [16 * kFragments, 8 * kColumns], rounded, times `rows` [8 * kColumns, kD].
template <typename T, int kD, int kFragments, int kColumns>
__device__ __forceinline__ void add_scored_rows(float (&sums)[kFragments][kD / 8][4], const Lane<kD>& lane,
                                                const float (&scores)[kFragments][kColumns][4], SharedAt rows) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    uint32_t a[kFragments][4];
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      const float(&low)[4] = scores[m][2 * i], (&high)[4] = scores[m][2 * i + 1];
      a[m][0] = pack_words<T>(low[0], low[1]);
      a[m][1] = pack_words<T>(low[2], low[3]);
      a[m][2] = pack_words<T>(high[0], high[1]);
      a[m][3] = pack_words<T>(high[2], high[3]);
    }
#pragma unroll
    for (int n = 0; n < kD / 8; n += 2) {
      uint32_t b[4];
      load_transposed(b, further(rows + lane.square, n / 2) + i * kSquare * Lane<kD>::kRowBytes);
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        add_product<T>(sums[m][n], a[m], b[0], b[1]);
        add_product<T>(sums[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// to[row of the warp, 0:head_dim] = sums * factors[row], for rows below `rows`. `room`: the warp's rows of a tile that
/// it alone reads, and no longer.
template <int kD, int kFragments, typename T>
__device__ __forceinline__ void store_rows(const float (&sums)[kFragments][kD / 8][4],
                                           const float (&factors)[2 * kFragments], const Lane<kD>& lane, T* room,
                                           int rows, int head_dim, T* to, int64_t stride) {
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factors[2 * m + half];
        Pack<T, 2> two;
        store_f32(&two.at[0], sums[m][n][2 * half] * factor);
        store_f32(&two.at[1], sums[m][n][2 * half + 1] * factor);
        store_pack<2>(room + Lane<kD>::place(m * kSquare + half * 8 + lane.g, n) / 2 + lane.t * 2, two);
      }
    }
  }
  __syncwarp();
  constexpr int kChunks = kD / kChunk;
  const int chunk = lane.lane % kChunks;
  if (chunk * kChunk >= head_dim) return;
#pragma unroll
  for (int r = lane.lane / kChunks; r < kFragments * kSquare; r += kWarp / kChunks) {
    if (r >= rows) break;
    store_pack<kChunk>(to + r * stride + chunk * kChunk, load_pack<kChunk>(room + Lane<kD>::place(r, chunk) / 2));
  }
}
/// The same as float, which fill whole sectors as they are.
template <int kD, int kFragments>
__device__ __forceinline__ void store_rows(const float (&sums)[kFragments][kD / 8][4],
                                           const float (&factors)[2 * kFragments], const Lane<kD>& lane, int rows,
                                           int head_dim, float* to, int64_t stride) {
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = m * kSquare + half * 8 + lane.g;
      if (r >= rows) continue;
      const float factor = factors[2 * m + half];
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        if (n * 8 >= head_dim) break;
        store_pack<2>(to + r * stride + n * 8 + lane.t * 2,
                      Pack<float, 2>{{sums[m][n][2 * half] * factor, sums[m][n][2 * half + 1] * factor}});
      }
    }
  }
}

/// Over the four lanes of a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

/// What some queries side by side see of keys: any of them [any_first, any_end), all of them [all_first, all_end).
struct Seen {
  int any_first = 0, any_end = 0, all_first = 0, all_end = 0;
  __device__ bool none_of(int first, int count) const { return first >= any_end || first + count <= any_first; }
  __device__ bool whole(int first, int count) const { return first >= all_first && first + count <= all_end; }
};
/// Of rows [first, first + count) of the tile; none where there are no such.
template <typename T>
__device__ __forceinline__ Seen seen_by(const AttentionArgs<T>& of, int sample, const QueryTile& tile, int first,
                                        int count) {
  if (first >= tile.rows) return {};
  const int end = first + count < tile.rows ? first + count : tile.rows;
  const auto low = of.visible(sample, tile.position(first)), high = of.visible(sample, tile.position(end - 1));
  return {low.first, high.end, high.first, low.end};
}

/// body.operator()<kD, kPlain>() with what takes these.
template <typename T, typename Body>
void for_shape(const AttentionArgs<T>& of, const Body& body) {
  const bool plain = is_plain(of);
  if (of.head_dim <= 64) return plain ? body.template operator()<64, true>() : body.template operator()<64, false>();
  plain ? body.template operator()<128, true>() : body.template operator()<128, false>();
}

/// Launches by matrix units. The numbers of blocks are those of whole tiles, whatever the device.
template <typename T>
void attention_by_matrix_units(Queue& on, const AttentionArgs<T>& args, int64_t batch, const ForwardOut<T>& to);
/// Rows of its tiles of queries, by which it writes maxima.
template <typename T>
int matrix_tile_rows(const AttentionArgs<T>& args);
template <typename T>
void attention_backward_by_matrix_units(Queue& on, const AttentionArgs<T>& args, int64_t batch,
                                        const BackwardOut<T>& to);

}  // namespace cairn::kernels::cuda
