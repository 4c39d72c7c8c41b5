#include "runtime/kernels/attention.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::AttentionDims;

namespace {

/// q, k, v side by side in rows of (N + 2K) D, and what belongs to them.
struct Shape {
  int64_t batch, tokens, heads, kv_heads, head_dim;
  kernels::AttentionMask mask = {};
  const float* slopes = nullptr;
  float cap = 0;
  const float* sinks = nullptr;
  bool rounded = false;
  int64_t row() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t rows() const { return batch * tokens; }
  int64_t k_at() const { return heads * head_dim; }
  int64_t v_at() const { return (heads + kv_heads) * head_dim; }
  int64_t out_row() const { return heads * head_dim; }
  AttentionDims dims() const {
    return {.batch = batch,
            .tokens = tokens,
            .heads = heads,
            .kv_heads = kv_heads,
            .head_dim = head_dim,
            .q_stride = row(),
            .kv_stride = row(),
            .out_stride = out_row(),
            .scale = 1.0f / std::sqrt(static_cast<float>(head_dim)),
            .cap = cap,
            .mask = mask,
            .alibi_slopes = DevicePtr(slopes),
            .alibi_rounded = rounded,
            .sinks = DevicePtr(sinks)};
  }
  /// Query i of sample b sees key j.
  bool sees(int64_t b, int64_t i, int64_t j) const {
    if (mask.window > 0 && j <= i - mask.window) return false;
    const int64_t start = mask.starts ? address_of(mask.starts)[b * tokens + i] : 0;
    if (j < start || (mask.chunk > 0 && (j - start) / mask.chunk != (i - start) / mask.chunk)) return false;
    return !mask.causal || j <= i || (mask.ends && j < address_of(mask.ends)[b * tokens + i]);
  }
  double capped(double score) const { return cap > 0 ? cap * std::tanh(score / cap) : score; }
  double cap_slope(double score) const { return cap > 0 ? 1 - std::tanh(score / cap) * std::tanh(score / cap) : 1; }
  double bias(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (slopes == nullptr) return 0;
    if (!rounded) return slopes[h] * static_cast<double>(j - i);
    const auto in_bf16 = [](float x) { return to_f32(to_bf16(x)); };
    const int64_t start = mask.starts ? address_of(mask.starts)[b * tokens + i] : 0;
    return in_bf16(in_bf16(slopes[h]) * in_bf16(static_cast<float>(j - start))) * static_cast<double>(dims().scale);
  }
};

struct Reference {
  std::vector<double> out, logsumexp, probabilities, scores;  // [T, N*D], [B, N, S], [B, N, S, S] twice
};

Reference naive_forward(const Shape& s, const std::vector<double>& qkv) {
  const double scale = s.dims().scale;
  Reference ref;
  ref.out.assign(s.rows() * s.out_row(), 0.0);
  ref.logsumexp.resize(s.batch * s.heads * s.tokens);
  ref.probabilities.assign(s.batch * s.heads * s.tokens * s.tokens, 0.0);
  ref.scores = ref.probabilities;  // before the cap
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t kv = h * s.kv_heads / s.heads;
      for (int64_t i = 0; i < s.tokens; ++i) {
        double* p = &ref.probabilities[((b * s.heads + h) * s.tokens + i) * s.tokens];
        const double* q = &qkv[(b * s.tokens + i) * s.row() + h * s.head_dim];
        double max = s.sinks != nullptr ? s.sinks[h] : -INFINITY, sum = 0;
        for (int64_t j = 0; j < s.tokens; ++j) {
          const double* k = &qkv[(b * s.tokens + j) * s.row() + s.k_at() + kv * s.head_dim];
          double score = 0;
          for (int64_t d = 0; d < s.head_dim; ++d) score += q[d] * k[d];
          ref.scores[((b * s.heads + h) * s.tokens + i) * s.tokens + j] = score * scale;
          p[j] = s.sees(b, i, j) ? s.capped(score * scale) + s.bias(b, h, i, j) : -INFINITY;
          max = std::max(max, p[j]);
        }
        if (s.sinks != nullptr) sum = std::exp(s.sinks[h] - max);
        for (int64_t j = 0; j < s.tokens; ++j) sum += p[j] = std::exp(p[j] - max);
        ref.logsumexp[(b * s.heads + h) * s.tokens + i] = max + std::log(sum);
        double* out = &ref.out[(b * s.tokens + i) * s.out_row() + h * s.head_dim];
        for (int64_t j = 0; j < s.tokens; ++j) {
          p[j] /= sum;
          const double* v = &qkv[(b * s.tokens + j) * s.row() + s.v_at() + kv * s.head_dim];
          for (int64_t d = 0; d < s.head_dim; ++d) out[d] += p[j] * v[d];
        }
      }
    }
  }
  return ref;
}

/// d(dot(dout, out))/d(qkv) with the whole score matrix at hand; checked against finite differences below.
std::vector<double> naive_backward(const Shape& s, const std::vector<double>& qkv, const std::vector<double>& dout) {
  const double scale = s.dims().scale;
  const Reference ref = naive_forward(s, qkv);
  std::vector<double> grad(qkv.size(), 0.0);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t kv = h * s.kv_heads / s.heads;
      for (int64_t i = 0; i < s.tokens; ++i) {
        const double* p = &ref.probabilities[((b * s.heads + h) * s.tokens + i) * s.tokens];
        const double* g = &dout[(b * s.tokens + i) * s.out_row() + h * s.head_dim];
        const int64_t q_at = (b * s.tokens + i) * s.row() + h * s.head_dim;
        std::vector<double> dp(s.tokens, 0.0);
        double mean = 0;
        for (int64_t j = 0; j < s.tokens; ++j) {
          const int64_t v_at = (b * s.tokens + j) * s.row() + s.v_at() + kv * s.head_dim;
          for (int64_t d = 0; d < s.head_dim; ++d) {
            dp[j] += g[d] * qkv[v_at + d];
            grad[v_at + d] += p[j] * g[d];
          }
          mean += p[j] * dp[j];
        }
        for (int64_t j = 0; j < s.tokens; ++j) {
          const int64_t k_at = (b * s.tokens + j) * s.row() + s.k_at() + kv * s.head_dim;
          const double score = ref.scores[((b * s.heads + h) * s.tokens + i) * s.tokens + j];
          const double ds = p[j] * (dp[j] - mean) * scale * s.cap_slope(score);
          for (int64_t d = 0; d < s.head_dim; ++d) {
            grad[q_at + d] += ds * qkv[k_at + d];
            grad[k_at + d] += ds * qkv[q_at + d];
          }
        }
      }
    }
  }
  return grad;
}

template <typename T>
struct Run {
  std::vector<T> out, grad;
  std::vector<float> logsumexp, dsinks;
};

template <typename T>
Run<T> run_kernel(const Shape& s, const std::vector<T>& qkv, const std::vector<T>& dout) {
  const AttentionDims dims = s.dims();
  Run<T> run;
  run.out.resize(s.rows() * s.out_row());
  run.logsumexp.resize(s.batch * s.heads * s.tokens);
  run.grad.resize(qkv.size());
  std::vector<float> scratch(kernels::attention_backward_scratch_elems(dims), NAN);  // must not be read before written
  const T* q = qkv.data();
  kernels::attention_forward(dims, q, q + s.k_at(), q + s.v_at(), run.out.data(), run.logsumexp.data());
  T* dq = run.grad.data();
  kernels::attention_backward(dims, q, q + s.k_at(), q + s.v_at(), run.out.data(), run.logsumexp.data(), dout.data(),
                              dq, dq + s.k_at(), dq + s.v_at(), scratch.data());
  if (s.sinks != nullptr) {
    run.dsinks.assign(s.heads, 0.25f);  // is added to
    kernels::sink_gradients(dims, run.logsumexp.data(), scratch.data(), run.dsinks.data());
  }
  return run;
}

/// Masks that begin and end inside tiles, at their edges and beyond them.
struct Masks {
  std::vector<int32_t> prefixes, packed, starts;  // packed: a prefix in each window of 50
  std::vector<float> slopes;
  std::vector<Shape> shapes;

  Masks() {
    const int64_t tokens = 150;
    for (const int64_t prefix : {5, 130, 64, 0}) {
      for (int64_t t = 0; t < tokens; ++t) {
        prefixes.push_back(static_cast<int32_t>(std::max(prefix, t + 1)));
        packed.push_back(static_cast<int32_t>(std::max(t / 50 * 50 + prefix % 50, t + 1)));
      }
    }
    for (int64_t b = 0; b < 4; ++b) {
      int32_t start = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        if (t > 0 && (t * 7 + b * 13) % 41 == 0) start = static_cast<int32_t>(t);
        starts.push_back(start);
      }
    }
    slopes.resize(6);
    kernels::alibi_slopes(12, 3, 6, slopes.data());  // a rank's heads, across the border of the two lists
    const Shape plain{4, tokens, 6, 2, 16};
    for (const int64_t window : {1, 7, 64, 65, 149, 400}) {
      shapes.push_back(plain);
      shapes.back().mask.window = window;
    }
    for (const int64_t chunk : {1, 7, 64, 100, 400}) {
      shapes.push_back(plain);
      shapes.back().mask.chunk = chunk;
      if (chunk == 7) shapes.back().mask.starts = DevicePtr<const int32_t>(starts.data());
    }
    shapes.insert(shapes.end(), 6, plain);
    Shape* at = &shapes[shapes.size() - 6];
    at[0].mask.causal = false;
    at[5].mask = {.ends = DevicePtr<const int32_t>(packed.data()), .starts = DevicePtr<const int32_t>(starts.data())};
    at[1].mask.ends = DevicePtr<const int32_t>(prefixes.data());
    at[2].mask.starts = DevicePtr<const int32_t>(starts.data());
    at[3].slopes = slopes.data();
    at[4].slopes = slopes.data();
    at[4].mask = {.window = 33, .starts = DevicePtr<const int32_t>(starts.data())};
  }
};

const Shape kShapes[] = {
    {1, 1, 1, 1, 8},      // one token: the output is v
    {2, 5, 2, 2, 16},     // less than a tile
    {1, 64, 2, 1, 64},    // a tile exactly, grouped
    {2, 65, 4, 2, 24},    // one more than a tile; a head dim that is padded
    {3, 20, 2, 1, 16},    // the same key/value head in one sample after the other
    {1, 200, 3, 3, 7},    // four tiles; an odd head dim
    {3, 130, 6, 2, 32},   // groups of three
    {1, 193, 2, 1, 128},  // long heads
};

/// Forward and backward against softmax over the whole matrix.
template <typename T>
void check_against_matrix(const Shape& s) {
  const auto qkv = normals<T>("qkv", s.rows() * s.row());
  const auto dout = normals<T>("dout", s.rows() * s.out_row());
  const Reference ref = naive_forward(s, doubles(qkv));
  const Run<T> run = run_kernel(s, qkv, dout);
  check_close(run.out, ref.out, attention_sums<T>(s.tokens));
  check_close(run.logsumexp, ref.logsumexp, chain_of_sums<float>(s.tokens));
  check_close(run.grad, naive_backward(s, doubles(qkv), doubles(dout)), attention_gradients<T>(s.tokens));
}

}  // namespace

TEST_SUITE("runtime/kernels/attention") {
  TEST_CASE_TEMPLATE("forward and backward agree with softmax over the whole matrix", T, float, bf16, f16) {
    for (const Shape& s : kShapes) {
      CAPTURE(s.tokens);
      CAPTURE(s.head_dim);
      check_against_matrix<T>(s);
    }
  }

  TEST_CASE("backward agrees with finite differences") {
    const Shape s{2, 7, 4, 2, 6};
    const auto qkv = normals<float>("qkv", s.rows() * s.row());
    const auto dout = normals<float>("dout", s.rows() * s.out_row());
    std::vector<double> at = doubles(qkv);
    const std::vector<double> slopes = numeric_gradient(at, doubles(dout), [&] { return naive_forward(s, at).out; });
    check_close(run_kernel(s, qkv, dout).grad, slopes, chain_of_sums<float>(s.tokens) + kFiniteDifference);
    // and so does the reference that the larger shapes are compared with
    const std::vector<double> naive = naive_backward(s, at, doubles(dout));
    for (size_t i = 0; i < naive.size(); ++i) REQUIRE(kFiniteDifference.accepts(naive[i], slopes[i]));
  }

  TEST_CASE_TEMPLATE("windows, prefixes, documents, both directions and slopes agree with the whole matrix", T, float,
                     bf16, f16) {
    const Masks masks;
    for (size_t n = 0; n < masks.shapes.size(); ++n) {
      CAPTURE(n);
      const Shape& s = masks.shapes[n];
      check_against_matrix<T>(s);
    }
  }

  TEST_CASE_TEMPLATE("slopes times rounded positions agree with the whole matrix, beyond 256 tokens too", T, float,
                     bf16, f16) {
    const Masks masks;
    std::vector<Shape> shapes = {{1, 300, 6, 2, 16}, {2, 65, 6, 6, 24}, {4, 150, 6, 2, 16}};
    shapes[1].mask.causal = false;
    shapes[2].mask = {.window = 33, .starts = DevicePtr<const int32_t>(masks.starts.data())};
    for (Shape& s : shapes) {
      CAPTURE(s.tokens);
      s.slopes = masks.slopes.data();
      s.rounded = true;
      check_against_matrix<T>(s);
    }
  }

  TEST_CASE("a position is rounded by itself, and its product with a rounded slope again") {
    // One head of slope 2^-0.5 without products: the probabilities of three keys say what was added to each.
    const float slope = std::exp2(-0.5f);
    const Shape s{
        .batch = 1, .tokens = 520, .heads = 1, .kv_heads = 1, .head_dim = 8, .slopes = &slope, .rounded = true};
    std::vector<float> qkv(s.rows() * s.row());
    for (int64_t t = 0; t < s.tokens; ++t) qkv[t * s.row() + s.v_at()] = t == 517 ? 1.0f : 0.0f;
    const Run<float> run = run_kernel(s, qkv, std::vector<float>(s.rows() * s.out_row()));
    // 517 becomes 516, 0.70710678 becomes 0.70703125, their product 364.83 becomes 364.
    const double added = 364.0 * s.dims().scale;
    CHECK(s.bias(0, 0, 519, 517) == doctest::Approx(added));
    double sum = 0;
    for (int64_t t = 0; t < s.tokens; ++t) sum += std::exp(s.bias(0, 0, 519, t) - added);
    CHECK(run.out[519 * s.out_row()] == doctest::Approx(1 / sum).epsilon(1e-4));
  }

  TEST_CASE_TEMPLATE("capped scores agree with the whole matrix", T, float, bf16, f16) {
    for (Shape s : {Shape{2, 5, 2, 2, 16}, Shape{2, 65, 4, 2, 24}, Shape{1, 193, 2, 1, 128}}) {
      for (const int64_t window : {0, 33}) {
        CAPTURE(s.tokens);
        s.cap = 0.8f;
        s.mask.window = window;
        check_against_matrix<T>(s);
      }
    }
  }

  TEST_CASE_TEMPLATE("sinks agree with one more score in the whole matrix", T, float, bf16, f16) {
    const std::vector<float> sinks = {0.5f, -2.0f, 3.0f, 12.0f};
    for (Shape s : {Shape{2, 5, 2, 2, 16}, Shape{2, 65, 4, 2, 24}, Shape{1, 193, 4, 1, 128}}) {
      CAPTURE(s.tokens);
      s.sinks = sinks.data();
      if (s.tokens == 65) s.mask.window = 33;
      check_against_matrix<T>(s);
    }
  }

  TEST_CASE("gradients of sinks, and the reference with them, agree with finite differences") {
    std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 1.0f};
    Shape s{2, 7, 4, 2, 6};
    s.sinks = sinks.data();
    const auto qkv = normals<float>("qkv", s.rows() * s.row());
    const auto dout = normals<float>("dout", s.rows() * s.out_row());
    const Run<float> run = run_kernel(s, qkv, dout);
    std::vector<double> at = doubles(qkv);
    const std::vector<double> naive = naive_backward(s, at, doubles(dout));
    const std::vector<double> slopes = numeric_gradient(at, doubles(dout), [&] { return naive_forward(s, at).out; });
    for (size_t i = 0; i < naive.size(); ++i) REQUIRE(kFiniteDifference.accepts(naive[i], slopes[i]));
    for (size_t h = 0; h < sinks.size(); ++h) {
      const auto value = [&](float sink) {
        const float kept = std::exchange(sinks[h], sink);
        const Reference ref = naive_forward(s, at);
        sinks[h] = kept;
        double sum = 0;
        for (size_t i = 0; i < ref.out.size(); ++i) sum += ref.out[i] * static_cast<double>(dout[i]);
        return sum;
      };
      constexpr float kStep = 1.0f / 256;
      const double slope = (value(sinks[h] + kStep) - value(sinks[h] - kStep)) / (2 * kStep);
      CHECK(run.dsinks[h] - 0.25f == doctest::Approx(slope).epsilon(1e-4));
    }
  }

  TEST_CASE("the reference of the masks and the cap agrees with finite differences") {
    const std::vector<int32_t> ends = {4, 4, 4, 4, 5, 6, 7}, starts = {0, 0, 0, 3, 3, 5, 5};
    const std::vector<float> slopes = {0.5f, 0.25f};
    Shape s{1, 7, 2, 1, 4};
    for (const kernels::AttentionMask& mask :
         {kernels::AttentionMask{.window = 3}, kernels::AttentionMask{.chunk = 3},
          kernels::AttentionMask{.causal = false},
          kernels::AttentionMask{.ends = DevicePtr<const int32_t>(ends.data())},
          kernels::AttentionMask{.starts = DevicePtr<const int32_t>(starts.data())}}) {
      s.mask = mask;
      s.slopes = slopes.data();
      s.cap = s.cap > 0 ? 0 : 0.9f;
      const auto dout = doubles(normals<float>("dout", s.rows() * s.out_row()));
      std::vector<double> at = doubles(normals<float>("qkv", s.rows() * s.row()));
      const std::vector<double> slope = numeric_gradient(at, dout, [&] { return naive_forward(s, at).out; });
      const std::vector<double> naive = naive_backward(s, at, dout);
      for (size_t i = 0; i < naive.size(); ++i) REQUIRE(kFiniteDifference.accepts(naive[i], slope[i]));
    }
  }

  TEST_CASE("ALiBi slopes are those of the published lists, whichever part a rank asks for") {
    const auto slopes = [](int64_t heads) {
      std::vector<float> out(heads);
      kernels::alibi_slopes(heads, 0, heads, out.data());
      return out;
    };
    CHECK(slopes(4) == std::vector<float>{0.25f, 0.0625f, 0.015625f, 0.00390625f});
    CHECK(slopes(6) == std::vector<float>{0.25f, 0.0625f, 0.015625f, 0.00390625f, 0.5f, 0.125f});
    const auto of_12 = slopes(12), of_112 = slopes(112);
    CHECK(of_12[8] == doctest::Approx(0.707106781));
    CHECK(of_12[11] == doctest::Approx(0.0883883476));
    CHECK(of_112[0] == doctest::Approx(0.917004043));
    CHECK(of_112[3] == doctest::Approx(0.707106781));
    CHECK(of_112[64] == doctest::Approx(0.957603281));
    CHECK(of_112[67] == doctest::Approx(0.738413073));
    std::vector<float> part(28);
    kernels::alibi_slopes(112, 56, 28, part.data());
    CHECK(std::equal(part.begin(), part.end(), of_112.begin() + 56));
  }

  TEST_CASE("separate buffers give the bits of one buffer, and gaps between rows stay") {
    const Shape s{2, 70, 4, 2, 16};
    const auto qkv = normals<float>("qkv", s.rows() * s.row());
    const auto dout = normals<float>("dout", s.rows() * s.out_row());
    const Run<float> joined = run_kernel(s, qkv, dout);
    const int64_t q_row = 64 + 3, kv_row = 32 + 5, out_row = 64 + 1;
    AttentionDims dims = s.dims();
    dims.q_stride = q_row;
    dims.kv_stride = kv_row;
    dims.out_stride = out_row;
    std::vector<float> q(s.rows() * q_row), k(s.rows() * kv_row), v(k), g(s.rows() * out_row);
    for (int64_t r = 0; r < s.rows(); ++r) {
      std::copy_n(&qkv[r * s.row()], 64, &q[r * q_row]);
      std::copy_n(&qkv[r * s.row() + s.k_at()], 32, &k[r * kv_row]);
      std::copy_n(&qkv[r * s.row() + s.v_at()], 32, &v[r * kv_row]);
      std::copy_n(&dout[r * 64], 64, &g[r * out_row]);
    }
    std::vector<float> out(g.size(), 7.0f), dq(q.size(), 7.0f), dk(k.size(), 7.0f), dv(k.size(), 7.0f);
    std::vector<float> lse(joined.logsumexp.size()), scratch(kernels::attention_backward_scratch_elems(dims));
    kernels::attention_forward(dims, q.data(), k.data(), v.data(), out.data(), lse.data());
    kernels::attention_backward(dims, q.data(), k.data(), v.data(), out.data(), lse.data(), g.data(), dq.data(),
                                dk.data(), dv.data(), scratch.data());
    CHECK(same_bits(lse, joined.logsumexp));
    for (int64_t r = 0; r < s.rows(); ++r) {
      const float* grad = &joined.grad[r * s.row()];
      REQUIRE(std::equal(grad, grad + 64, &dq[r * q_row]));
      REQUIRE(std::equal(grad + s.k_at(), grad + s.k_at() + 32, &dk[r * kv_row]));
      REQUIRE(std::equal(grad + s.v_at(), grad + s.v_at() + 32, &dv[r * kv_row]));
      REQUIRE(std::equal(&joined.out[r * 64], &joined.out[r * 64] + 64, &out[r * out_row]));
      REQUIRE(out[r * out_row + 64] == 7.0f);
      REQUIRE(dq[r * q_row + 64] == 7.0f);
      REQUIRE(dk[r * kv_row + 32] == 7.0f);
      REQUIRE(dv[r * kv_row + 36] == 7.0f);
    }
  }

  TEST_CASE_TEMPLATE("any number of threads gives the same bits", T, float, bf16, f16) {
    const Shape s{2, 150, 6, 2, 48};
    const auto qkv = normals<T>("qkv", s.rows() * s.row());
    const auto dout = normals<T>("dout", s.rows() * s.out_row());
    Run<T> one;
    with_threads(1, [&] { one = run_kernel(s, qkv, dout); });
    for (const int threads : {2, 3, 5}) {
      CAPTURE(threads);
      with_threads(threads, [&] {
        const Run<T> many = run_kernel(s, qkv, dout);
        CHECK(same_bits(many.out, one.out));
        CHECK(same_bits(many.logsumexp, one.logsumexp));
        CHECK(same_bits(many.grad, one.grad));
      });
    }
  }

  TEST_CASE(
      "queries of two runs of a sample give the rows of all queries; their parts of dk and dv add up to the whole") {
    constexpr int64_t kWindow = 90;
    float slopes[4];
    kernels::alibi_slopes(4, 0, 4, slopes);
    for (const int64_t tokens : {int64_t{256}, int64_t{40}}) {  // chunks of whole tiles, and of parts of one
      for (const Shape& s : {Shape{2, tokens, 4, 2, 16}, Shape{2, tokens, 4, 4, 24, {.window = kWindow}},
                             Shape{1, tokens, 4, 2, 16, {}, slopes}, Shape{2, tokens, 4, 2, 16, {.causal = false}}}) {
        const auto qkv = normals<float>("qkv", s.rows() * s.row());
        const auto dout = normals<float>("dout", s.rows() * s.out_row());
        const int64_t kv_row = 2 * s.kv_heads * s.head_dim;
        std::vector<float> out(s.rows() * s.out_row()), lse(s.batch * s.heads * s.tokens), dqkv(qkv.size());
        std::vector<float> scratch(kernels::attention_backward_scratch_elems(s.dims()));
        kernels::attention_forward(s.dims(), qkv.data(), qkv.data() + s.k_at(), qkv.data() + s.v_at(), out.data(),
                                   lse.data());
        kernels::attention_backward(s.dims(), qkv.data(), qkv.data() + s.k_at(), qkv.data() + s.v_at(), out.data(),
                                    lse.data(), dout.data(), dqkv.data(), dqkv.data() + s.k_at(),
                                    dqkv.data() + s.v_at(), scratch.data());
        constexpr int64_t kRanks = 2;
        std::vector<double> dkv_sum(s.rows() * kv_row, 0.0);
        int64_t differing = 0;
        for (int64_t rank = 0; rank < kRanks; ++rank) {
          AttentionDims dims = s.dims();
          dims.held = TokenRuns::of_rank(tokens, kRanks, rank);
          const int64_t count = dims.held.count;
          dims.q_stride = s.out_row();
          std::vector<float> q(s.batch * count * s.out_row()), part_dout(q.size()), part(q.size()), dq(q.size());
          std::vector<float> part_lse(s.batch * s.heads * count), dkv(s.rows() * kv_row);
          const auto row_of = [&](int64_t b, int64_t i) { return b * tokens + dims.held.position(i); };
          for (int64_t b = 0; b < s.batch; ++b) {
            for (int64_t i = 0; i < count; ++i) {
              std::copy_n(&qkv[row_of(b, i) * s.row()], s.out_row(), &q[(b * count + i) * s.out_row()]);
              std::copy_n(&dout[row_of(b, i) * s.out_row()], s.out_row(), &part_dout[(b * count + i) * s.out_row()]);
            }
          }
          kernels::attention_forward(dims, q.data(), qkv.data() + s.k_at(), qkv.data() + s.v_at(), part.data(),
                                     part_lse.data());
          std::vector<float> part_scratch(kernels::attention_backward_scratch_elems(dims));
          AttentionDims back = dims;
          std::vector<float> kv(dkv.size());
          for (int64_t r = 0; r < s.rows(); ++r) std::copy_n(&qkv[r * s.row() + s.k_at()], kv_row, &kv[r * kv_row]);
          back.kv_stride = kv_row;
          const int64_t v_at = s.kv_heads * s.head_dim;
          kernels::attention_backward(back, q.data(), kv.data(), kv.data() + v_at, part.data(), part_lse.data(),
                                      part_dout.data(), dq.data(), dkv.data(), dkv.data() + v_at, part_scratch.data());
          for (int64_t b = 0; b < s.batch; ++b) {
            for (int64_t i = 0; i < count; ++i) {
              const int64_t whole = row_of(b, i), at = b * count + i;
              for (int64_t c = 0; c < s.out_row(); ++c) {
                const float o = out[whole * s.out_row() + c], d = dqkv[whole * s.row() + c];
                if (tokens % 256 == 0) {  // the same tiles: the same bits
                  differing += part[at * s.out_row() + c] != o || dq[at * s.out_row() + c] != d ? 1 : 0;
                } else {
                  differing += std::abs(part[at * s.out_row() + c] - o) > 1e-5 ? 1 : 0;
                  differing += std::abs(dq[at * s.out_row() + c] - d) > 1e-5 ? 1 : 0;
                }
              }
            }
          }
          for (size_t i = 0; i < dkv.size(); ++i) dkv_sum[i] += dkv[i];
        }
        CHECK(differing == 0);
        double worst = 0;
        for (int64_t r = 0; r < s.rows(); ++r) {
          for (int64_t c = 0; c < kv_row; ++c) {
            worst = std::max(worst, std::abs(dkv_sum[r * kv_row + c] - dqkv[r * s.row() + s.k_at() + c]));
          }
        }
        CHECK(worst < 2e-5);
      }
    }
  }

  TEST_CASE_TEMPLATE("rows part by part: the same output, and ranks' dk and dv are subtrees of one rank's", T, float,
                     bf16, f16) {
    constexpr int64_t kTokens = 512, kParts = 4;
    for (const Shape& s : {Shape{2, kTokens, 4, 2, 16}, Shape{2, kTokens, 2, 2, 24, {.window = 90}}}) {
      const int64_t row = s.row(), out_row = s.out_row(), kv_row = row - out_row, v_at = kv_row / 2;
      const auto qkv = normals<T>("qkv", s.rows() * row), dout = normals<T>("dout", s.rows() * out_row);
      const Run<T> plain = run_kernel(s, qkv, dout);
      struct Got {
        std::vector<T> out, dq;
        std::vector<float> dkv;
      };
      const auto place_of = [&](const TokenRuns& held, int64_t r) {
        const auto [sample, position] = held.place(r, s.batch);
        return sample * kTokens + position;
      };
      const TokenRuns all = TokenRuns::of_rank(kTokens, 1, 0, kParts);
      std::vector<T> kv(s.rows() * kv_row);
      for (int64_t r = 0; r < s.rows(); ++r) {
        std::copy_n(&qkv[place_of(all, r) * row + s.k_at()], kv_row, &kv[r * kv_row]);
      }
      const auto run_rank = [&](int64_t cp, int64_t rank) {
        AttentionDims dims = s.dims();
        dims.held = TokenRuns::of_rank(kTokens, cp, rank, kParts);
        dims.key_parts = kParts;
        dims.q_stride = out_row;
        dims.kv_stride = kv_row;
        const int64_t rows = s.batch * dims.held.count;
        std::vector<T> q(rows * out_row), d(q.size());
        for (int64_t r = 0; r < rows; ++r) {
          std::copy_n(&qkv[place_of(dims.held, r) * row], out_row, &q[r * out_row]);
          std::copy_n(&dout[place_of(dims.held, r) * out_row], out_row, &d[r * out_row]);
        }
        Got got{std::vector<T>(q.size()), std::vector<T>(q.size()), std::vector<float>(kv.size())};
        std::vector<float> lse(rows * s.heads), scratch(kernels::attention_backward_scratch_elems(dims));
        kernels::attention_forward(dims, q.data(), kv.data(), kv.data() + v_at, got.out.data(), lse.data());
        kernels::attention_backward(dims, q.data(), kv.data(), kv.data() + v_at, got.out.data(), lse.data(), d.data(),
                                    got.dq.data(), got.dkv.data(), got.dkv.data() + v_at, scratch.data());
        int64_t differing = 0;
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = place_of(dims.held, r);
          differing += std::memcmp(&got.out[r * out_row], &plain.out[at * out_row], out_row * sizeof(T)) != 0;
        }
        CHECK(differing == 0);
        return got;
      };
      const Got one = run_rank(1, 0);
      for (const int64_t cp : {2, 4}) {
        std::vector<Got> ranks;
        std::vector<T> dq;
        for (int64_t rank = 0; rank < cp; ++rank) {
          ranks.push_back(run_rank(cp, rank));
          dq.insert(dq.end(), ranks.back().dq.begin(), ranks.back().dq.end());
        }
        CHECK(same_bits(dq, one.dq));
        for (int64_t step = 1; step < cp; step *= 2) {
          for (int64_t rank = 0; rank < cp; rank += 2 * step) {
            for (size_t i = 0; i < kv.size(); ++i) ranks[rank].dkv[i] += ranks[rank + step].dkv[i];
          }
        }
        CHECK(same_bits(ranks[0].dkv, one.dkv));
      }
      double worst = 0, largest = 0;
      for (int64_t r = 0; r < s.rows(); ++r) {
        for (int64_t c = 0; c < kv_row; ++c) {
          const double wanted = to_f32(plain.grad[place_of(all, r) * row + s.k_at() + c]);
          worst = std::max(worst, std::abs(one.dkv[r * kv_row + c] - wanted));
          largest = std::max(largest, std::abs(wanted));
        }
      }
      CHECK(worst <= largest * (sizeof(T) == 4 ? 1e-6 : std::is_same_v<T, bf16> ? 4e-3 : 5e-4));
    }
  }

  TEST_CASE("large scores do not overflow, and a NaN shows") {
    const Shape s{1, 90, 1, 1, 16};
    auto qkv = normals<float>("qkv", s.rows() * s.row(), 30.0);  // scores in the thousands
    const auto dout = normals<float>("dout", s.rows() * s.out_row());
    const Reference ref = naive_forward(s, doubles(qkv));
    const Run<float> run = run_kernel(s, qkv, dout);
    // a score of 4000 is known to 4000 units in the last place of 1, and exp turns that into a relative error
    check_close(run.out, ref.out, {.relative = 4000 * 16 * kF32Unit, .absolute = 4000 * 16 * kF32Unit * 30});
    for (const float g : run.grad) REQUIRE(std::isfinite(g));
    qkv[40 * s.row()] = NAN;  // q of token 40
    const Run<float> spoilt = run_kernel(s, qkv, dout);
    CHECK(std::isfinite(spoilt.out[39 * s.out_row()]));
    CHECK(std::isnan(spoilt.out[40 * s.out_row()]));
    CHECK(std::isnan(spoilt.grad[40 * s.row()]));
  }

  TEST_CASE_TEMPLATE("decoding a token gives the row that forward gives", T, float, bf16, f16) {
    std::vector<float> slopes(4);
    kernels::alibi_slopes(4, 0, 4, slopes.data());
    for (const auto& [tokens, window] :
         {std::pair<int64_t, int64_t>{1, 0}, {64, 0}, {65, 0}, {150, 0}, {150, 70}, {300, 0}}) {
      CAPTURE(tokens);
      Shape s{2, tokens, 4, 2, 24};
      s.mask.window = window;
      if (window > 0 || tokens == 300) s.slopes = slopes.data();
      s.rounded = tokens == 300;
      if (tokens == 65) s.cap = 0.7f;
      const std::vector<float> sinks = {0.5f, -2.0f, 3.0f, 1.0f};
      if (tokens == 64 || window > 0) s.sinks = sinks.data();
      if (tokens == 150 && window == 0) s.mask.chunk = 100;
      const int64_t capacity = tokens + 3, kv_row = s.kv_heads * s.head_dim;
      const auto qkv = normals<T>("qkv", s.rows() * s.row());
      const Reference ref = naive_forward(s, doubles(qkv));
      std::vector<T> q(s.batch * s.out_row()), k(s.batch * capacity * kv_row), v(k), out(q.size());
      std::vector<double> wanted;
      for (int64_t b = 0; b < s.batch; ++b) {
        for (int64_t t = 0; t < tokens; ++t) {
          const T* row = &qkv[(b * tokens + t) * s.row()];
          std::copy_n(row + s.k_at(), kv_row, &k[(b * capacity + t) * kv_row]);
          std::copy_n(row + s.v_at(), kv_row, &v[(b * capacity + t) * kv_row]);
        }
        const int64_t last = b * tokens + tokens - 1;
        std::copy_n(&qkv[last * s.row()], s.out_row(), &q[b * s.out_row()]);
        wanted.insert(wanted.end(), &ref.out[last * s.out_row()], &ref.out[last * s.out_row()] + s.out_row());
      }
      kernels::attention_decode(s.dims(), tokens - 1, capacity, q.data(), k.data(), v.data(), out.data());
      check_close(out, wanted, chain_of_sums<T>(tokens));
    }
  }
}
