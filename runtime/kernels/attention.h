#pragma once
// Softmax attention, tiled with an online softmax: no S x S matrix is ever stored. Grouped-query attention: query head
// h reads key/value head h * kv_heads / heads. Which keys a query sees is an interval for each query, so tiles that no
// query of theirs sees cost nothing.

#include <cstdint>
#include <optional>

#include "runtime/device/attention_shape.h"
#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/dropout.h"
#include "runtime/kernels/scratch.h"

namespace cairn::kernels {

/// Dropout of the probabilities (runtime/kernels/dropout.h): a row is one query of one head of the whole model, its
/// elements are the keys.
struct AttentionDropout {
  DropoutRate rate;
  DevicePtr<const uint64_t> sample_keys;  // [B]
  uint64_t site = 0;
  int64_t first_head = 0;  // of these heads in the model

  explicit operator bool() const { return static_cast<bool>(rate); }
};

/// The keys that the query at position t of its sample sees: [first, end), never empty.
struct AttentionMask {
  bool causal = true;  // end = t + 1; else S
  int64_t window = 0;  // > 0: first >= t - window + 1
  int64_t chunk = 0;   // > 0: first is of t's chunk of so many tokens, counted from where its document begins
  DevicePtr<const int32_t> ends;  // [B, S]: end >= ends[b, t], so prefixes see themselves; never falls within a sample
  DevicePtr<const int32_t> starts;  // [B, S]: first >= starts[b, t] <= t, where the query's document begins
};

/// Legend: B samples, S tokens a sample, N query heads, K key/value heads, D head dim; T = B * S rows. With `held`,
/// queries (q, out, logsumexp and their gradients) are of the tokens held alone, in the order of its rows: there S is
/// held.count. With `key_parts` > 1 keys and values (k, v and their gradients) stand in the order of a sequence's parts
/// (runtime/core/token_runs.h) whose chunks are whole tiles.
/// q, k, v are row-major [T, ...] with a row stride in elements each, so they may lie side by side in one [T, (N+2K)D].
struct AttentionDims {
  int64_t batch = 0, tokens = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t q_stride = 0, kv_stride = 0, out_stride = 0;  // elements from row to row of q; k and v; out and dout
  float scale = 1.0f;                                   // of the scores, 1 / sqrt(D)
  float cap = 0;  // > 0: scaled scores s become cap * tanh(s / cap), before anything is added to them
  AttentionMask mask;
  DevicePtr<const float> alibi_slopes;  // [N] of these heads: slope * (key - query position) is added to a score
  bool alibi_rounded = false;           // added is bf16(bf16(slope) * bf16(key position)) * scale, with positions that
                                        // count from where the query's document begins
  DevicePtr<const float> sinks;         // [N]: one more score of each head, of no key: in the denominator alone
  AttentionDropout dropout;             // attention_decode() has none
  TokenRuns held;                       // queries' tokens of a sequence; none: all
  int64_t key_parts = 1;                // of all tokens, of which held.parts are the queries'
  DevicePtr<float> max_scores;          // [N], forward: raised to the largest score of each head, as softmax sees them;
                                        // not with sinks
};
inline void add_dims(OpDims& to, const AttentionDims& of) {
  to.add(of.batch);
  to.add(of.held.tokens > 0 ? of.held.count : of.tokens);
  to.add(of.tokens);
  to.add(of.heads);
  to.add(of.kv_heads);
  to.add(of.head_dim);
  to.say_if(of.mask.causal, "causal");
  to.say_if(of.mask.window > 0, "window");
  to.say_if(of.mask.chunk > 0, "chunk");
  to.say_if(static_cast<bool>(of.dropout), "dropout");
}

/// Its numbers, where it is nothing beyond what an AttentionShape says.
std::optional<AttentionShape> plain_shape(const AttentionDims& dims, DType dtype);

/// The bits depend on neither the number of threads nor the strides.
/// out [T, N*D]; logsumexp [B, N, S] float, kept for the backward pass. T is float, bf16 or f16; scores and sums are
/// float.
template <typename T>
void attention_forward(const AttentionDims& dims, const T* q, const T* k, const T* v, T* out, float* logsumexp);

/// dq, dk, dv are overwritten (strides as q, k, v). `scratch` holds attention_backward_scratch_elems() floats. A sum of
/// dk or dv is over the queries of each of held.parts by itself, these are added by a balanced tree, and its root is
/// rounded to G: T, or float, so that those of all ranks make the larger tree.
template <typename T, typename G>
void attention_backward(const AttentionDims& dims, const T* q, const T* k, const T* v, const T* out,
                        const float* logsumexp, const T* dout, T* dq, G* dk, G* dv, float* scratch);
/// The same with G = float.
template <typename T>
void attention_backward_sums(const AttentionDims& dims, const T* q, const T* k, const T* v, const T* out,
                             const float* logsumexp, const T* dout, T* dq, float* dk, float* dv, float* scratch) {
  attention_backward<T, float>(dims, q, k, v, out, logsumexp, dout, dq, dk, dv, scratch);
}
int64_t attention_backward_scratch_elems(const AttentionDims& dims);
/// dsinks [N] gets its gradients added: the sum over queries of -p D, p the sink's probability and D = dout . out.
/// `dots` [B, N, S] are the D, with which the scratch of attention_backward() begins when that is done.
void sink_gradients(const AttentionDims& dims, const float* logsumexp, const float* dots, float* dsinks);
/// Of either pass, at most, on any processor and for any T: each thread's tiles.
ScratchElems attention_scratch(const AttentionDims& dims);

/// Slopes of ALiBi for a model of `heads` heads, written from head `first` on, `count` of them (Press et al. 2022):
/// powers of 2^(-8/n) for n a power of two; else those of the power of two below, then every other one of the power
/// above.
void alibi_slopes(int64_t heads, int64_t first, int64_t count, float* slopes);

/// One new token per sample against a cache of `past + 1` keys (the new one included): for generation.
/// q [B, N*D], k_cache and v_cache [B, capacity, K*D], out [B, N*D], all dense: the strides in `dims` are not read. Of
/// the mask only the window and the chunk are.
template <typename T>
void attention_decode(const AttentionDims& dims, int64_t past, int64_t capacity, const T* q, const T* k_cache,
                      const T* v_cache, T* out);

}  // namespace cairn::kernels
