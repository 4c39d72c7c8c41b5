#include "runtime/kernels/norm.h"

#include "kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

constexpr float kEps = 1e-5f;

/// LayerNorm, or RMSNorm when not centred, in double.
std::vector<double> naive(const std::vector<double>& x, const std::vector<double>& weight,
                          const std::vector<double>& bias, int64_t rows, int64_t width, bool centred) {
  std::vector<double> y(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    const double* v = &x[r * width];
    double mean = 0, squares = 0;
    for (int64_t c = 0; c < width && centred; ++c) mean += v[c] / width;
    for (int64_t c = 0; c < width; ++c) squares += (v[c] - mean) * (v[c] - mean) / width;
    const double rstd = 1 / std::sqrt(squares + kEps);
    for (int64_t c = 0; c < width; ++c) y[r * width + c] = (v[c] - mean) * rstd * weight[c] + bias[c];
  }
  return y;
}

template <typename T>
kernels::Rows<const T> rows_of(const std::vector<T>& x, int64_t stride, int64_t at = 0) {
  return {DevicePtr<const T>(x.data() + at), stride};
}
template <typename T>
kernels::Rows<T> rows_to(std::vector<T>& x, int64_t stride, int64_t at = 0) {
  return {DevicePtr<T>(x.data() + at), stride};
}

template <typename T>
struct Run {
  std::vector<T> y, dx;
  std::vector<float> mean, rstd, dweight, dbias;
};

template <typename T>
Run<T> run_kernel(const std::vector<T>& x, const std::vector<T>& weight, const std::vector<T>& bias,
                  const std::vector<T>& dy, int64_t rows, int64_t width, bool centred) {
  Run<T> run{std::vector<T>(x.size()),        std::vector<T>(x.size()),
             std::vector<float>(rows),        std::vector<float>(rows),
             std::vector<float>(width, 0.5f), std::vector<float>(width, 0.25f)};  // gradients are added to
  const kernels::NormRows of{rows, width, kEps};
  const kernels::NormGradients to{DevicePtr(run.dweight.data()), DevicePtr(run.dbias.data())};
  if (centred) {
    kernels::layer_norm_forward(of, x.data(), weight.data(), bias.data(), run.y.data(), run.mean.data(),
                                run.rstd.data());
    kernels::layer_norm_backward(of, dy.data(), x.data(), weight.data(), run.mean.data(), run.rstd.data(),
                                 run.dx.data(), to);
  } else {
    kernels::rms_norm_forward(of, x.data(), weight.data(), run.y.data(), run.rstd.data());
    kernels::rms_norm_backward(of, dy.data(), x.data(), weight.data(), run.rstd.data(), run.dx.data(), to);
  }
  return run;
}

void round_to(float x, float* to) { *to = x; }
void round_to(float x, bf16* to) { *to = to_bf16(x); }

}  // namespace

TEST_SUITE("runtime/kernels/norm") {
  TEST_CASE_TEMPLATE("forward and backward agree with the naive norm and its finite differences", T, float, bf16, f16) {
    for (const bool centred : {true, false}) {
      for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{5, 33}, {9, 16}, {1, 7}, {11, 1}}) {
        CAPTURE(centred);
        CAPTURE(rows);
        CAPTURE(width);
        const auto x = normals<T>("x", rows * width, 2.0), weight = normals<T>("weight", width);
        const auto bias = centred ? normals<T>("bias", width) : std::vector<T>(width);
        const auto dy = normals<T>("dy", rows * width);
        const Run<T> run = run_kernel(x, weight, bias, dy, rows, width, centred);
        auto xd = doubles(x), wd = doubles(weight), bd = doubles(bias);
        const auto forward = [&, rows = rows, width = width] { return naive(xd, wd, bd, rows, width, centred); };
        check_close(run.y, forward(), chain_of_sums<T>(width));
        // A row of width 1 has 1/sqrt(eps) as its slope scale: its exact dx is 0 only up to that factor.
        Tolerance tolerance = chain_of_sums<T>(width) + kFiniteDifference;
        if (width == 1) tolerance.absolute *= 1000;
        check_close(run.dx, numeric_gradient(xd, doubles(dy), forward), tolerance);
        auto dweight = numeric_gradient(wd, doubles(dy), forward);
        for (double& g : dweight) g += 0.5;
        check_close(run.dweight, dweight, chain_of_sums<float>(rows) + kFiniteDifference);
        if (centred) {
          auto dbias = numeric_gradient(bd, doubles(dy), forward);
          for (double& g : dbias) g += 0.25;
          check_close(run.dbias, dbias, chain_of_sums<float>(rows) + kFiniteDifference);
        }
      }
    }
  }

  TEST_CASE("eps counts where a row hardly varies") {
    const int64_t rows = 3, width = 40;
    const auto x = normals<float>("x", rows * width, 1e-3);  // variance 1e-6, eps 1e-5
    const auto weight = normals<float>("weight", width), dy = normals<float>("dy", rows * width);
    const std::vector<float> bias(width);
    for (const bool centred : {true, false}) {
      const Run<float> run = run_kernel(x, weight, bias, dy, rows, width, centred);
      check_close(run.y, naive(doubles(x), doubles(weight), doubles(bias), rows, width, centred),
                  chain_of_sums<float>(width));
    }
  }

  TEST_CASE("bias is optional in both directions, and dx may overwrite dy") {
    const int64_t rows = 6, width = 40;
    const auto x = normals<float>("x", rows * width), weight = normals<float>("weight", width);
    const auto dy = normals<float>("dy", rows * width);
    const std::vector<float> zero(width);
    const Run<float> with_zero = run_kernel(x, weight, zero, dy, rows, width, true);
    std::vector<float> y(x.size()), mean(rows), rstd(rows), dweight(width, 0.5f), in_place = dy;
    const kernels::NormRows of{rows, width, kEps};
    kernels::layer_norm_forward<float>(of, x.data(), weight.data(), nullptr, y.data(), mean.data(), rstd.data());
    check_close(y, doubles(with_zero.y), pointwise<float>());
    kernels::layer_norm_backward<float>(of, in_place.data(), x.data(), weight.data(), mean.data(), rstd.data(),
                                        in_place.data(), {.weight = DevicePtr(dweight.data())});
    CHECK(same_bits(in_place, with_zero.dx));
    CHECK(same_bits(dweight, with_zero.dweight));
  }

  TEST_CASE_TEMPLATE("a gradient that is added is rounded first, and then the sum", T, float, bf16) {
    const int64_t rows = 6, width = 641;
    const auto x = normals<T>("x", rows * width), weight = normals<T>("weight", width);
    const auto dy = normals<T>("dy", rows * width), held = normals<T>("held", rows * width);
    std::vector<T> y(x.size());
    std::vector<float> mean(rows), rstd(rows);
    const kernels::NormRows of{rows, width, kEps}, adding{rows, width, kEps, 0, true};
    const auto check = [&](const auto& backward) {
      std::vector<T> own(x.size()), sums = held;
      backward(of, own);
      backward(adding, sums);
      for (size_t i = 0; i < own.size(); ++i) round_to(to_f32(held[i]) + to_f32(own[i]), &own[i]);
      CHECK(same_bits(sums, own));
    };
    kernels::layer_norm_forward<T>(of, x.data(), weight.data(), nullptr, y.data(), mean.data(), rstd.data());
    check([&](const kernels::NormRows& how, std::vector<T>& dx) {
      kernels::layer_norm_backward(how, dy.data(), x.data(), weight.data(), mean.data(), rstd.data(), dx.data(), {});
    });
    kernels::rms_norm_forward(of, x.data(), weight.data(), y.data(), rstd.data());
    check([&](const kernels::NormRows& how, std::vector<T>& dx) {
      kernels::rms_norm_backward(how, dy.data(), x.data(), weight.data(), rstd.data(), dx.data(), {});
    });
  }

  TEST_CASE("a large common offset does not spoil the variance") {
    const int64_t width = 768;
    auto x = normals<float>("x", width);
    for (float& v : x) v += 1000.0f;
    const std::vector<float> weight(width, 1.0f), bias(width);
    const Run<float> run = run_kernel(x, weight, bias, x, 1, width, true);
    // x itself is known to 1000 * 2^-24 = 6e-5, and the float mean of it to a few of those
    check_close(run.y, naive(doubles(x), doubles(weight), doubles(bias), 1, width, true), {.absolute = 1e-3});
  }

  TEST_CASE_TEMPLATE("the norm of heads is RMSNorm of each, and leaves the gaps", T, float, bf16, f16) {
    const int64_t rows = 5, heads = 3, head_dim = 10, x_stride = 34, y_stride = 37;
    const auto x = normals<T>("x", rows * x_stride, 2.0), weight = normals<T>("weight", head_dim);
    const auto dy = normals<T>("dy", rows * y_stride);
    auto y = dy;
    const kernels::HeadNorm norm{.rows = rows, .heads = heads, .head_dim = head_dim, .eps = kEps};
    kernels::head_norm_forward(norm, rows_of(x, x_stride), weight.data(), static_cast<const T*>(nullptr),
                               rows_to(y, y_stride));
    auto grad = dy;
    std::vector<float> dweight(head_dim, 0.5f), stats(2 * rows * heads);
    kernels::head_norm_backward(norm, rows_of(grad, y_stride), rows_of(x, x_stride), weight.data(),
                                rows_to(grad, y_stride), {DevicePtr(dweight.data()), nullptr, {}}, stats.data());

    // The same heads as rows of a norm.
    std::vector<T> xs, ys, dys, dxs;
    const auto gather = [&](const std::vector<T>& from, int64_t stride, std::vector<T>& to) {
      for (int64_t r = 0; r < rows; ++r) {
        to.insert(to.end(), &from[r * stride], &from[r * stride] + heads * head_dim);
      }
    };
    gather(x, x_stride, xs), gather(y, y_stride, ys), gather(dy, y_stride, dys), gather(grad, y_stride, dxs);
    const std::vector<T> bias(head_dim);
    const Run<T> run = run_kernel(xs, weight, bias, dys, rows * heads, head_dim, false);
    CHECK(same_bits(ys, run.y));
    CHECK(same_bits(dxs, run.dx));
    check_close(dweight, doubles(run.dweight), sum_of<float>(rows * heads));  // another order of adding
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = heads * head_dim; c < y_stride; ++c) {
        REQUIRE(to_f32(y[r * y_stride + c]) == to_f32(dy[r * y_stride + c]));
      }
    }
  }

  TEST_CASE("LayerNorm of each head has a weight of its own, counted from any number") {
    const int64_t rows = 6, heads = 3, head_dim = 10, stride = 33;
    const auto x = normals<float>("x", rows * stride, 2.0), weight = normals<float>("weight", heads * head_dim);
    const auto dy = normals<float>("dy", rows * stride);
    const kernels::HeadNorm norm{.rows = rows,
                                 .heads = heads,
                                 .head_dim = head_dim,
                                 .eps = kEps,
                                 .offset = 1,
                                 .centred = true,
                                 .own_weights = true};
    auto y = x, dx = dy;
    std::vector<float> dweight(heads * head_dim, 0.5f), stats(2 * rows * heads);
    kernels::head_norm_forward(norm, rows_of(x, stride), weight.data(), static_cast<const float*>(nullptr),
                               rows_to(y, stride));
    kernels::head_norm_backward(norm, rows_of(dx, stride), rows_of(x, stride), weight.data(), rows_to(dx, stride),
                                {DevicePtr(dweight.data()), nullptr, {}}, stats.data());
    for (int64_t h = 0; h < heads; ++h) {  // the same head as rows of a norm
      std::vector<float> xs, ys, dys, dxs, factor;
      for (int64_t c = 0; c < head_dim; ++c) factor.push_back(weight[h * head_dim + c] + 1);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = r * stride + h * head_dim;
        xs.insert(xs.end(), &x[at], &x[at] + head_dim), ys.insert(ys.end(), &y[at], &y[at] + head_dim);
        dys.insert(dys.end(), &dy[at], &dy[at] + head_dim), dxs.insert(dxs.end(), &dx[at], &dx[at] + head_dim);
      }
      const std::vector<float> none(head_dim);
      const Run<float> run = run_kernel(xs, factor, none, dys, rows, head_dim, true);
      check_close(ys, doubles(run.y), pointwise<float>());
      check_close(dxs, doubles(run.dx), chain_of_sums<float>(head_dim));
      const std::vector<float> own(&dweight[h * head_dim], &dweight[h * head_dim] + head_dim);
      check_close(own, doubles(run.dweight), sum_of<float>(rows));
    }
  }

  TEST_CASE_TEMPLATE("LayerNorm of heads with one weight and one bias is that of rows", T, float, bf16, f16) {
    const int64_t rows = 5, heads = 3, head_dim = 10, stride = heads * head_dim;
    const auto x = normals<T>("x", rows * stride, 2.0), dy = normals<T>("dy", rows * stride);
    const auto weight = normals<T>("weight", head_dim), bias = normals<T>("bias", head_dim);
    const kernels::HeadNorm norm{.rows = rows, .heads = heads, .head_dim = head_dim, .eps = kEps, .centred = true};
    auto y = x, dx = dy;
    std::vector<float> dweight(head_dim, 0.5f), dbias(head_dim, 0.25f), stats(2 * rows * heads);
    kernels::head_norm_forward(norm, rows_of(x, stride), weight.data(), bias.data(), rows_to(y, stride));
    kernels::head_norm_backward(norm, rows_of(dx, stride), rows_of(x, stride), weight.data(), rows_to(dx, stride),
                                {DevicePtr(dweight.data()), DevicePtr(dbias.data()), {}}, stats.data());
    const Run<T> run = run_kernel(x, weight, bias, dy, rows * heads, head_dim, true);
    CHECK(same_bits(y, run.y));
    CHECK(same_bits(dx, run.dx));
    check_close(dweight, doubles(run.dweight), sum_of<float>(rows * heads));  // another order of adding
    for (int64_t c = 0; c < head_dim; ++c) {
      double sum = 0.25;
      for (int64_t r = 0; r < rows * heads; ++r) sum += to_f32(dy[r * head_dim + c]);
      CHECK(dbias[c] == doctest::Approx(sum).epsilon(1e-5));
    }
  }

  TEST_CASE_TEMPLATE("a norm over channels of several ranks is that of all of them", T, float, bf16, f16) {
    const int64_t rows = 7, width = 24, parts = 2;  // two ranks of two parts, which hold every channel twice
    const auto x = normals<T>("x", rows * width, 2.0), weight = normals<T>("weight", width);
    const auto dy = normals<T>("dy", rows * width);
    const Run<T> whole = run_kernel(x, weight, std::vector<T>(width), dy, rows, width, false);
    const int64_t share = width / 2;
    const kernels::WholeNorm norm{.rows = rows, .width = share, .channels = width, .copies = 2, .eps = kEps};
    std::vector<float> squares(rows), dots(rows);
    for (int64_t rank = 0; rank < 4; ++rank) {
      const int64_t at = rank / 2 * share;
      std::vector<float> sums(parts * 2 * rows);
      const kernels::RowDots of{rows, share, parts, 2 * rows};
      const kernels::Rows<const T> xs = rows_of(x, width, at);
      kernels::row_dots(of, xs, xs, static_cast<const T*>(nullptr), 0.0f, sums.data());
      kernels::row_dots(of, rows_of(dy, width, at), xs, &weight[at], 0.0f, sums.data() + rows);
      for (int64_t r = 0; r < rows; ++r) {
        squares[r] += sums[r] + sums[2 * rows + r];
        dots[r] += (sums[rows + r] + sums[3 * rows + r]) * 2;  // each copy has half of the gradient in a real run
      }
    }
    for (float& v : dots) v /= 2;
    for (int64_t rank = 0; rank < 2; ++rank) {
      const int64_t at = rank * share;
      auto y = x, dx = dy;
      std::vector<float> dweight(share, 0.5f);
      kernels::whole_norm_forward(norm, rows_of(x, width, at), &weight[at], squares.data(), rows_to(y, width, at));
      kernels::whole_norm_backward(norm, rows_of(dx, width, at), rows_of(x, width, at), &weight[at], squares.data(),
                                   dots.data(), rows_to(dx, width, at), {.weight = DevicePtr(dweight.data())});
      const auto part = [&](const std::vector<T>& from) {
        std::vector<T> out;
        for (int64_t r = 0; r < rows; ++r) {
          out.insert(out.end(), &from[r * width + at], &from[r * width + at] + share);
        }
        return out;
      };
      check_close(part(y), doubles(part(whole.y)), chain_of_sums<T>(width));
      check_close(part(dx), doubles(part(whole.dx)), chain_of_sums<T>(width));
      const std::vector<float> wanted(&whole.dweight[at], &whole.dweight[at] + share);
      check_close(dweight, doubles(wanted), chain_of_sums<float>(rows));
    }
  }

  TEST_CASE("norms without weights, and with weights that count from 1, are those of the factors") {
    const int64_t rows = 9, width = 33;
    const auto x = normals<float>("x", rows * width, 2.0), weight = normals<float>("weight", width);
    const auto bias = normals<float>("bias", width), dy = normals<float>("dy", rows * width);
    for (const bool none : {true, false}) {
      for (const bool centred : {true, false}) {
        std::vector<float> factor(width, 1.0f);
        for (int64_t c = 0; c < width && !none; ++c) factor[c] += weight[c];
        const Run<float> run = run_kernel(x, factor, std::vector<float>(width), dy, rows, width, centred);
        const float* const w = none ? nullptr : weight.data();
        const float* const no_bias = nullptr;
        std::vector<float> y(x.size()), dx(x.size()), mean(rows), rstd(rows), dweight(width, 0.5f);
        const kernels::NormRows of{rows, width, kEps, 1.0f};
        const kernels::NormGradients to{.weight = DevicePtr(none ? nullptr : dweight.data())};
        if (centred) {
          kernels::layer_norm_forward(of, x.data(), w, no_bias, y.data(), mean.data(), rstd.data());
          kernels::layer_norm_backward<float>(of, dy.data(), x.data(), w, mean.data(), rstd.data(), dx.data(), to);
        } else {
          kernels::rms_norm_forward(of, x.data(), w, y.data(), rstd.data());
          kernels::rms_norm_backward(of, dy.data(), x.data(), w, rstd.data(), dx.data(), to);
        }
        CHECK(same_bits(y, run.y));
        check_close(dx, doubles(run.dx), chain_of_sums<float>(width));  // the compiler joins other operations
        if (!none) CHECK(same_bits(dweight, run.dweight));
      }
    }
  }

  TEST_CASE_TEMPLATE("any number of threads gives the same bits", T, float, bf16, f16) {
    const int64_t rows = 301, width = 700;
    const auto x = normals<T>("x", rows * width), weight = normals<T>("weight", width);
    const auto bias = normals<T>("bias", width), dy = normals<T>("dy", rows * width);
    for (const bool centred : {true, false}) {
      Run<T> one;
      with_threads(1, [&] { one = run_kernel(x, weight, bias, dy, rows, width, centred); });
      with_threads(3, [&] {
        const Run<T> many = run_kernel(x, weight, bias, dy, rows, width, centred);
        CHECK(same_bits(many.y, one.y));
        CHECK(same_bits(many.dx, one.dx));
        CHECK(same_bits(many.dweight, one.dweight));
        CHECK(same_bits(many.dbias, one.dbias));
      });
    }
  }

  TEST_CASE_TEMPLATE("a NaN shows", T, float, bf16, f16) {
    const int64_t rows = 3, width = 50;
    auto x = normals<T>("x", rows * width);
    store_nan(x[width + 4]);
    const auto weight = normals<T>("weight", width), bias = normals<T>("bias", width);
    for (const bool centred : {true, false}) {
      const Run<T> run = run_kernel(x, weight, bias, x, rows, width, centred);
      CHECK(std::isfinite(to_f32(run.y[0])));
      CHECK(std::isnan(to_f32(run.y[width])));
      CHECK(std::isnan(to_f32(run.dx[width])));
      CHECK(std::isnan(run.dweight[4]));
    }
  }
}
