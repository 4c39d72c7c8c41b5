#pragma once
// What attention's kernels are given, and which keys a query sees. For .cu files.

#include <algorithm>

#include "runtime/kernels/attention.h"
#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {

constexpr int kPack = 4;  // channels at once, where the cores that add floats multiply

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
  static constexpr int kLeastBlocks = 0;  // of attention_tiles() on a multiprocessor; 0: as ptxas likes
  const T *q, *k, *v;
  int64_t q_stride, kv_stride, out_stride;
  int64_t key_rows;                           // from a sample's keys to the next one's
  int tokens, heads, group, head_dim, depth;  // heads of a key/value head; channels up to whole packs
  int queries, first, second;                 // of a sample; where their two runs begin
  bool in_packs;                              // all rows of heads begin at a pack, and are whole packs
  bool in_wide_packs;                         // the same of 16 bytes
  bool causal;
  int window, chunk;  // 0: none
  const int32_t *ends, *starts;
  float scale, cap;
  const float *slopes, *sinks;  // of heads; null: none
  bool rounded_alibi;           // for RoundedAlibi, not for these
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
    int start = starts != nullptr ? starts[at] : 0;
    if (chunk > 0) start += (position - start) / chunk * chunk;
    if (start > out.first) out.first = start;
    return out;
  }
  /// Those that any query of the tile sees: both ends ascend with the position.
  __device__ Keys visible(int sample, const QueryTile& tile) const {
    return {visible(sample, tile.position(0)).first, visible(sample, tile.position(tile.rows - 1)).end};
  }

  struct Score {
    float value, slope;  // as the softmax sees it; its derivative by the product with `scale`
  };
  __device__ __forceinline__ Score capped(float product) const {
    Score out{product * scale, 1.0f};
    if (cap > 0) {
      const float t = tanhf(out.value / cap);
      out = {cap * t, 1.0f - t * t};
    }
    return out;
  }
  __device__ __forceinline__ Score score(float product, float head_slope, int /*sample*/, int key, int position) const {
    Score out = capped(product);
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

/// With AttentionDims::alibi_rounded. Kernels of its own: rounding would cost the others registers.
template <typename T>
struct RoundedAlibi : AttentionArgs<T> {
  static constexpr int kLeastBlocks = 1;  // else ptxas spills for heads of 256
  static __device__ __forceinline__ float rounded(float x) {
    bf16 out;
    store_f32(&out, x);
    return load_f32(out);
  }
  __device__ __forceinline__ auto score(float product, float head_slope, int sample, int key, int position) const {
    auto out = this->capped(product);
    const int start =
        this->starts == nullptr ? 0 : this->starts[static_cast<int64_t>(sample) * this->tokens + position];
    out.value += this->scale * rounded(rounded(head_slope) * rounded(static_cast<float>(key - start)));
    return out;
  }
};
/// body(args), as what its kernels take.
template <typename T, typename Body>
void for_alibi(const AttentionArgs<T>& args, const Body& body) {
  args.rounded_alibi ? body(RoundedAlibi<T>{args}) : body(args);
}

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
  constexpr int kWidest = 8;  // of 16-bit elements
  out.in_wide_packs =
      (d.head_dim | d.q_stride | d.kv_stride | d.out_stride) % kWidest == 0 && aligned_to(16, q, k, v, pointers...);
  out.causal = d.mask.causal;
  out.window = static_cast<int>(std::min(d.mask.window, d.tokens));
  out.chunk = static_cast<int>(std::min(d.mask.chunk, d.tokens));
  out.ends = d.mask.ends.address();
  out.starts = d.mask.starts.address();
  out.scale = d.scale;
  out.cap = d.cap;
  out.slopes = d.alibi_slopes.address();
  out.rounded_alibi = d.alibi_slopes && d.alibi_rounded;
  out.sinks = d.sinks.address();
  out.rate = d.dropout.rate;
  out.sample_keys = d.dropout.sample_keys.address();
  out.site = d.dropout.site;
  out.first_head = d.dropout.first_head;
  return out;
}

template <typename T>
struct ForwardOut {
  T* out;
  float* logsumexp;  // null: not kept
  float* maxima;     // [heads, samples * tiles]; null: not kept
};

template <typename T>
struct BackwardOut {
  const T *out, *dout;
  const float* logsumexp;
  float* deltas;  // [samples, heads, queries]: the sums over channels of dout * out
  T* dq;
  T *dk, *dv;                // null: not those
  float *dk_sums, *dv_sums;  // null: not those
};

}  // namespace cairn::kernels::cuda
