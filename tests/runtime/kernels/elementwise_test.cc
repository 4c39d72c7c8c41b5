#include "runtime/kernels/elementwise.h"

#include <limits>

#include "kernel_testing.h"
#include "runtime/kernels/simd.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

constexpr double kPi = 3.14159265358979323846;

double gelu_tanh(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x))); }
double gelu_erf(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double silu(double x) { return x / (1 + std::exp(-x)); }

/// Values from -12 to 12, denser around 0, and the ends.
template <typename T>
std::vector<T> sweep() {
  std::vector<T> x = normals<T>("sweep", 5001, 3.0);
  for (const float v : {0.0f, -0.0f, 1e-20f, -1e-20f, 12.0f, -12.0f, 40.0f, -40.0f, 1e4f, -1e4f}) {
    kernels::store_f32(&x.emplace_back(), v);
  }
  return x;
}

/// forward and backward of one map, against it and its slope in double, and a NaN through both.
template <typename T>
void check_map(double (*map)(double), void (*forward)(const T*, T*, int64_t),
               void (*backward)(const T*, const T*, T*, int64_t)) {
  auto x = sweep<T>();
  kernels::store_f32(&x.front(), 1.0f);
  const int64_t count = std::ssize(x);
  const auto dy = normals<T>("dy", count);
  std::vector<T> y(x.size()), dx(x.size());
  forward(x.data(), y.data(), count);
  backward(dy.data(), x.data(), dx.data(), count);
  std::vector<double> wanted, wanted_dx;
  for (int64_t i = 0; i < count; ++i) {
    double at = to_f32(x[i]);
    wanted.push_back(map(at));
    // relu has a kink at 0, where a difference is of no use; its slope at 0 is 0 by convention
    const bool kink = map(-1.0) == 0 && std::abs(at) <= kFiniteDifferenceStep;
    const double at_slope = kink ? (at > 0 ? 1.0 : 0.0) : slope([&] { return map(at); }, at);
    wanted_dx.push_back(at_slope * to_f32(dy[i]));
  }
  Tolerance tolerance = pointwise<T>();
  tolerance.absolute *= 4;  // |x| is up to 12 where the differences near 1 are multiplied by it
  check_close(y, wanted, tolerance);
  Tolerance slope_tolerance = tolerance + kFiniteDifference;
  check_close(dx, wanted_dx, slope_tolerance);

  std::vector<T> nan(37), out(37), ones(37, x.front());
  for (T& v : nan) store_nan(v);
  forward(nan.data(), out.data(), 37);
  for (const T v : out) REQUIRE(std::isnan(to_f32(v)));
  backward(nan.data(), ones.data(), out.data(), 37);
  for (const T v : out) REQUIRE(std::isnan(to_f32(v)));
}

template <typename T>
double relu(double x) {
  return x < 0 ? 0 : x;
}

template <typename T>
double gelu_quick(double x) {
  return x / (1 + std::exp(-1.702 * x));
}
template <typename T>
double relu2(double x) {
  return x < 0 ? 0 : x * x;
}

double sum_of_squares(const float* x, int64_t count) {
  ExactSum sum;
  kernels::add_squares(x, count, sum);
  return sum.value();
}

}  // namespace

TEST_SUITE("runtime/kernels/elementwise") {
  TEST_CASE("exp is right to 2e-7 over its range, and at its ends") {
    double worst = 0;
    for (double x = -87.3; x < 88.3; x += 0.00037) {
      const float at = static_cast<float>(x);
      worst = std::max(worst, std::abs(kernels::exp_f32(at) / std::exp(static_cast<double>(at)) - 1));
    }
    MESSAGE("worst relative error of exp: ", worst);
    CHECK(worst < 2e-7);
    CHECK(kernels::exp_f32(0.0f) == 1.0f);
    CHECK(kernels::exp_f32(-INFINITY) == 0.0f);
    CHECK(kernels::exp_f32(-200.0f) == 0.0f);
    CHECK(kernels::exp_f32(INFINITY) == INFINITY);
    CHECK(kernels::exp_f32(89.5f) == INFINITY);
    CHECK(std::isnan(kernels::exp_f32(NAN)));
    CHECK(kernels::exp_f32(-87.8f) == 0.0f);
    CHECK(std::isnan(kernels::exp_f32(std::bit_cast<float>(0x7fc00001u))));  // whatever bits the NaN carries
    CHECK(std::isnan(kernels::exp_f32(std::bit_cast<float>(0xff8001ffu))));
  }

  TEST_CASE("tanh is right to 3e-7 of itself, near 0 too, and bounded") {
    double worst = 0;
    for (double x = -12; x < 12; x += 0.00037) {
      const auto at = static_cast<float>(x);
      worst = std::max(worst, std::abs(kernels::tanh_f32(at) / std::tanh(static_cast<double>(at)) - 1));
    }
    for (const float at : {1e-30f, -3e-8f, 0.002f, -0.02f}) {
      worst = std::max(worst, std::abs(kernels::tanh_f32(at) / std::tanh(static_cast<double>(at)) - 1));
    }
    MESSAGE("worst relative error of tanh: ", worst);
    CHECK(worst < 3e-7);
    CHECK(kernels::tanh_f32(0.0f) == 0.0f);
    CHECK(kernels::tanh_f32(INFINITY) == 1.0f);
    CHECK(kernels::tanh_f32(-300.0f) == -1.0f);
    CHECK(std::isnan(kernels::tanh_f32(NAN)));
  }

  TEST_CASE_TEMPLATE("caps and clips", T, float, bf16, f16) {
    const int64_t count = 1000;
    const auto x = normals<T>("x", count), dy = normals<T>("dy", count);
    auto capped = x, clipped = x, grad = dy;
    kernels::cap(capped.data(), 1.5f, count);
    kernels::clip(clipped.data(), 0.75f, count);
    kernels::clip_backward(x.data(), grad.data(), 0.75f, count);
    std::vector<double> wanted = doubles(x);
    for (double& v : wanted) v = 1.5 * std::tanh(v / 1.5);
    check_close(capped, wanted, pointwise<T>());
    int outside = 0;
    for (int64_t i = 0; i < count; ++i) {
      const bool out = std::abs(to_f32(x[i])) > 0.75f;
      outside += out;
      REQUIRE(to_f32(clipped[i]) == std::clamp(to_f32(x[i]), -0.75f, 0.75f));
      REQUIRE(to_f32(grad[i]) == (out ? 0.0f : to_f32(dy[i])));
    }
    CHECK(outside > 300);
    grad = dy;
    kernels::clip_backward(clipped.data(), grad.data(), 0.75f, count);
    CHECK(same_bits(grad, dy));  // the bound itself is inside
  }

  TEST_CASE("the normal distribution is right to 1e-6 of itself in the lower tail, 2e-7 elsewhere") {
    for (double x = -12; x < 12; x += 0.0013) {
      const float at = static_cast<float>(x);
      float gauss;
      const double got = kernels::normal_cdf_f32(at, &gauss);
      const double wanted = 0.5 * std::erfc(-static_cast<double>(at) / std::sqrt(2.0));
      const double exact_gauss = std::exp(-0.5 * static_cast<double>(at) * at);
      // exp's argument x^2/2 is rounded: a relative error of the result of x^2/2 units
      const double tail = 4e-7 + 0.5 * x * x * 2 * kF32Unit;
      REQUIRE(std::abs(got - wanted) <= (x < 0 ? tail * wanted : 2e-7));
      REQUIRE(std::abs(gauss - exact_gauss) <= tail * exact_gauss);
    }
  }

  TEST_CASE("rounding to bf16 without a branch gives the bits of to_bf16") {
    for (uint64_t i = 0; i < 300000; ++i) {
      const float x = std::bit_cast<float>(static_cast<uint32_t>(mix64(i)));
      bf16 got;
      kernels::store_f32(&got, x);
      REQUIRE(got.bits == to_bf16(x).bits);
    }
    for (const float x : {NAN, -NAN, INFINITY, -INFINITY, 3.4e38f, std::bit_cast<float>(0x7f800001u)}) {
      bf16 got;
      kernels::store_f32(&got, x);
      CHECK(got.bits == to_bf16(x).bits);
    }
  }

  TEST_CASE("f16 is read and rounded without a branch as by f16_to_f32 and f32_to_f16") {
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
      const float got = kernels::load_f32(f16{static_cast<uint16_t>(bits)});
      const float wanted = f16_to_f32(static_cast<uint16_t>(bits));
      REQUIRE(std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(wanted));
    }
    for (uint64_t i = 0; i < 300000; ++i) {
      // Random bits, and exponents around those of f16.
      const uint32_t random = static_cast<uint32_t>(mix64(i));
      const float x = std::bit_cast<float>(
          i % 2 == 0 ? random : (random & 0x807fffffu) | static_cast<uint32_t>(95 + mix64(i) % 53) << 23);
      f16 got;
      kernels::store_f32(&got, x);
      REQUIRE(got.bits == f32_to_f16(x));
    }
  }

  TEST_CASE_TEMPLATE("activations and their slopes agree with libm", T, float, bf16, f16) {
    SUBCASE("gelu by tanh") { check_map<T>(gelu_tanh, kernels::gelu_tanh_forward<T>, kernels::gelu_tanh_backward<T>); }
    SUBCASE("gelu by erf") { check_map<T>(gelu_erf, kernels::gelu_erf_forward<T>, kernels::gelu_erf_backward<T>); }
    SUBCASE("quick gelu") {
      check_map<T>(gelu_quick<T>, kernels::gelu_quick_forward<T>, kernels::gelu_quick_backward<T>);
    }
    SUBCASE("silu") { check_map<T>(silu, kernels::silu_forward<T>, kernels::silu_backward<T>); }
    SUBCASE("relu") { check_map<T>(relu<T>, kernels::relu_forward<T>, kernels::relu_backward<T>); }
  }

  TEST_CASE_TEMPLATE("value and gradient in one pass have the bits of the two passes", T, float, bf16, f16) {
    const auto check = [](auto forward, auto backward, auto both) {
      const auto x = sweep<T>();
      const int64_t count = std::ssize(x);
      auto dy = normals<T>("dy", count);
      std::vector<T> y(x.size()), dx(x.size()), y_too(x.size());
      forward(x.data(), y.data(), count);
      backward(dy.data(), x.data(), dx.data(), count);
      both(x.data(), dy.data(), y_too.data(), count);
      CHECK(std::memcmp(y.data(), y_too.data(), y.size() * sizeof(T)) == 0);
      CHECK(std::memcmp(dx.data(), dy.data(), dx.size() * sizeof(T)) == 0);
    };
    check(kernels::gelu_tanh_forward<T>, kernels::gelu_tanh_backward<T>, kernels::gelu_tanh_both<T>);
    check(kernels::gelu_erf_forward<T>, kernels::gelu_erf_backward<T>, kernels::gelu_erf_both<T>);
    check(kernels::gelu_quick_forward<T>, kernels::gelu_quick_backward<T>, kernels::gelu_quick_both<T>);
    check(kernels::relu_forward<T>, kernels::relu_backward<T>, kernels::relu_both<T>);
    check(kernels::relu2_forward<T>, kernels::relu2_backward<T>, kernels::relu2_both<T>);
    check(kernels::silu_forward<T>, kernels::silu_backward<T>, kernels::silu_both<T>);
  }

  TEST_CASE("activations take the published values") {
    // x; gelu, its tanh form, quick gelu, silu, to nine digits
    const double table[][5] = {{-3, -0.004049694, -0.003637392, -0.018071310, -0.142277620},
                               {-1, -0.158655254, -0.158808009, -0.154204234, -0.268941421},
                               {0.5, 0.345731231, 0.345714010, 0.350388437, 0.311229666},
                               {2, 1.954499736, 1.954597694, 1.935658623, 1.761594156}};
    for (const auto& row : table) {
      const auto x = static_cast<float>(row[0]);
      CAPTURE(x);
      float erf, tanh, quick, silu;
      kernels::gelu_erf_forward(&x, &erf, 1);
      kernels::gelu_tanh_forward(&x, &tanh, 1);
      kernels::gelu_quick_forward(&x, &quick, 1);
      kernels::silu_forward(&x, &silu, 1);
      const float got[] = {erf, tanh, quick, silu};
      for (int k = 0; k < 4; ++k) CHECK(std::abs(got[k] - row[k + 1]) < 5e-7);
    }
  }

  TEST_CASE_TEMPLATE("squared relu and its slope", T, float, bf16, f16) {
    const auto x = normals<T>("x", 501, 3.0), dy = normals<T>("dy", 501);
    std::vector<T> y(x.size()), dx(x.size());
    kernels::relu2_forward(x.data(), y.data(), std::ssize(x));
    kernels::relu2_backward(dy.data(), x.data(), dx.data(), std::ssize(x));
    std::vector<double> wanted, wanted_dx;
    for (size_t i = 0; i < x.size(); ++i) {
      const double at = to_f32(x[i]);
      wanted.push_back(relu2<T>(at));
      wanted_dx.push_back(at < 0 ? 0 : 2 * at * to_f32(dy[i]));
    }
    check_close(y, wanted, pointwise<T>());
    check_close(dx, wanted_dx, pointwise<T>());
    std::vector<T> nan(1), out(1);
    store_nan(nan[0]);
    kernels::relu2_forward(nan.data(), out.data(), 1);
    CHECK(std::isnan(to_f32(out[0])));
  }

  TEST_CASE_TEMPLATE("gates and their slopes agree with libm", T, float, bf16, f16) {
    const int64_t rows = 5, ffn = 37;
    const std::pair<kernels::Gate, double (*)(double)> gates[] = {{kernels::Gate::kSilu, silu},
                                                                  {kernels::Gate::kGeluErf, gelu_erf},
                                                                  {kernels::Gate::kGeluTanh, gelu_tanh},
                                                                  {kernels::Gate::kRelu, relu<T>},
                                                                  {kernels::Gate::kGeluQuick, gelu_quick<T>},
                                                                  {kernels::Gate::kRelu2, relu2<T>}};
    for (const auto& [gate, act] : gates) {
      const auto activate = act;
      CAPTURE(static_cast<int>(gate));
      const auto gate_up = normals<T>("gate_up", rows * 2 * ffn, 3.0), dy = normals<T>("dy", rows * ffn);
      std::vector<T> y(rows * ffn), grad(gate_up.size());
      kernels::gated_forward(gate, gate_up.data(), y.data(), rows, ffn);
      kernels::gated_backward(gate, dy.data(), gate_up.data(), grad.data(), rows, ffn);
      auto at = doubles(gate_up);
      const auto forward = [&] {
        std::vector<double> out(rows * ffn);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < ffn; ++c) {
            out[r * ffn + c] = activate(at[r * 2 * ffn + c]) * at[r * 2 * ffn + ffn + c];
          }
        }
        return out;
      };
      check_close(y, forward(), pointwise<T>());
      Tolerance tolerance = pointwise<T>() + kFiniteDifference;
      tolerance.absolute *= 8;  // products of three numbers of magnitude 3
      check_close(grad, numeric_gradient(at, doubles(dy), forward), tolerance);
    }
  }

  TEST_CASE_TEMPLATE("the clamped gate and its slopes agree with libm, on either side of its bounds", T, float, bf16,
                     f16) {
    const int64_t rows = 5, ffn = 37;
    const kernels::ClampedGate of{.alpha = 1.702f, .limit = 2.0f};
    const auto gate_up = normals<T>("gate_up", rows * 2 * ffn, 3.0), dy = normals<T>("dy", rows * ffn);
    std::vector<T> y(rows * ffn), grad(gate_up.size());
    kernels::clamped_gate_forward(of, gate_up.data(), y.data(), rows, ffn);
    kernels::clamped_gate_backward(of, dy.data(), gate_up.data(), grad.data(), rows, ffn);
    auto at = doubles(gate_up);
    const auto forward = [&] {
      std::vector<double> out(rows * ffn);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < ffn; ++c) {
          const double gate = std::min(at[r * 2 * ffn + c], 2.0);
          const double up = std::clamp(at[r * 2 * ffn + ffn + c], -2.0, 2.0);
          out[r * ffn + c] = (up + 1) * gate / (1 + std::exp(-1.702f * gate));
        }
      }
      return out;
    };
    check_close(y, forward(), pointwise<T>());
    Tolerance tolerance = pointwise<T>() + kFiniteDifference;
    tolerance.absolute *= 8;  // products of three numbers of magnitude 3
    check_close(grad, numeric_gradient(at, doubles(dy), forward), tolerance);
    std::vector<T> nan(2), out(2);
    store_nan(nan[0]);
    kernels::clamped_gate_forward(of, nan.data(), out.data(), 1, 1);
    CHECK(std::isnan(to_f32(out[0])));
    std::swap(nan[0], nan[1]);
    kernels::clamped_gate_forward(of, nan.data(), out.data(), 1, 1);
    CHECK(std::isnan(to_f32(out[0])));
  }

  TEST_CASE_TEMPLATE("rotary turns pairs by the position's angle, keeps gaps and other channels, and turns back", T,
                     float, bf16, f16) {
    for (const auto& [head_dim, turning] : {std::pair<int64_t, int64_t>{6, 6}, {64, 16}, {320, 320}, {10, 4}}) {
      for (const bool interleaved : {false, true}) {
        CAPTURE(head_dim);
        CAPTURE(interleaved);
        const int64_t batch = 2, tokens = 5, rows = batch * tokens, heads = 3, stride = heads * head_dim + 4;
        const int64_t first_position = 11;
        const double factor = 1.25;
        std::vector<float> frequencies;
        for (int64_t i = 0; i < turning / 2; ++i) {
          frequencies.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / turning)));
        }
        std::vector<float> table(tokens * turning);
        kernels::rotary_table(table.data(), first_position, tokens, frequencies, factor);
        const kernels::RotaryDims dims{.rows = rows,
                                       .tokens = tokens,
                                       .heads = heads,
                                       .head_dim = head_dim,
                                       .stride = stride,
                                       .turning = turning,
                                       .interleaved = interleaved};
        const auto x = normals<T>("x", rows * stride);
        auto turned = x;
        kernels::rotary(dims, turned.data(), table.data(), false);
        auto wanted = doubles(x), back = wanted;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t h = 0; h < heads; ++h) {
            for (int64_t i = 0; i < turning / 2; ++i) {
              const double angle = static_cast<float>(first_position + r % tokens) * frequencies[i];
              const int64_t at = r * stride + h * head_dim + (interleaved ? 2 * i : i);
              double& a = wanted[at];
              double& b = wanted[at + (interleaved ? 1 : turning / 2)];
              const double a0 = a, b0 = b;
              a = factor * (a0 * std::cos(angle) - b0 * std::sin(angle));
              b = factor * (b0 * std::cos(angle) + a0 * std::sin(angle));
              back[at] *= factor * factor;
              back[at + (interleaved ? 1 : turning / 2)] *= factor * factor;
            }
          }
        }
        check_close(turned, wanted, pointwise<T>());
        kernels::rotary(dims, turned.data(), table.data(), true);
        Tolerance twice = pointwise<T>();
        twice.absolute += 4 * rounding_unit<T>() * 3;  // both turns round both elements of a pair, up to 5 in size
        check_close(turned, back, twice);
      }
    }
  }

  TEST_CASE_TEMPLATE("sums, biases and casts", T, float, bf16, f16) {
    const int64_t rows = 21, width = 133;
    const auto a = normals<T>("a", rows * width), b = normals<T>("b", rows * width), bias = normals<T>("bias", width);
    std::vector<double> sum(a.size()), biased(a.size()), columns(width, 0.5);
    for (int64_t i = 0; i < rows * width; ++i) {
      sum[i] = static_cast<double>(to_f32(a[i])) + to_f32(b[i]);
      biased[i] = static_cast<double>(to_f32(a[i])) + to_f32(bias[i % width]);
      columns[i % width] += to_f32(a[i]);
    }
    std::vector<T> out(a.size());
    kernels::add(a.data(), b.data(), out.data(), std::ssize(out));
    check_close(out, sum, pointwise<T>());
    out = a;
    kernels::add(out.data(), b.data(), out.data(), std::ssize(out));
    check_close(out, sum, pointwise<T>());
    kernels::add_scaled(a.data(), 0.75f, b.data(), out.data(), std::ssize(out));
    std::vector<double> scaled(a.size());
    for (size_t i = 0; i < a.size(); ++i) scaled[i] = to_f32(a[i]) + 0.75 * to_f32(b[i]);
    check_close(out, scaled, pointwise<T>());
    out = a;
    kernels::scale(out.data(), 0.75f, std::ssize(out));
    for (size_t i = 0; i < a.size(); ++i) scaled[i] = 0.75 * to_f32(a[i]);
    check_close(out, scaled, pointwise<T>());
    out = a;
    kernels::add_bias(out.data(), bias.data(), rows, width);
    check_close(out, biased, pointwise<T>());
    std::vector<float> dbias(width, 0.5f);
    kernels::bias_backward(a.data(), dbias.data(), rows, width);
    check_close(dbias, columns, sum_of<float>(rows));
  }

  TEST_CASE("float functions") {
    const int64_t count = 1001;
    const auto x = normals<float>("x", count), y = normals<float>("y", count);
    auto got = x;
    kernels::scale(got.data(), 0.3f, count);
    kernels::add_to(got.data(), y.data(), count);
    std::vector<bf16> rounded(count);
    kernels::cast(x.data(), rounded.data(), count);
    std::vector<float> back(count);
    kernels::cast(rounded.data(), back.data(), count);
    for (int64_t i = 0; i < count; ++i) {
      REQUIRE(std::abs(got[i] - (0.3 * x[i] + y[i])) < 1e-6);
      REQUIRE(rounded[i].bits == to_bf16(x[i]).bits);
      REQUIRE(back[i] == to_f32(rounded[i]));
    }
  }

  TEST_CASE("reductions over rows and squares give the same bits on any number of threads") {
    const int64_t rows = 700, width = 450;
    const auto x = normals<float>("x", rows * width);
    const auto h = normals<bf16>("h", rows * width);
    double exact = 0;
    for (const float v : x) exact += static_cast<double>(v) * v;
    double squares = 0;
    std::vector<float> sums, sums16;
    for (const int threads : {1, 2, 3, 7}) {
      CAPTURE(threads);
      with_threads(threads, [&] {
        std::vector<float> a(width), b(width);
        kernels::bias_backward(x.data(), a.data(), rows, width);
        kernels::bias_backward(h.data(), b.data(), rows, width);
        const double s = sum_of_squares(x.data(), rows * width);
        if (threads == 1) {
          sums = a;
          sums16 = b;
          squares = s;
        }
        CHECK(same_bits(a, sums));
        CHECK(same_bits(b, sums16));
        CHECK(s == squares);
      });
    }
    CHECK(squares == doctest::Approx(exact).epsilon(1e-12));
    ExactSum parts;  // cut at multiples of 16, in another order
    for (const int64_t begin : {1600, 0, 160}) {
      const int64_t end = begin == 0 ? 160 : begin == 160 ? 1600 : rows * width;
      kernels::add_squares(x.data() + begin, end - begin, parts);
    }
    CHECK(parts.value() == squares);
    CHECK(sum_of_squares(x.data(), 0) == 0.0);
    CHECK(sum_of_squares(x.data(), 5000) > 0.0);
  }

  TEST_CASE("squares of any sizes are added without loss") {
    constexpr int64_t kBlock = 16, kCount = 5 * 1024 + 7 * kBlock + 5;
    // How far apart the exponents are: all bits in the first sums, in the second, in the third, beyond all of them;
    // terms that ExactSum cuts off or calls infinite.
    for (const auto& [lowest, range] : {std::pair(-10, 6), {-20, 30}, {-40, 60}, {-50, 90}, {-90, 40}, {20, 60}}) {
      std::vector<float> x(kCount);
      for (int64_t i = 0; i < kCount; ++i) {
        const auto at = static_cast<uint64_t>(i), block = at / kBlock;
        x[i] = std::ldexp(normal_at(5, at), lowest + static_cast<int>(mix64(block + 77) % range));
        if (mix64(block) % 11 == 0) x[i] = 0;
      }
      ExactSum wanted;
      for (int64_t i = 0; i < kCount; i += kBlock) {
        double part[kBlock] = {};
        for (int64_t k = i; k < std::min(i + kBlock, kCount); ++k) part[k - i] = static_cast<double>(x[k]) * x[k];
        for (int64_t n = kBlock / 2; n > 0; n /= 2) {
          for (int64_t k = 0; k < n; ++k) part[k] += part[k + n];
        }
        wanted.add(part[0]);
      }
      CAPTURE(lowest);
      CHECK(wanted.value() > 0);
      CHECK(sum_of_squares(x.data(), kCount) == wanted.value());
    }
  }

  TEST_CASE("a NaN shows through every map") {
    std::vector<float> nan(40, NAN), out(40), ones(40, 1.0f);
    CHECK(std::isnan(sum_of_squares(nan.data(), 40)));
    kernels::gelu_tanh_backward(ones.data(), nan.data(), out.data(), 40);
    CHECK(std::isnan(out[39]));
    kernels::gelu_erf_backward(ones.data(), nan.data(), out.data(), 40);
    CHECK(std::isnan(out[39]));
    kernels::relu_backward(nan.data(), ones.data(), out.data(), 40);
    CHECK(std::isnan(out[39]));
    kernels::relu_backward(ones.data(), nan.data(), out.data(), 40);
    CHECK(std::isnan(out[39]));
    kernels::gated_forward(kernels::Gate::kSilu, nan.data(), out.data(), 1, 20);
    CHECK(std::isnan(out[19]));
    std::vector<bf16> rounded(40);
    kernels::cast(nan.data(), rounded.data(), 40);
    CHECK(std::isnan(to_f32(rounded[39])));
  }
}
