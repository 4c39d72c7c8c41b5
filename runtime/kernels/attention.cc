#include "runtime/kernels/attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"
#include "runtime/kernels/attention_pairs.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/scratch.h"
#include "runtime/kernels/simd.h"
#include "runtime/kernels/tile_gemm.h"

// After FlashAttention (Dao et al. 2022): queries and keys are visited in tiles, a running maximum and sum per query
// make the softmax exact, and the backward pass recomputes the probabilities from the saved logsumexp.
//
// Scores, probabilities and sums are float. Products of tiles are in float, from inputs converted once per tile into
// scratch whose rows are padded with zeros to Dp, head_dim rounded up to 16; or, for bf16 where the processor
// multiplies it faster than float, in bf16 with float sums, for which probabilities and gradients of scores are rounded
// to bf16. One thread works on one (sample, head) in the forward pass and on one (sample, key/value head) in the
// backward pass, so no two threads add to one element and the bits do not depend on their number.

namespace cairn::kernels {

std::optional<AttentionShape> plain_shape(const AttentionDims& d, DType dtype) {
  const bool all = d.held.count == 0 || (d.held.count == d.tokens && d.held.parts == 1);
  if (d.cap > 0 || d.mask.chunk > 0 || d.mask.ends || d.mask.starts || d.sinks || d.dropout || d.max_scores || !all ||
      d.key_parts > 1 || d.alibi_rounded) {
    return std::nullopt;
  }
  return AttentionShape{.dtype = dtype,
                        .samples = d.batch,
                        .tokens = d.tokens,
                        .heads = d.heads,
                        .kv_heads = d.kv_heads,
                        .head_dim = d.head_dim,
                        .q_stride = d.q_stride,
                        .kv_stride = d.kv_stride,
                        .out_stride = d.out_stride,
                        .causal = d.mask.causal,
                        .window = d.mask.window < d.tokens ? d.mask.window : 0,
                        .alibi = static_cast<bool>(d.alibi_slopes)};
}

namespace {

constexpr int64_t kScoreElems = (kQueries + 2) * kKeys;  // tiles of 6 rows end behind the last query
constexpr float kInf = std::numeric_limits<float>::infinity();

int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

/// How much of a thread's scratch a pass takes, in floats (or words of pairs): `tile` for keys or values.
int64_t forward_tiles(const AttentionDims& dims, int64_t tile, int64_t query) {
  const int64_t key_tiles = (dims.tokens + kKeys - 1) / kKeys;
  return 2 * key_tiles * tile + query + kQueries * padded_dim(dims.head_dim) + 3 * kScoreElems;
}
int64_t backward_tiles(const AttentionDims& dims, int64_t levels, int64_t tile, int64_t line) {
  return 5 * tile + line + levels * 2 * kKeys * padded_dim(dims.head_dim) + 6 * kScoreElems;
}

// --- leaves ----------------------------------------------------------------------------------------------------------

/// to[r, 0:Dp] = from[r, 0:D] * factor, zero beyond D and beyond `rows` up to `tile_rows`.
template <typename T>
RT_INLINE void pack_rows_body(const T* from, int64_t stride, int64_t rows, int64_t tile_rows, int64_t head_dim,
                              int64_t padded, float factor, float* to) {
  for (int64_t r = 0; r < tile_rows; ++r) {
    float* out = to + r * padded;
    const int64_t n = r < rows ? head_dim : 0;
    const T* in = from + r * stride;
    for (int64_t c = 0; c < n; ++c) out[c] = load_f32(in[c]) * factor;
    for (int64_t c = n; c < padded; ++c) out[c] = 0.0f;
  }
}
RT_CLONES(pack_rows)

/// to[d, 0:kKeys] = from[0:rows, d], zero beyond `rows`.
template <typename T>
RT_INLINE void pack_transposed_body(const T* from, int64_t stride, int64_t rows, int64_t head_dim, float* to) {
  constexpr int64_t kBlock = 16;  // a cache line of floats
  for (int64_t d0 = 0; d0 < head_dim; d0 += kBlock) {
    const int64_t dn = std::min(kBlock, head_dim - d0);
    for (int64_t r = 0; r < kKeys; ++r) {
      for (int64_t d = 0; d < dn; ++d) to[(d0 + d) * kKeys + r] = r < rows ? load_f32(from[r * stride + d0 + d]) : 0.0f;
    }
  }
}
RT_CLONES(pack_transposed)

template <typename T>
RT_INLINE void unpack_rows_body(const float* from, int64_t padded, int64_t rows, int64_t head_dim, T* to,
                                int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < head_dim; ++c) store_f32(&to[r * stride + c], from[r * padded + c]);
  }
}
RT_CLONES(unpack_rows)

/// Keys [first, end) that query `t` of a sample sees.
struct VisibleKeys {
  int64_t first, end;
};
RT_INLINE VisibleKeys visible_keys(const AttentionDims& d, int64_t sample, int64_t t) {
  VisibleKeys out{0, d.mask.causal ? t + 1 : d.tokens};
  if (d.mask.ends != nullptr) {
    out.end = std::max(out.end, std::min<int64_t>(d.tokens, address_of(d.mask.ends)[sample * d.tokens + t]));
  }
  if (d.mask.window > 0) out.first = std::max<int64_t>(0, t - d.mask.window + 1);
  int64_t start = 0;
  if (d.mask.starts != nullptr) start = address_of(d.mask.starts)[sample * d.tokens + t];
  if (d.mask.chunk > 0) start += (t - start) / d.mask.chunk * d.mask.chunk;
  out.first = std::max<int64_t>(out.first, start);
  return out;
}

/// Fills `columns` for queries [query0, query0 + rows) and the tile of keys from key0 on; false when none sees any.
bool visible_columns(const AttentionDims& d, int64_t sample, int64_t query0, int64_t rows, int64_t key0,
                     VisibleColumns* columns) {
  bool any = false;
  for (int64_t r = 0; r < rows; ++r) {
    const VisibleKeys keys = visible_keys(d, sample, query0 + r);
    columns->first[r] = std::clamp<int64_t>(keys.first - key0, 0, kKeys);
    columns->end[r] = std::clamp<int64_t>(keys.end - key0, 0, kKeys);
    any |= columns->first[r] < columns->end[r];
  }
  return any;
}

/// scores[r, c] += slope * (distance + c - r): `distance` from the first query to the first key.
RT_INLINE void add_alibi_body(float* scores, int64_t rows, float slope, int64_t distance) {
  for (int64_t r = 0; r < rows; ++r) {
    const auto first = static_cast<float>(distance - r);
    for (int64_t c = 0; c < kKeys; ++c) scores[r * kKeys + c] += slope * (first + static_cast<float>(c));
  }
}
RT_CLONES(add_alibi)

/// scores[r, c] += factor * bf16(slope * bf16(key + c - starts[r])), the slope a bf16; no `starts`: 0.
RT_INLINE void add_rounded_alibi_body(float* scores, int64_t rows, float slope, float factor, int64_t key,
                                      const int32_t* starts) {
  const auto rounded = [](float x) {
    bf16 out;
    store_f32(&out, x);
    return load_f32(out);
  };
  float added[kKeys];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t start = starts != nullptr ? starts[r] : 0;
    if (r == 0 || (starts != nullptr && start != starts[r - 1])) {
      for (int64_t c = 0; c < kKeys; ++c) {
        added[c] = factor * rounded(slope * rounded(static_cast<float>(key + c - start)));
      }
    }
    for (int64_t c = 0; c < kKeys; ++c) scores[r * kKeys + c] += added[c];
  }
}
RT_CLONES(add_rounded_alibi)

/// scores = cap tanh(scale scores / cap); `slopes`, unless null, becomes the derivative by what was capped.
RT_INLINE void cap_scores_body(float* scores, int64_t n, float scale, float cap, float* slopes) {
  const float factor = scale / cap;
  if (slopes == nullptr) {
    for (int64_t i = 0; i < n; ++i) scores[i] = cap * tanh_f32(scores[i] * factor);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float t = tanh_f32(scores[i] * factor);
    scores[i] = cap * t;
    slopes[i] = 1.0f - t * t;
  }
}
RT_CLONES(cap_scores)

/// One tile's step of the online softmax. scores [rows, kKeys] become probabilities relative to the new maximum; max,
/// sum and the rows of out [rows, padded] are rescaled.
RT_INLINE void online_softmax_body(float* scores, int64_t rows, const VisibleColumns& columns, float* max, float* sum,
                                   float* out, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * kKeys;
    if (columns.first[r] >= columns.end[r]) {  // no maximum yet, perhaps: nothing to take a difference with
      for (int64_t c = 0; c < kKeys; ++c) s[c] = 0.0f;
      continue;
    }
    for (int64_t c = 0; c < columns.first[r]; ++c) s[c] = -kInf;
    for (int64_t c = columns.end[r]; c < kKeys; ++c) s[c] = -kInf;
    float tile_max = -kInf;
#pragma omp simd reduction(max : tile_max)
    for (int64_t c = 0; c < kKeys; ++c) tile_max = s[c] > tile_max ? s[c] : tile_max;
    const float new_max = tile_max > max[r] ? tile_max : max[r];
    float tile_sum = 0;
#pragma omp simd reduction(+ : tile_sum)
    for (int64_t c = 0; c < kKeys; ++c) {
      const float p = exp_f32(s[c] - new_max);
      s[c] = p;
      tile_sum += p;
    }
    if (new_max != max[r]) {
      const float shrink = exp_f32(max[r] - new_max);
      sum[r] = sum[r] * shrink;
      for (int64_t c = 0; c < padded; ++c) out[r * padded + c] *= shrink;
      max[r] = new_max;
    }
    sum[r] += tile_sum;
  }
}
RT_CLONES(online_softmax)

RT_INLINE void scale_rows_body(float* x, const float* sum, int64_t rows, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = 1.0f / sum[r];
    for (int64_t c = 0; c < padded; ++c) x[r * padded + c] *= factor;
  }
}
RT_CLONES(scale_rows)

/// p = exp(scores - logsumexp), 0 where the query does not see the key.
RT_INLINE void probabilities_body(float* scores, int64_t rows, const VisibleColumns& columns, const float* logsumexp) {
  for (int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * kKeys;
    const float shift = logsumexp[r];
    for (int64_t c = 0; c < kKeys; ++c) s[c] = exp_f32(s[c] - shift);
    for (int64_t c = 0; c < columns.first[r]; ++c) s[c] = 0.0f;
    for (int64_t c = columns.end[r]; c < kKeys; ++c) s[c] = 0.0f;
  }
}
RT_CLONES(probabilities)

/// Dropout factors of one tile: queries from query0 on, keys from key0 on.
void mask_tile(const AttentionDropout& d, int64_t sample, int64_t head, int64_t tokens, int64_t query0, int64_t rows,
               int64_t key0, float* mask) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = (d.first_head + head) * tokens + query0 + r;
    const uint64_t key = dropout_row_key(address_of(d.sample_keys)[sample], d.site, static_cast<uint64_t>(row));
    dropout_factors(key, key0, kKeys, d.rate, mask + r * kKeys);
  }
}

RT_INLINE void add_floats_body(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}
RT_CLONES(add_floats)

RT_INLINE void multiply_body(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= y[i];
}
RT_CLONES(multiply)

/// dp becomes d(loss)/d(scores before scaling): p * (dp - delta) * scale.
RT_INLINE void score_gradients_body(const float* p, float* dp, int64_t rows, const float* delta, float scale) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < kKeys; ++c) {
      dp[r * kKeys + c] = p[r * kKeys + c] * (dp[r * kKeys + c] - delta[r]) * scale;
    }
  }
}
RT_CLONES(score_gradients)

template <typename T>
RT_INLINE float dot_body(const T* a, const T* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += load_f32(a[i]) * load_f32(b[i]);
  return sum;
}
RT_CLONES(dot)

template <typename T>
RT_INLINE void add_scaled_body(float* sum, float factor, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += factor * load_f32(x[i]);
}
RT_CLONES(add_scaled)

/// Whether tiles of T are multiplied in bf16.
template <typename T>
bool multiplies_pairs() {
  return std::is_same_v<T, bf16> && pairs_run();
}

uint32_t* words(float* x) { return reinterpret_cast<uint32_t*>(x); }
/// For branches that T = bf16 alone takes.
template <typename T>
const bf16* as_bf16(const T* x) {
  return reinterpret_cast<const bf16*>(x);
}

RT_INLINE void scale_floats_body(float* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}
RT_CLONES(scale_floats)

/// Where a tile of scores begins in the sequence, and where the documents of its queries do; no `starts`: at 0.
struct ScorePlace {
  int64_t query, key;
  const int32_t* starts = nullptr;
};
ScorePlace score_place(const AttentionDims& d, int64_t sample, int64_t query, int64_t key) {
  const bool whole = d.mask.starts == nullptr;
  return {query, key, whole ? nullptr : address_of(d.mask.starts) + sample * d.tokens + query};
}

/// Caps scores and adds what is added to them. `scale`: what they are still to be multiplied with; returns what is left
/// of it. `slopes`: as cap_scores() has it; where nothing is capped it stays as it is.
float finish_scores(const AttentionDims& d, float scale, float* scores, int64_t rows, int64_t head,
                    const ScorePlace& at, float* slopes) {
  if (d.cap > 0) {
    cap_scores(scores, rows * kKeys, scale, d.cap, slopes);
  } else if (d.alibi_slopes == nullptr) {
    return scale;
  } else if (scale != 1.0f) {
    scale_floats(scores, scale, rows * kKeys);
  }
  if (d.alibi_slopes == nullptr) return 1.0f;
  const float slope = address_of(d.alibi_slopes)[head];
  if (d.alibi_rounded) {
    add_rounded_alibi(scores, rows, to_f32(to_bf16(slope)), d.scale, at.key, at.starts);
  } else {
    add_alibi(scores, rows, slope, at.key - at.query);
  }
  return 1.0f;
}

/// The end of the keys that any of the queries sees.
int64_t last_key(const AttentionDims& d, int64_t sample, int64_t query0, int64_t rows) {
  return visible_keys(d, sample, query0 + rows - 1).end;  // ends never fall from one query to the next
}

void check_dims(const AttentionDims& d) {
  RT_CHECK(d.batch >= 0 && d.tokens >= 0 && d.heads > 0 && d.kv_heads > 0 && d.head_dim > 0,
           "attention: batch {}, tokens {}, heads {}, kv_heads {}, head_dim {}", d.batch, d.tokens, d.heads, d.kv_heads,
           d.head_dim);
  RT_CHECK(d.mask.causal || (d.mask.window == 0 && d.mask.chunk == 0 && d.mask.starts == nullptr),
           "attention: windows, chunks and documents need a causal mask");
  RT_CHECK(!d.sinks || !d.max_scores, "attention: a sink is no score of a query and a key");
  RT_CHECK(d.heads % d.kv_heads == 0, "attention: {} heads over {} key/value heads", d.heads, d.kv_heads);
  RT_CHECK(d.key_parts == 1 || (d.tokens % (2 * d.key_parts * kKeys) == 0 && d.key_parts % d.held.parts == 0),
           "attention: {} tokens in {} parts, of which {} are held", d.tokens, d.key_parts, d.held.parts);
}

void check_strides(const AttentionDims& d) {
  RT_CHECK(d.q_stride >= d.heads * d.head_dim && d.out_stride >= d.heads * d.head_dim &&
               d.kv_stride >= d.kv_heads * d.head_dim,
           "attention: strides q {}, kv {}, out {} are below a row", d.q_stride, d.kv_stride, d.out_stride);
}

/// Queries that one tile takes: tokens that lie side by side.
struct QueryTile {
  int64_t index = 0;     // of the first one among the sample's queries
  int64_t row = 0;       // of all samples' queries
  int64_t position = 0;  // in the sequence
  int64_t rows = 0;
};

/// The queries of a micro-batch: all tokens, or in each part the two runs that are held.
class Queries {
 public:
  explicit Queries(const AttentionDims& d)
      : held_(d.held.count == 0 ? TokenRuns(d.tokens) : d.held), samples_(d.batch), count(held_.count) {
    runs_ = held_.whole() ? 1 : 2;
    run_rows_ = held_.part_tokens() / runs_;
    run_tiles_ = (run_rows_ + kQueries - 1) / kQueries;
  }

  int64_t parts() const { return held_.parts; }
  int64_t part_tiles() const { return runs_ * run_tiles_; }
  QueryTile tile(int64_t sample, int64_t part, int64_t number) const {
    const int64_t in_part = number / run_tiles_ * run_rows_ + number % run_tiles_ * kQueries;
    const int64_t index = part * held_.part_tokens() + in_part;
    return {.index = index,
            .row = first_row(sample, part) + in_part,
            .position = held_.position(index),
            .rows = std::min(kQueries, run_rows_ - number % run_tiles_ * kQueries)};
  }
  /// Of the sample's queries of a part.
  int64_t first_row(int64_t sample, int64_t part) const { return (part * samples_ + sample) * held_.part_tokens(); }
  int64_t part_queries() const { return held_.part_tokens(); }

 private:
  TokenRuns held_;
  int64_t samples_, runs_, run_rows_, run_tiles_;

 public:
  const int64_t count;  // of a sample
};

/// The row of a sample's token that a tile of keys begins with.
int64_t key_row(const AttentionDims& d, int64_t sample, int64_t token) {
  if (d.key_parts == 1) return sample * d.tokens + token;
  const int64_t run = d.tokens / (2 * d.key_parts), chunk = token / run;
  const bool second = chunk >= d.key_parts;
  const int64_t part = second ? 2 * d.key_parts - 1 - chunk : chunk;
  return ((part * d.batch + sample) * 2 + (second ? 1 : 0)) * run + token % run;
}

/// Samples of one head may be on several threads; a maximum is the same in any order.
void raise_to(float& largest, float value) {
  const std::atomic_ref<float> shared(largest);
  float seen = shared.load(std::memory_order_relaxed);
  while (value > seen && !shared.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

/// Work of one (sample, head) in the units of parallel_ranges: a causal pair costs about D multiply-adds, 16 at a time.
int64_t head_work(const AttentionDims& d) { return std::max<int64_t>(1, d.tokens * d.tokens * d.head_dim / 16); }

}  // namespace

template <typename T>
void attention_forward(const AttentionDims& dims, const T* q, const T* k, const T* v, T* out, float* logsumexp) {
  check_dims(dims);
  check_strides(dims);
  const Queries query(dims);
  const int64_t tokens = dims.tokens, head_dim = dims.head_dim, padded = padded_dim(head_dim);
  const int64_t group = dims.heads / dims.kv_heads;
  const bool pairs = multiplies_pairs<T>();
  const int64_t side = std::max(kKeys, head_dim);
  const int64_t tile_elems = pairs ? pair_right_words(side, side) : kKeys * padded;
  const int64_t key_tiles = (tokens + kKeys - 1) / kKeys, packed_elems = key_tiles * tile_elems;
  const int64_t query_elems = pairs ? pair_left_words(kQueries, side) : kQueries * padded;

  parallel_ranges(dims.batch * dims.heads, 1, head_work(dims), [&](int64_t begin, int64_t end) {
    const PairRegisters registers(pairs);
    const Scratch scratch(forward_tiles(dims, tile_elems, query_elems));
    float* const keys_t = scratch.floats();
    float* const values = keys_t + packed_elems;                    // as keys_t [tile][Dp, kKeys]; [tile][kKeys, Dp]
    float* const queries = values + packed_elems;                   // [kQueries, Dp]
    float* const sums = queries + query_elems;                      // [kQueries, Dp]
    float* const scores = sums + kQueries * padded;                 // [kQueries, kKeys]
    float* const mask = scores + kScoreElems;                       // [kQueries, kKeys]
    auto* const low = reinterpret_cast<bf16*>(mask + kScoreElems);  // [kQueries, kKeys] probabilities
    uint32_t* const low_panels = words(mask + kScoreElems) + kQueries * kKeys / 2;
    float max[kQueries], sum[kQueries];
    int64_t packed_head = -1;  // heads of one group are neighbours: their keys and values are packed once
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t sample = unit / dims.heads, head = unit % dims.heads;
      const int64_t kv_head = head / group;
      const T* q_head = q + head * head_dim;
      if (sample * dims.kv_heads + kv_head != packed_head) {
        packed_head = sample * dims.kv_heads + kv_head;
        for (int64_t t = 0; t < key_tiles; ++t) {
          const int64_t rows = std::min(kKeys, tokens - t * kKeys);
          const int64_t offset = key_row(dims, sample, t * kKeys) * dims.kv_stride + kv_head * head_dim;
          if (pairs) {
            pair_right(as_bf16(k + offset), dims.kv_stride, true, rows, head_dim, words(keys_t + t * tile_elems));
            pair_right(as_bf16(v + offset), dims.kv_stride, false, head_dim, rows, words(values + t * tile_elems));
            continue;
          }
          pack_transposed(k + offset, dims.kv_stride, rows, head_dim, keys_t + t * tile_elems);
          pack_rows(v + offset, dims.kv_stride, rows, kKeys, head_dim, padded, 1.0f, values + t * tile_elems);
        }
      }
      for (int64_t at = 0; at < query.parts() * query.part_tiles(); ++at) {
        const auto [index, row, first, rows] = query.tile(sample, at / query.part_tiles(), at % query.part_tiles());
        PairLeft lines;
        if (pairs) {
          lines = pair_left_rows(as_bf16(q_head + row * dims.q_stride), dims.q_stride, rows, head_dim, words(queries));
        } else {
          pack_rows(q_head + row * dims.q_stride, dims.q_stride, rows, rows, head_dim, padded, dims.scale, queries);
        }
        std::fill_n(max, rows, dims.sinks ? address_of(dims.sinks)[head] : -kInf);  // the sink is the first score
        std::fill_n(sum, rows, dims.sinks ? 1.0f : 0.0f);
        std::fill_n(sums, rows * padded, 0.0f);
        const int64_t key_end = last_key(dims, sample, first, rows);
        for (int64_t t = 0; t * kKeys < key_end; ++t) {
          VisibleColumns columns;
          if (!visible_columns(dims, sample, first, rows, t * kKeys, &columns)) continue;
          if (dims.dropout) mask_tile(dims.dropout, sample, head, tokens, first, rows, t * kKeys, mask);
          if (pairs) {
            multiply_pairs(lines, words(keys_t + t * tile_elems), rows, kKeys, head_dim, scores, kKeys, false);
            const float scale = finish_scores(dims, dims.scale, scores, rows, head,
                                              score_place(dims, sample, first, t * kKeys), nullptr);
            pair_softmax(scores, rows, columns, scale, max, sum, sums, padded, dims.dropout ? mask : nullptr, low);
            const int64_t key_rows = std::min(kKeys, tokens - t * kKeys);
            multiply_pairs(pair_left_rows(low, kKeys, rows, key_rows, low_panels), words(values + t * tile_elems), rows,
                           head_dim, key_rows, sums, padded, true);
            continue;
          }
          tile_gemm({.m = rows,
                     .n = kKeys,
                     .k = head_dim,
                     .a = queries,
                     .a_row = padded,
                     .a_col = 1,
                     .b = keys_t + t * tile_elems,
                     .b_row = kKeys,
                     .c = scores,
                     .c_row = kKeys});
          finish_scores(dims, 1.0f, scores, rows, head, score_place(dims, sample, first, t * kKeys), nullptr);
          online_softmax(scores, rows, columns, max, sum, sums, padded);
          if (dims.dropout) multiply(scores, mask, rows * kKeys);  // the sum is of all probabilities
          const int64_t seen = std::min(kKeys, key_end - t * kKeys);
          tile_gemm({.m = rows,
                     .n = padded,
                     .k = seen,
                     .a = scores,
                     .a_row = kKeys,
                     .a_col = 1,
                     .b = values + t * tile_elems,
                     .b_row = padded,
                     .c = sums,
                     .c_row = padded,
                     .accumulate = true});
        }
        scale_rows(sums, sum, rows, padded);
        unpack_rows(sums, padded, rows, head_dim, out + row * dims.out_stride + head * head_dim, dims.out_stride);
        float* lse = logsumexp + unit * query.count + index;
        for (int64_t r = 0; r < rows; ++r) lse[r] = max[r] + std::log(sum[r]);
        if (dims.max_scores != nullptr) raise_to(address_of(dims.max_scores)[head], *std::max_element(max, max + rows));
      }
    }
  });
}

ScratchElems attention_scratch(const AttentionDims& dims) {
  constexpr int64_t kWidest = 64, kStepUnit = 16;  // of the kernels that multiply pairs
  const int64_t side = std::max(kKeys, dims.head_dim);
  const int64_t of_pairs = (side + kWidest - 1) / kWidest * kWidest * ((side / 2 + kStepUnit) / kStepUnit * kStepUnit);
  const int64_t tile = std::max(kKeys * padded_dim(dims.head_dim), of_pairs);
  const int64_t levels = std::bit_width(static_cast<uint64_t>(Queries(dims).parts()));
  return {.task = std::max(forward_tiles(dims, tile, tile), backward_tiles(dims, levels, tile, tile))};
}

// scratch: [B, N, S] delta = sum over d of dout * out, then [B, N, S, Dp] sums of dq.
int64_t attention_backward_scratch_elems(const AttentionDims& dims) {
  return dims.batch * dims.heads * Queries(dims).count * (1 + padded_dim(dims.head_dim));
}

template <typename T, typename G>
void attention_backward(const AttentionDims& dims, const T* q, const T* k, const T* v, const T* out,
                        const float* logsumexp, const T* dout, T* dq, G* dk, G* dv, float* scratch) {
  check_dims(dims);
  check_strides(dims);
  const Queries query(dims);
  const int64_t tokens = dims.tokens, queries_of_sample = query.count, head_dim = dims.head_dim,
                padded = padded_dim(head_dim);
  const int64_t group = dims.heads / dims.kv_heads;
  const bool pairs = multiplies_pairs<T>();
  float* const deltas = scratch;
  float* const dq_sums = scratch + dims.batch * dims.heads * queries_of_sample;

  parallel_ranges(dims.batch * dims.kv_heads, 1, group * head_work(dims), [&](int64_t begin, int64_t end) {
    const PairRegisters registers(pairs);
    constexpr int64_t kTile = kKeys;
    static_assert(kQueries == kKeys);
    const int64_t side = std::max(kTile, head_dim);
    const int64_t tile_elems = pairs ? pair_right_words(side, side) : kTile * padded;
    const int64_t line_elems = pairs ? pair_left_words(kQueries, head_dim) : 0;
    const int64_t sum_elems = 2 * kTile * padded;  // [2, kKeys, Dp]: of dk and dv
    const int64_t levels = std::bit_width(static_cast<uint64_t>(query.parts()));
    const Scratch own(backward_tiles(dims, levels, tile_elems, line_elems));
    float* const keys = own.floats();                                   // [kKeys, Dp]
    float* const keys_t = keys + tile_elems;                            // [Dp, kKeys]
    float* const values_t = keys_t + tile_elems;                        // [Dp, kKeys]
    float* const queries = values_t + tile_elems;                       // [kQueries, Dp]
    float* const douts = queries + tile_elems;                          // [kQueries, Dp]
    float* const lines = douts + tile_elems;                            // pairs: q or dout as the left operand
    float* const sums = lines + line_elems;                             // of subtrees of the parts, largest first
    float* const p = sums + levels * sum_elems;                         // [kQueries, kKeys]
    float* const dp = p + kScoreElems;                                  // [kQueries, kKeys]
    float* const mask = dp + kScoreElems;                               // [kQueries, kKeys]
    float* const slopes = dims.cap > 0 ? mask + kScoreElems : nullptr;  // [kQueries, kKeys]
    float* const panels = mask + 2 * kScoreElems;                       // pairs: p or dp as the left operand
    auto* const low = reinterpret_cast<bf16*>(panels + kScoreElems);    // pairs: probabilities [kQueries, kKeys]
    bf16* const dlow = low + kQueries * kKeys;                          // pairs: gradients of scores
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t sample = unit / dims.kv_heads, kv_head = unit % dims.kv_heads;
      const int64_t first_head = kv_head * group;
      for (int64_t head = first_head; head < first_head + group; ++head) {
        float* delta = deltas + (sample * dims.heads + head) * queries_of_sample;
        for (int64_t part = 0; part < query.parts(); ++part) {
          for (int64_t t = 0; t < query.part_queries(); ++t) {
            const int64_t at = (query.first_row(sample, part) + t) * dims.out_stride + head * head_dim;
            *delta++ = dot(dout + at, out + at, head_dim);
          }
        }
      }
      std::fill_n(dq_sums + (sample * dims.heads + first_head) * queries_of_sample * padded,
                  group * queries_of_sample * padded, 0.0f);
      for (int64_t key0 = 0; key0 < tokens; key0 += kKeys) {
        const int64_t key_rows = std::min(kKeys, tokens - key0);
        const int64_t kv_at = key_row(dims, sample, key0) * dims.kv_stride + kv_head * head_dim;
        if (pairs) {
          pair_right(as_bf16(k + kv_at), dims.kv_stride, false, head_dim, key_rows, words(keys));
          pair_right(as_bf16(k + kv_at), dims.kv_stride, true, key_rows, head_dim, words(keys_t));
          pair_right(as_bf16(v + kv_at), dims.kv_stride, true, key_rows, head_dim, words(values_t));
        } else {
          pack_rows(k + kv_at, dims.kv_stride, key_rows, kKeys, head_dim, padded, 1.0f, keys);
          pack_transposed(k + kv_at, dims.kv_stride, key_rows, head_dim, keys_t);
          pack_transposed(v + kv_at, dims.kv_stride, key_rows, head_dim, values_t);
        }
        for (int64_t part = 0; part < query.parts(); ++part) {
          float* dkeys = sums + std::popcount(static_cast<uint64_t>(part)) * sum_elems;  // [kKeys, Dp]
          float* const dvalues = dkeys + kTile * padded;                                 // [kKeys, Dp]
          std::fill_n(dkeys, sum_elems, 0.0f);
          for (int64_t head = first_head; head < first_head + group; ++head) {
            const int64_t head_row0 = (sample * dims.heads + head) * queries_of_sample;
            for (int64_t at = 0; at < query.part_tiles(); ++at) {
              const auto [index, row, query0, rows] = query.tile(sample, part, at);
              VisibleColumns columns;
              if (!visible_columns(dims, sample, query0, rows, key0, &columns)) continue;
              const T* const q_at = q + row * dims.q_stride + head * head_dim;
              const T* const dout_at = dout + row * dims.out_stride + head * head_dim;
              const float* const delta = deltas + head_row0 + index;
              if (dims.dropout) mask_tile(dims.dropout, sample, head, tokens, query0, rows, key0, mask);
              if (pairs) {
                pair_right(as_bf16(q_at), dims.q_stride, false, head_dim, rows, words(queries));
                pair_right(as_bf16(dout_at), dims.out_stride, false, head_dim, rows, words(douts));
                multiply_pairs(pair_left_rows(as_bf16(q_at), dims.q_stride, rows, head_dim, words(lines)),
                               words(keys_t), rows, kKeys, head_dim, p, kKeys, false);
                multiply_pairs(pair_left_rows(as_bf16(dout_at), dims.out_stride, rows, head_dim, words(lines)),
                               words(values_t), rows, kKeys, head_dim, dp, kKeys, false);
                const float scale =
                    finish_scores(dims, dims.scale, p, rows, head, score_place(dims, sample, query0, key0), slopes);
                pair_score_gradients(p, dp, rows, columns, scale, logsumexp + head_row0 + index, delta, dims.scale,
                                     dims.dropout ? mask : nullptr, slopes, low, dlow);
                multiply_pairs(pair_left_columns(low, kKeys, key_rows, rows, words(panels)), words(douts), key_rows,
                               head_dim, rows, dvalues, padded, true);
                multiply_pairs(pair_left_columns(dlow, kKeys, key_rows, rows, words(panels)), words(queries), key_rows,
                               head_dim, rows, dkeys, padded, true);
                multiply_pairs(pair_left_rows(dlow, kKeys, rows, key_rows, words(panels)), words(keys), rows, head_dim,
                               key_rows, dq_sums + (head_row0 + index) * padded, padded, true);
                continue;
              }
              pack_rows(q_at, dims.q_stride, rows, rows, head_dim, padded, 1.0f, queries);
              pack_rows(dout_at, dims.out_stride, rows, rows, head_dim, padded, 1.0f, douts);
              tile_gemm({.m = rows,
                         .n = kKeys,
                         .k = head_dim,
                         .a = queries,
                         .a_row = padded,
                         .a_col = 1,
                         .b = keys_t,
                         .b_row = kKeys,
                         .c = p,
                         .c_row = kKeys,
                         .alpha = dims.scale});
              finish_scores(dims, 1.0f, p, rows, head, score_place(dims, sample, query0, key0), slopes);
              probabilities(p, rows, columns, logsumexp + head_row0 + index);
              tile_gemm({.m = rows,
                         .n = kKeys,
                         .k = head_dim,
                         .a = douts,
                         .a_row = padded,
                         .a_col = 1,
                         .b = values_t,
                         .b_row = kKeys,
                         .c = dp,
                         .c_row = kKeys});
              if (dims.dropout) multiply(dp, mask, rows * kKeys);
              score_gradients(p, dp, rows, delta, dims.scale);
              if (slopes != nullptr) multiply(dp, slopes, rows * kKeys);
              if (dims.dropout) multiply(p, mask, rows * kKeys);
              tile_gemm({.m = key_rows,
                         .n = padded,
                         .k = rows,
                         .a = p,
                         .a_row = 1,
                         .a_col = kKeys,
                         .b = douts,
                         .b_row = padded,
                         .c = dvalues,
                         .c_row = padded,
                         .accumulate = true});
              tile_gemm({.m = key_rows,
                         .n = padded,
                         .k = rows,
                         .a = dp,
                         .a_row = 1,
                         .a_col = kKeys,
                         .b = queries,
                         .b_row = padded,
                         .c = dkeys,
                         .c_row = padded,
                         .accumulate = true});
              tile_gemm({.m = rows,
                         .n = padded,
                         .k = key_rows,
                         .a = dp,
                         .a_row = kKeys,
                         .a_col = 1,
                         .b = keys,
                         .b_row = padded,
                         .c = dq_sums + (head_row0 + index) * padded,
                         .c_row = padded,
                         .accumulate = true});
            }
          }
          for (int joins = std::countr_one(static_cast<uint64_t>(part)); joins > 0; --joins, dkeys -= sum_elems) {
            add_floats(dkeys - sum_elems, dkeys, sum_elems);
          }
        }
        unpack_rows(sums, padded, key_rows, head_dim, dk + kv_at, dims.kv_stride);
        unpack_rows(sums + kTile * padded, padded, key_rows, head_dim, dv + kv_at, dims.kv_stride);
      }
      for (int64_t head = first_head; head < first_head + group; ++head) {
        const float* of_part = dq_sums + (sample * dims.heads + head) * queries_of_sample * padded;
        for (int64_t part = 0; part < query.parts(); ++part, of_part += query.part_queries() * padded) {
          unpack_rows(of_part, padded, query.part_queries(), head_dim,
                      dq + query.first_row(sample, part) * dims.q_stride + head * head_dim, dims.q_stride);
        }
      }
    }
  });
}

void sink_gradients(const AttentionDims& dims, const float* logsumexp, const float* dots, float* dsinks) {
  RT_CHECK(dims.sinks, "attention: gradients of sinks, and there are none");
  const int64_t queries = Queries(dims).count;
  for (int64_t head = 0; head < dims.heads; ++head) {
    const float sink = address_of(dims.sinks)[head];
    double sum = 0;
    for (int64_t sample = 0; sample < dims.batch; ++sample) {
      const int64_t at = (sample * dims.heads + head) * queries;
      for (int64_t t = 0; t < queries; ++t) sum -= std::exp(sink - logsumexp[at + t]) * dots[at + t];
    }
    dsinks[head] += static_cast<float>(sum);
  }
}

void alibi_slopes(int64_t heads, int64_t first, int64_t count, float* slopes) {
  RT_CHECK(heads > 0 && first >= 0 && first + count <= heads, "slopes of heads {} to {} of {}", first, first + count,
           heads);
  int64_t whole = 1;
  while (2 * whole <= heads) whole *= 2;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t head = first + i;
    const double power = head < whole ? 8.0 * static_cast<double>(head + 1) / static_cast<double>(whole)
                                      : 4.0 * static_cast<double>(2 * (head - whole) + 1) / static_cast<double>(whole);
    slopes[i] = static_cast<float>(std::exp2(-power));
  }
}

template <typename T>
void attention_decode(const AttentionDims& dims, int64_t past, int64_t capacity, const T* q, const T* k_cache,
                      const T* v_cache, T* out) {
  check_dims(dims);
  RT_CHECK(past >= 0 && past < capacity, "attention_decode: {} past tokens in a cache of {}", past, capacity);
  const int64_t head_dim = dims.head_dim, group = dims.heads / dims.kv_heads;
  const int64_t kv_row = dims.kv_heads * head_dim;
  parallel_ranges(dims.batch * dims.heads, 1, 2 * (past + 1) * head_dim, [&](int64_t begin, int64_t end) {
    const Scratch scratch(head_dim);
    float* const sums = scratch.floats();
    float p[kKeys];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t sample = unit / dims.heads, head = unit % dims.heads;
      const int64_t offset = sample * capacity * kv_row + head / group * head_dim;
      float max = dims.sinks ? address_of(dims.sinks)[head] : -kInf, sum = dims.sinks ? 1.0f : 0.0f;
      std::fill_n(sums, head_dim, 0.0f);
      const int64_t of_window = dims.mask.window > 0 ? past - dims.mask.window + 1 : 0;
      const int64_t of_chunk = dims.mask.chunk > 0 ? past / dims.mask.chunk * dims.mask.chunk : 0;
      const int64_t oldest = std::max<int64_t>({0, of_window, of_chunk});
      for (int64_t first = oldest; first <= past; first += kKeys) {
        const int64_t keys = std::min(kKeys, past + 1 - first);
        for (int64_t j = 0; j < kKeys; ++j) {
          p[j] = j < keys ? dims.scale * dot(q + unit * head_dim, k_cache + offset + (first + j) * kv_row, head_dim)
                          : 0.0f;
        }
        finish_scores(dims, 1.0f, p, 1, head, {past, first}, nullptr);
        const VisibleColumns columns{{0}, {keys}};
        online_softmax(p, 1, columns, &max, &sum, sums, head_dim);
        for (int64_t j = 0; j < keys; ++j) {
          add_scaled(sums, p[j], v_cache + offset + (first + j) * kv_row, head_dim);
        }
      }
      scale_rows(sums, &sum, 1, head_dim);
      unpack_rows(sums, head_dim, 1, head_dim, out + unit * head_dim, head_dim);
    }
  });
}

#define RT_INSTANTIATE(T)                                                                                            \
  template void attention_forward<T>(const AttentionDims&, const T*, const T*, const T*, T*, float*);                \
  template void attention_backward<T, T>(const AttentionDims&, const T*, const T*, const T*, const T*, const float*, \
                                         const T*, T*, T*, T*, float*);                                              \
  template void attention_decode<T>(const AttentionDims&, int64_t, int64_t, const T*, const T*, const T*, T*)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE
template void attention_backward<bf16, float>(const AttentionDims&, const bf16*, const bf16*, const bf16*, const bf16*,
                                              const float*, const bf16*, bf16*, float*, float*, float*);
template void attention_backward<f16, float>(const AttentionDims&, const f16*, const f16*, const f16*, const f16*,
                                             const float*, const f16*, f16*, float*, float*, float*);

}  // namespace cairn::kernels
