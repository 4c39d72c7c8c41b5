#pragma once
// Attention of one shape on the executor against the CPU's, both passes, for the tests of its kernels.

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "runtime/kernels/attention.h"
#include "runtime/kernels/cuda/attention.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

namespace cairn::testing {

using kernels::AttentionDims;

/// q, k and v side by side in rows that are longer by `pad`.
struct Shape {
  const char* name;
  int64_t batch, tokens, heads, kv_heads, head_dim;
  int64_t pad = 0, window = 0;
  bool causal = true, ends = false, starts = false, sloped = false, dropped = false, maxima = false, held = false;
  float cap = 0;
  int64_t chunk = 0;
  bool sinks = false, rounded = false;
  int64_t row() const { return (heads + 2 * kv_heads) * head_dim + pad; }
};

/// Addresses of one side.
struct Places {
  const int32_t *ends, *starts;
  const float *slopes, *sinks;
  const uint64_t* keys;
  float* maxima;
};

inline AttentionDims dims_of(const Shape& s, const Places& at) {
  AttentionDims d{.batch = s.batch, .tokens = s.tokens, .heads = s.heads, .kv_heads = s.kv_heads};
  d.head_dim = s.head_dim;
  d.q_stride = d.kv_stride = s.row();
  d.out_stride = s.heads * s.head_dim + s.pad;
  d.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  d.cap = s.cap;
  d.mask.causal = s.causal;
  d.mask.window = s.window;
  d.mask.chunk = s.chunk;
  if (s.ends) d.mask.ends = DevicePtr(at.ends);
  if (s.starts) d.mask.starts = DevicePtr(at.starts);
  if (s.sloped) d.alibi_slopes = DevicePtr(at.slopes);
  d.alibi_rounded = s.rounded;
  if (s.sinks) d.sinks = DevicePtr(at.sinks);
  if (s.dropped) d.dropout = {kernels::DropoutRate::of(0.25), DevicePtr(at.keys), 77, 3};
  if (s.maxima) d.max_scores = DevicePtr(at.maxima);
  if (s.held) d.held = TokenRuns::of_rank(s.tokens, 2, 0);
  return d;
}

/// |got - cpu| / |cpu|, as vectors.
template <typename T>
double relative_distance(const std::vector<T>& got, const std::vector<T>& cpu) {
  const std::vector<double> a = doubles(got), b = doubles(cpu);
  double apart = 0, all = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    apart += (a[i] - b[i]) * (a[i] - b[i]);
    all += b[i] * b[i];
  }
  return all == 0 ? apart : std::sqrt(apart / all);
}

/// Whatever the order of threads, the bits are those of the first run.
template <typename T>
void check_repeats(const std::vector<T>& got, std::vector<T>& first) {
  if (first.empty()) first = got;
  CHECK(same_bits(got, first));
}

/// Both passes on both sides; G as dk and dv are written. `in_orders(body)` runs it in orders of threads.
template <typename T, typename G, typename Orders>
void compare_in(const Orders& in_orders, const Shape& s, kernels::cuda::Units units) {
  CAPTURE(std::string(s.name));
  CAPTURE(s.tokens);
  CAPTURE(s.head_dim);
  const int64_t queries = s.held ? s.tokens / 2 : s.tokens, rows = s.batch * queries;
  const int64_t out_row = s.heads * s.head_dim + s.pad, k_at = s.heads * s.head_dim,
                v_at = k_at + s.kv_heads * s.head_dim;
  std::vector<int32_t> ends, starts;
  for (int64_t b = 0; b < s.batch; ++b) {  // a prefix that ends within a tile; documents of 23 tokens
    for (int64_t t = 0; t < s.tokens; ++t) {
      ends.push_back(static_cast<int32_t>(std::max(t < 9 + b ? 9 + b : 0, t + 1)));
      starts.push_back(static_cast<int32_t>((t + 5 * b) / 23 * 23 - std::min((t + 5 * b) / 23 * 23, 5 * b)));
    }
  }
  std::vector<float> slopes(s.heads), maxima(s.heads, -INFINITY);
  kernels::alibi_slopes(2 * s.heads, 1, s.heads, slopes.data());
  for (float& slope : slopes) slope *= 0.7f;  // not exact in bf16
  // One sink is far above all scores, one far below: the first takes nearly all of the probability.
  std::vector<float> sinks(s.heads), dsinks(s.heads, 0.5f);
  for (int64_t n = 0; n < s.heads; ++n) sinks[n] = std::array{0.7f, 9.0f, -30.0f}[n % 3];
  const std::vector<uint64_t> keys = {11, 22, 33};
  const auto qkv = normals<T>("qkv", s.batch * s.tokens * s.row()), dout = normals<T>("dout", rows * out_row);
  maxima[0] = 1000;  // stays

  const AttentionDims here =
      dims_of(s, {ends.data(), starts.data(), slopes.data(), sinks.data(), keys.data(), maxima.data()});
  std::vector<T> out(rows * out_row), dq(s.batch * s.tokens * s.row());
  std::vector<G> dkv(dq.size());
  std::vector<float> logsumexp(s.batch * s.heads * queries), scratch(attention_backward_scratch_elems(here));
  kernels::attention_forward<T>(here, qkv.data(), qkv.data() + k_at, qkv.data() + v_at, out.data(), logsumexp.data());
  kernels::attention_backward<T, G>(here, qkv.data(), qkv.data() + k_at, qkv.data() + v_at, out.data(),
                                    logsumexp.data(), dout.data(), dq.data(), dkv.data() + k_at, dkv.data() + v_at,
                                    scratch.data());
  if (s.sinks) kernels::sink_gradients(here, logsumexp.data(), scratch.data(), dsinks.data());
  // Rounded probabilities and rounded gradients of scores: two roundings of T in each term of a sum.
  const double most_apart = std::is_same_v<T, float> ? 1e-5 : 2 * rounding_unit<T>();
  std::vector<T> first_out, first_dq;
  std::vector<float> first_dsinks;
  std::vector<G> first_dkv;
  in_orders([&] {
    OnDevice<int32_t> d_ends(ends), d_starts(starts);
    OnDevice<float> d_slopes(slopes), d_sinks(sinks), d_dsinks(filled<float>(s.heads, 0.5f)),
        d_maxima(filled<float>(s.heads, -INFINITY));
    OnDevice<uint64_t> d_keys(keys);
    d_maxima.data()[0] = 1000;
    const AttentionDims there =
        dims_of(s, {d_ends.data(), d_starts.data(), d_slopes.data(), d_sinks.data(), d_keys.data(), d_maxima.data()});
    // The space between rows, and results of the other pass, stay 0.
    OnDevice<T> d_qkv(qkv), d_dout(dout), d_out(std::vector<T>(out.size())), d_dq(std::vector<T>(dq.size()));
    OnDevice<G> d_dkv(std::vector<G>(dkv.size()));
    OnDevice<float> d_logsumexp(std::ssize(logsumexp)), deltas(kernels::cuda::attention_deltas(there)),
        partial_maxima(kernels::cuda::attention_maxima(there));
    Queue on;
    const T* const at = d_qkv.data();
    kernels::cuda::attention_forward<T>(on, there, at, at + k_at, at + v_at, d_out.data(), d_logsumexp.data(),
                                        partial_maxima.data(), units);
    check_alike(d_out.values(), out, attention_sums<T>(s.tokens));
    check_alike(d_logsumexp.values(), logsumexp, chain_of_sums<float>(s.tokens));
    if (s.maxima) check_alike(d_maxima.values(), maxima, chain_of_sums<float>(s.head_dim));
    kernels::cuda::attention_backward<T, G>(on, there, at, at + k_at, at + v_at, d_out.data(), d_logsumexp.data(),
                                            d_dout.data(), d_dq.data(), d_dkv.data() + k_at, d_dkv.data() + v_at,
                                            deltas.data(), units);
    check_alike(d_dq.values(), dq, attention_gradients<T>(s.tokens));
    Tolerance of_keys = attention_gradients<T>(s.tokens * s.heads / s.kv_heads);
    check_alike(d_dkv.values(), dkv, of_keys);
    CHECK(relative_distance(d_out.values(), out) <= most_apart);
    // One key has all of the probability: there the gradient is what rounding leaves of 0.
    if (s.tokens > 1) CHECK(relative_distance(d_dq.values(), dq) <= most_apart);
    CHECK(relative_distance(d_dkv.values(), dkv) <= most_apart);
    check_repeats(d_out.values(), first_out);
    check_repeats(d_dq.values(), first_dq);
    check_repeats(d_dkv.values(), first_dkv);
    if (!s.sinks) return;
    kernels::cuda::sink_gradients(on, there, d_logsumexp.data(), deltas.data(), d_dsinks.data());
    check_alike(d_dsinks.values(), dsinks, attention_gradients<T>(s.batch * s.tokens));
    check_repeats(d_dsinks.values(), first_dsinks);
  });
}

}  // namespace cairn::testing
