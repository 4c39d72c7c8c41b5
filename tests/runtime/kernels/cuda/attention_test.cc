#include "runtime/kernels/attention.h"

#include <algorithm>
#include <array>

#include "runtime/kernels/cuda/attention.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::AttentionDims;

namespace {

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

AttentionDims dims_of(const Shape& s, const Places& at) {
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

/// Both passes on both sides; G as dk and dv are written.
template <typename T, typename G>
void compare(const Shape& s) {
  CAPTURE(std::string(s.name));
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
  // Of sinks one is far above all scores, one far below: the first takes nearly all of the probability.
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
  in_every_order([&] {
    OnDevice<int32_t> d_ends(ends), d_starts(starts);
    OnDevice<float> d_slopes(slopes), d_sinks(sinks), d_dsinks(filled<float>(s.heads, 0.5f)),
        d_maxima(filled<float>(s.heads, -INFINITY));
    OnDevice<uint64_t> d_keys(keys);
    d_maxima.data()[0] = 1000;
    const AttentionDims there =
        dims_of(s, {d_ends.data(), d_starts.data(), d_slopes.data(), d_sinks.data(), d_keys.data(), d_maxima.data()});
    // What lies between rows, and what the other pass writes, stays 0.
    OnDevice<T> d_qkv(qkv), d_dout(dout), d_out(std::vector<T>(out.size())), d_dq(std::vector<T>(dq.size()));
    OnDevice<G> d_dkv(std::vector<G>(dkv.size()));
    OnDevice<float> d_logsumexp(std::ssize(logsumexp)), deltas(kernels::cuda::attention_deltas(there)),
        partial_maxima(kernels::cuda::attention_maxima(there));
    Queue on;
    const T* const at = d_qkv.data();
    kernels::cuda::attention_forward<T>(on, there, at, at + k_at, at + v_at, d_out.data(), d_logsumexp.data(),
                                        partial_maxima.data());
    check_alike(d_out.values(), out, attention_sums<T>(s.tokens));
    check_alike(d_logsumexp.values(), logsumexp, chain_of_sums<float>(s.tokens));
    if (s.maxima) check_alike(d_maxima.values(), maxima, chain_of_sums<float>(s.head_dim));
    kernels::cuda::attention_backward<T, G>(on, there, at, at + k_at, at + v_at, d_out.data(), d_logsumexp.data(),
                                            d_dout.data(), d_dq.data(), d_dkv.data() + k_at, d_dkv.data() + v_at,
                                            deltas.data());
    check_alike(d_dq.values(), dq, attention_gradients<T>(s.tokens));
    Tolerance of_keys = attention_gradients<T>(s.tokens * s.heads / s.kv_heads);
    check_alike(d_dkv.values(), dkv, of_keys);
    CHECK(relative_distance(d_out.values(), out) <= most_apart);
    CHECK(relative_distance(d_dq.values(), dq) <= most_apart);
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

/// The watched build is slow, and sees the same accesses whatever the type.
template <typename T>
bool left_out() {
  return simt::build() == simt::Build::kWatched && !std::is_same_v<T, bf16>;
}

// Tiles with rows to spare, packs and none, and each width of heads; masks that begin and end inside tiles.
const Shape kShapes[] = {
    {"two tiles, grouped", 1, 70, 2, 1, 16},
    {"heads of no packs", 1, 21, 2, 2, 7},
    {"heads of up to 128", 1, 34, 2, 1, 72, 8},
    {"heads of up to 256", 1, 33, 2, 2, 132},
};
const Shape kMasks[] = {
    {"both directions", 1, 67, 2, 2, 8, 0, 0, false},
    {"windows", 1, 70, 2, 1, 8, 0, 5},
    {"prefixes", 2, 20, 2, 1, 8, 3, 0, true, true},
    {"documents", 2, 35, 2, 1, 8, 0, 0, true, false, true},
    {"prefixes, documents and windows", 1, 70, 2, 1, 8, 0, 12, true, true, true},
    {"slopes and caps", 2, 20, 4, 2, 8, 0, 0, true, false, false, true, false, false, false, 0.8f},
    {"dropout", 2, 20, 4, 2, 8, 0, 0, true, false, false, false, true},
    {"maxima", 2, 66, 1, 1, 8, 0, 0, true, false, false, false, false, true},
    {"tokens of a rank, with slopes and dropout", 2, 80, 2, 1, 8, 0, 50, true, false, false, true, true, false, true},
    {.name = "chunks", .batch = 1, .tokens = 70, .heads = 2, .kv_heads = 1, .head_dim = 8, .chunk = 24},
    {.name = "chunks of documents, sinks",
     .batch = 2,
     .tokens = 35,
     .heads = 3,
     .kv_heads = 1,
     .head_dim = 8,
     .starts = true,
     .chunk = 9,
     .sinks = true},
    {.name = "sinks, caps and dropout",
     .batch = 2,
     .tokens = 67,
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 8,
     .dropped = true,
     .cap = 0.8f,
     .sinks = true},
};

// Slopes times bf16 positions, in heads that matrix units would take otherwise; beyond 256 positions are rounded.
const Shape kRounded[] = {
    {.name = "documents",
     .batch = 2,
     .tokens = 70,
     .heads = 3,
     .kv_heads = 3,
     .head_dim = 16,
     .starts = true,
     .sloped = true,
     .rounded = true},
    {.name = "a rank's tokens behind 256, caps and dropout",
     .batch = 1,
     .tokens = 536,
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 72,
     .window = 70,
     .sloped = true,
     .dropped = true,
     .held = true,
     .cap = 0.8f,
     .rounded = true},
};

// The same for matrix units, whose tiles have 64 keys and up to 128 queries: lengths around those, each width of heads,
// groups; and masks that leave tiles out, cut them and leave them whole.
const Shape kTileShapes[] = {
    {"one token", 1, 1, 1, 1, 8},
    {"three tiles of keys, grouped", 1, 150, 2, 1, 64},
    {"one key in the last tile", 2, 65, 1, 1, 40, 8},
    {"wide heads, grouped", 1, 130, 2, 1, 128},
    {"heads of 80", 1, 64, 1, 1, 80},
};
const Shape kTileMasks[] = {
    {"both directions", 1, 131, 2, 2, 8, 0, 0, false},
    {"narrow windows", 1, 200, 1, 1, 8, 0, 5},
    {"wide windows", 1, 280, 2, 1, 16, 0, 140},
    {"prefixes", 2, 140, 1, 1, 8, 8, 0, true, true},
    {"documents", 2, 140, 1, 1, 8, 0, 0, true, false, true},
    {"prefixes, documents and windows", 1, 200, 1, 1, 8, 0, 12, true, true, true},
    {"slopes and caps", 1, 140, 2, 1, 8, 0, 0, true, false, false, true, false, false, false, 0.8f},
    {"caps of wide heads", 1, 70, 2, 1, 72, 0, 0, true, false, false, false, false, false, false, 0.8f},
    {"slopes in both directions", 1, 70, 1, 1, 8, 0, 0, false, false, false, true},
    {"dropout", 2, 80, 2, 1, 8, 0, 0, true, false, false, false, true},
    {"maxima", 2, 140, 2, 2, 8, 0, 0, true, false, false, false, false, true},
    {"maxima of caps", 2, 70, 2, 1, 8, 0, 0, true, false, false, false, false, true, false, 0.8f},
    {"tokens of a rank", 1, 280, 2, 1, 8, 0, 0, true, false, false, false, false, false, true},
    {"tokens of a rank, with slopes and dropout", 2, 160, 2, 1, 8, 0, 50, true, false, false, true, true, false, true},
    {.name = "chunks", .batch = 1, .tokens = 150, .heads = 1, .kv_heads = 1, .head_dim = 8, .chunk = 70},
    {.name = "short chunks of documents, sinks",
     .batch = 1,
     .tokens = 140,
     .heads = 3,
     .kv_heads = 1,
     .head_dim = 8,
     .starts = true,
     .chunk = 9,
     .sinks = true},
    {.name = "windows and sinks",
     .batch = 1,
     .tokens = 100,
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 64,
     .window = 70,
     .sinks = true},
    {.name = "sinks of a rank's tokens, with slopes",
     .batch = 1,
     .tokens = 80,
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 72,
     .sloped = true,
     .held = true,
     .sinks = true},
};

}  // namespace

TEST_SUITE("runtime/kernels/cuda/attention") {
  TEST_CASE_TEMPLATE("attention is the CPU's, forward and backward, whatever the heads", T, float, bf16, f16) {
    if (left_out<T>()) return;
    for (const Shape& shape : kShapes) compare<T, T>(shape);
  }
  TEST_CASE("attention is the CPU's with every mask, slope, cap, sink and dropout") {
    for (const Shape& shape : kMasks) compare<float, float>(shape);
  }
  TEST_CASE_TEMPLATE("attention with rounded ALiBi is the CPU's", T, float, bf16, f16) {
    if (left_out<T>()) return;
    for (const Shape& shape : kRounded) compare<T, T>(shape);
  }
  TEST_CASE_TEMPLATE("attention by matrix units is the CPU's, forward and backward, whatever the shape", T, bf16, f16) {
    if (left_out<T>()) return;
    for (const Shape& shape : kTileShapes) compare<T, T>(shape);
  }
  TEST_CASE_TEMPLATE("attention by matrix units is the CPU's with every mask, slope, cap, sink and dropout", T, bf16,
                     f16) {
    if (left_out<T>()) return;
    for (const Shape& shape : kTileMasks) compare<T, T>(shape);
  }
  TEST_CASE("gradients of keys and values are written as float too") {
    for (const Shape& small : {Shape{"no packs of 16 bytes", 2, 20, 4, 2, 12}, Shape{"such packs", 2, 20, 4, 2, 16}}) {
      compare<bf16, float>(small);
      compare<f16, float>(small);
    }
  }
  TEST_CASE_TEMPLATE("one token against a cache is the CPU's", T, float, bf16, f16) {
    if (left_out<T>()) return;
    constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kHeadDim = 12, kCapacity = 80;
    AttentionDims dims{.batch = kBatch, .heads = kHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim, .scale = 0.3f};
    const auto q = normals<T>("q", kBatch * kHeads * kHeadDim);
    const auto k = normals<T>("k", kBatch * kCapacity * kKvHeads * kHeadDim),
               v = normals<T>("v", kBatch * kCapacity * kKvHeads * kHeadDim);
    std::vector<float> slopes(kHeads), sinks = {0.7f, 9.0f, -30.0f, 0.0f};
    kernels::alibi_slopes(kHeads, 0, kHeads, slopes.data());
    for (const int64_t past : {0, 1, 70}) {
      for (const int64_t window : {0, 9}) {
        CAPTURE(past);
        CAPTURE(window);
        dims.mask.window = window;
        dims.mask.chunk = window > 0 ? 0 : 16;
        dims.sinks = DevicePtr<const float>(window > 0 ? nullptr : sinks.data());
        dims.cap = window > 0 ? 2.0f : 0.0f;
        std::vector<T> out(q.size());
        dims.alibi_slopes = DevicePtr<const float>(window > 0 ? slopes.data() : nullptr);
        dims.alibi_rounded = past == 70;
        kernels::attention_decode<T>(dims, past, kCapacity, q.data(), k.data(), v.data(), out.data());
        in_every_order([&] {
          OnDevice<T> d_q(q), d_k(k), d_v(v), d_out(std::ssize(out));
          OnDevice<float> d_slopes(slopes), d_sinks(sinks);
          AttentionDims there = dims;
          there.alibi_slopes = DevicePtr<const float>(window > 0 ? d_slopes.data() : nullptr);
          there.sinks = DevicePtr<const float>(window > 0 ? nullptr : d_sinks.data());
          Queue on;
          kernels::cuda::attention_decode<T>(on, there, past, kCapacity, d_q.data(), d_k.data(), d_v.data(),
                                             d_out.data());
          check_alike(d_out.values(), out, attention_sums<T>(past + 1));
        });
      }
    }
  }
  TEST_CASE("scores in shared memory and rows of whole packs meet few conflicts and waste no sector") {
    if (simt::build() != simt::Build::kWatched) return;
    const Shape s{"", 1, 64, 1, 1, 64};
    OnDevice<bf16> qkv(normals<bf16>("qkv", s.tokens * s.row())), out(s.tokens * 64);
    OnDevice<float> logsumexp(s.tokens);
    Queue on;
    simt::take_traffic();
    kernels::cuda::attention_forward<bf16>(on, dims_of(s, {}), qkv.data(), qkv.data() + 64, qkv.data() + 128,
                                           out.data(), logsumexp.data(), nullptr);
    int64_t rows = 0, tiles = 0;
    for (const simt::Traffic& traffic : simt::take_traffic()) {
      CAPTURE(traffic.line);
      if (traffic.bytes / traffic.requests < 128) continue;
      if (traffic.shared) {
        CAPTURE(traffic.turns);
        CAPTURE(traffic.bytes);
        CHECK(traffic.turns <= traffic.bytes / 128);
        ++tiles;
      } else {
        CHECK(traffic.used() >= 1);
        ++rows;
      }
    }
    CHECK(rows >= 1);
    CHECK(tiles >= 3);
  }
  TEST_CASE("a NaN in a value stays in its channel of its head, and is seen there") {
    const Shape s{"", 1, 6, 2, 2, 4};
    std::vector<float> values(s.tokens * s.row(), 0.5f);
    values[3 * s.row() + 16 + 4 + 1] = NAN;  // of the second head's value at token 3
    OnDevice<float> qkv(values), out(s.tokens * 8), logsumexp(s.tokens * 2);
    Queue on;
    kernels::cuda::attention_forward<float>(on, dims_of(s, {}), qkv.data(), qkv.data() + 8, qkv.data() + 16, out.data(),
                                            logsumexp.data(), nullptr);
    for (int i = 0; i < 48; ++i) {
      if (i % 8 != 5) CHECK_FALSE(std::isnan(out.values()[i]));
      if (i % 8 == 5 && i >= 3 * 8) CHECK(std::isnan(out.values()[i]));
    }
  }
  TEST_CASE("no sample is no launch") {
    Queue on;
    simt::take_counts();
    kernels::cuda::attention_forward<float>(on, dims_of({"", 0, 4, 1, 1, 8}, {}), nullptr, nullptr, nullptr, nullptr,
                                            nullptr, nullptr);
    CHECK(simt::take_counts().launches == 0);
  }
}
