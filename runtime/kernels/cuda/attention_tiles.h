#pragma once
// Tiles of queries and keys that attention's kernels work on. For .cu files.
//
// A block has 16 x 16 threads. In a product of tiles, thread (x, y) has rows y * kRows + i of the result; of scores,
// columns x + 16 * j; of sums over keys or queries, channels 4 * x + 64 * j + k. So the 16 lanes of a row share its
// maximum and sum, and what they leave in shared memory of a row is read by themselves alone.

#include <algorithm>

#include "runtime/kernels/attention.h"
#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {

constexpr int kSide = 16;  // of a block
constexpr int kPack = 4;   // channels at once
/// Floats from row to row of a tile of this many columns: neighbouring rows begin at other banks.
constexpr int stride_of(int columns) { return columns + kPack; }

/// A tile of scores: kRows * 16 rows, kColumns * 16 columns; of heads of at most kD channels.
template <int kOfD, int kOfRows, int kOfColumns>
struct TileShape {
  static constexpr int kD = kOfD, kRows = kOfRows, kColumns = kOfColumns;
  static constexpr int kTileRows = kRows * kSide, kTileColumns = kColumns * kSide;
  static constexpr int kStride = stride_of(kD), kScoreStride = stride_of(kTileColumns);
  static constexpr int kSums = kD / kSide;  // channels that a thread has of each row
  /// Floats of shared memory: so many tiles of rows, one of columns, one of scores.
  static constexpr int64_t floats(int row_tiles) {
    return (row_tiles * kTileRows + kTileColumns) * kStride + kTileRows * kScoreStride;
  }
};

/// Queries of one tile: rows side by side. Positions are `first` + c, and from `break_at` on `second` + c.
struct QueryTile {
  int rows;
  int index;    // of the first one among the sample's queries
  int64_t row;  // of all samples' queries
  int first, second, break_at;
  __device__ int position(int c) const { return (c < break_at ? first : second) + c; }
};

/// AttentionDims and what the kernels read.
template <typename T>
struct AttentionArgs {
  const T *q, *k, *v;
  int64_t q_stride, kv_stride, out_stride;
  int64_t key_rows;                           // from a sample's keys to the next one's
  int tokens, heads, group, head_dim, depth;  // heads of a key/value head; channels up to whole packs
  int queries, first, second;                 // of a sample; where their two runs begin
  bool in_packs;                              // all rows of heads begin at a pack, and are whole packs
  bool causal;
  int window;
  const int32_t *ends, *starts;
  float scale, cap;
  const float* slopes;
  DropoutRate rate;
  const uint64_t* sample_keys;
  uint64_t site;
  int64_t first_head;

  __device__ QueryTile tile(int sample, int number, int tile_rows) const {
    const int at = number * tile_rows, left = queries - at, half = queries / 2;
    const bool whole = queries == tokens;
    return {left < tile_rows ? left : tile_rows,
            at,
            static_cast<int64_t>(sample) * queries + at,
            first + at,
            second - half + at,
            whole ? tile_rows : half - at};
  }

  struct Keys {
    int first, end;
  };
  /// Those that the query at `position` sees.
  __device__ Keys visible(int sample, int position) const {
    Keys out{0, causal ? position + 1 : tokens};
    const int64_t at = static_cast<int64_t>(sample) * tokens + position;
    if (ends != nullptr) {
      const int end = ends[at] < tokens ? ends[at] : tokens;
      if (end > out.end) out.end = end;
    }
    if (window > 0 && position - window + 1 > 0) out.first = position - window + 1;
    if (starts != nullptr && starts[at] > out.first) out.first = starts[at];
    return out;
  }
  /// Those that any query of the tile sees: both ends ascend with the position.
  __device__ Keys visible(int sample, const QueryTile& tile) const {
    return {visible(sample, tile.position(0)).first, visible(sample, tile.position(tile.rows - 1)).end};
  }

  struct Score {
    float value, slope;  // as the softmax sees it; its derivative by the product with `scale`
  };
  __device__ __forceinline__ Score score(float product, float head_slope, int key, int position) const {
    Score out{product * scale, 1.0f};
    if (cap > 0) {
      const float t = tanhf(out.value / cap);
      out = {cap * t, 1.0f - t * t};
    }
    if (slopes != nullptr) out.value += head_slope * static_cast<float>(key - position);
    return out;
  }

  __device__ __forceinline__ bool drops() const { return rate.threshold != 0; }
  __device__ __forceinline__ uint64_t dropout_key(int sample, int head, int position) const {
    return dropout_row_key(sample_keys[sample], site, static_cast<uint64_t>((first_head + head) * tokens + position));
  }
  __device__ __forceinline__ float kept(uint64_t row_key, int key) const {
    const uint32_t hash =
        dropout_hash(static_cast<uint32_t>(row_key), static_cast<uint32_t>(row_key >> 32), static_cast<uint32_t>(key));
    return hash < rate.threshold ? 0.0f : rate.keep_scale;
  }
};

/// `pointers`: of heads' rows beside q, k and v.
template <typename T, typename... P>
AttentionArgs<T> attention_args(const AttentionDims& d, const T* q, const T* k, const T* v, const P*... pointers) {
  AttentionArgs<T> out{};
  const TokenRuns held = d.held.count == 0 ? TokenRuns(d.tokens) : d.held;
  out.q = q;
  out.k = k;
  out.v = v;
  out.q_stride = d.q_stride;
  out.kv_stride = d.kv_stride;
  out.out_stride = d.out_stride;
  out.key_rows = d.tokens;
  out.tokens = static_cast<int>(d.tokens);
  out.heads = static_cast<int>(d.heads);
  out.group = static_cast<int>(d.heads / d.kv_heads);
  out.head_dim = static_cast<int>(d.head_dim);
  out.depth = (out.head_dim + kPack - 1) / kPack * kPack;
  out.queries = static_cast<int>(held.count);
  out.first = static_cast<int>(held.first);
  out.second = static_cast<int>(held.second);
  out.in_packs = out.depth == out.head_dim && (d.q_stride | d.kv_stride | d.out_stride) % kPack == 0 &&
                 aligned_to(kPack * static_cast<int64_t>(sizeof(T)), q, k, v) &&
                 (aligned_to(kPack * static_cast<int64_t>(sizeof(P)), pointers) && ...);
  out.causal = d.mask.causal;
  out.window = static_cast<int>(std::min(d.mask.window, d.tokens));
  out.ends = d.mask.ends.address();
  out.starts = d.mask.starts.address();
  out.scale = d.scale;
  out.cap = d.cap;
  out.slopes = d.alibi_slopes.address();
  out.rate = d.dropout.rate;
  out.sample_keys = d.dropout.sample_keys.address();
  out.site = d.dropout.site;
  out.first_head = d.dropout.first_head;
  return out;
}

__device__ __forceinline__ int thread_of_block() { return static_cast<int>(threadIdx.y * kSide + threadIdx.x); }

/// to[r, 0:kD] = from[r, 0:head_dim], zero beyond it and beyond `rows`, by all threads of the block.
template <int kTileRows, int kD, typename T>
__device__ __forceinline__ void load_tile(const T* from, int64_t stride, int rows, int head_dim, bool in_packs,
                                          float* to) {
  constexpr int kPacks = kD / kPack;
#pragma unroll 4
  for (int at = thread_of_block(); at < kTileRows * kPacks; at += kSide * kSide) {
    const int r = at / kPacks, c = at % kPacks * kPack;
    Pack<float, kPack> out;
#pragma unroll
    for (int k = 0; k < kPack; ++k) out.at[k] = 0;
    if (r < rows && c < head_dim) {
      const T* const row = from + r * stride + c;
      if (in_packs) {
        const auto of = load_pack<kPack>(row);
#pragma unroll
        for (int k = 0; k < kPack; ++k) out.at[k] = load_f32(of.at[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          if (c + k < head_dim) out.at[k] = load_f32(row[k]);
        }
      }
    }
    store_pack<kPack>(to + r * stride_of(kD) + c, out);
  }
}

/// out[i][j] = the product of this thread's row i of `rows` and column j, a row of `columns`.
template <typename Of>
__device__ __forceinline__ void multiply(const float* rows, const float* columns, int depth,
                                         float (&out)[Of::kRows][Of::kColumns]) {
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
#pragma unroll
    for (int j = 0; j < Of::kColumns; ++j) out[i][j] = 0;
  }
  const float* const a_at = rows + threadIdx.y * Of::kRows * Of::kStride;
  const float* const b_at = columns + threadIdx.x * Of::kStride;
  for (int d = 0; d < depth; d += kPack) {
    Pack<float, kPack> a[Of::kRows];
#pragma unroll
    for (int i = 0; i < Of::kRows; ++i) a[i] = load_pack<kPack>(a_at + i * Of::kStride + d);
#pragma unroll
    for (int j = 0; j < Of::kColumns; ++j) {
      const auto b = load_pack<kPack>(b_at + j * kSide * Of::kStride + d);
#pragma unroll
      for (int i = 0; i < Of::kRows; ++i) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) out[i][j] += a[i].at[k] * b.at[k];
      }
    }
  }
}

/// sums[i][.] += the sum over columns c of scores[row i, c] * columns[c, .]. The scores of a row are by its own lanes.
template <typename Of>
__device__ __forceinline__ void add_products(const float* scores, const float* columns,
                                             float (&sums)[Of::kRows][Of::kSums]) {
  const float* const a_at = scores + threadIdx.y * Of::kRows * Of::kScoreStride;
  const float* const b_at = columns + threadIdx.x * kPack;
#pragma unroll 1
  for (int c = 0; c < Of::kTileColumns; c += kPack) {
    Pack<float, kPack> a[Of::kRows];
#pragma unroll
    for (int i = 0; i < Of::kRows; ++i) a[i] = load_pack<kPack>(a_at + i * Of::kScoreStride + c);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
#pragma unroll
      for (int j = 0; j < Of::kSums; j += kPack) {
        const auto b = load_pack<kPack>(b_at + (c + e) * Of::kStride + j * kSide);
#pragma unroll
        for (int i = 0; i < Of::kRows; ++i) {
#pragma unroll
          for (int k = 0; k < kPack; ++k) sums[i][j + k] += a[i].at[e] * b.at[k];
        }
      }
    }
  }
}

/// This thread's scores to where add_products() reads them.
template <typename Of>
__device__ __forceinline__ void keep_scores(const float (&scores)[Of::kRows][Of::kColumns], float* to) {
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
#pragma unroll
    for (int j = 0; j < Of::kColumns; ++j) {
      to[(threadIdx.y * Of::kRows + i) * Of::kScoreStride + threadIdx.x + j * kSide] = scores[i][j];
    }
  }
}

/// to[row of the tile, 0:head_dim] = sums * factors[i], for this thread's rows below `rows`.
template <typename Of, typename G>
__device__ __forceinline__ void store_sums(const float (&sums)[Of::kRows][Of::kSums], const float (&factors)[Of::kRows],
                                           int rows, int head_dim, bool in_packs, G* to, int64_t stride) {
#pragma unroll
  for (int i = 0; i < Of::kRows; ++i) {
    const int r = static_cast<int>(threadIdx.y) * Of::kRows + i;
    if (r >= rows) continue;
    G* const row = to + r * stride;
#pragma unroll
    for (int j = 0; j < Of::kSums; j += kPack) {
      const int c = static_cast<int>(threadIdx.x) * kPack + j * kSide;
      if (c >= head_dim) continue;
      Pack<G, kPack> out;
#pragma unroll
      for (int k = 0; k < kPack; ++k) store_f32(&out.at[k], sums[i][j + k] * factors[i]);
      if (in_packs) {
        store_pack<kPack>(row + c, out);
        continue;
      }
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (c + k < head_dim) row[c + k] = out.at[k];
      }
    }
  }
}

/// Over the 16 lanes of a row.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

/// body.operator()<kD>() with the narrowest kD that takes the heads.
template <typename Body>
void for_head_dim(int64_t head_dim, const Body& body) {
  if (head_dim <= 64) return body.template operator()<64>();
  if (head_dim <= 128) return body.template operator()<128>();
  body.template operator()<256>();
}

}  // namespace cairn::kernels::cuda
