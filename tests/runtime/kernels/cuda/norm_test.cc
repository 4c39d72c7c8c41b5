#include "runtime/kernels/norm.h"

#include "runtime/kernels/cuda/norm.h"
#include "runtime/kernels/elementwise.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

constexpr float kEps = 1e-5f;

struct Shape {
  int64_t rows, width;
};
// Half a warp has a row, others have none; rows that are no packs; more runs than adders; a warp or two; several warps,
// the rows of a run one after the other; more than the usual block; too wide to be held.
constexpr Shape kShapes[] = {{13, 64}, {5, 37}, {70, 24}, {9, 520}, {3, 1032}, {5, 4104}, {2, 9000}};

template <typename T>
void layer_norm(Shape of, bool biased) {
  const int64_t count = of.rows * of.width;
  const Tolerance row = chain_of_sums<T>(of.width), column = chain_of_sums<float>(of.width + of.rows);
  const auto x = normals<T>("x", count), weight = normals<T>("weight", of.width), bias = normals<T>("bias", of.width);
  const auto dy = normals<T>("dy", count);
  std::vector<T> y(x.size()), dx(x.size());
  std::vector<float> mean(of.rows), rstd(of.rows), dweight(of.width, 0.5f), dbias(of.width, 0.25f);
  const kernels::NormRows norm{of.rows, of.width, kEps};
  kernels::layer_norm_forward<T>(norm, x.data(), weight.data(), biased ? bias.data() : nullptr, y.data(), mean.data(),
                                 rstd.data());
  kernels::layer_norm_backward<T>(norm, dy.data(), x.data(), weight.data(), mean.data(), rstd.data(), dx.data(),
                                  {DevicePtr(dweight.data()), DevicePtr(biased ? dbias.data() : nullptr)});
  in_every_order([&] {
    OnDevice<T> d_x(x), d_weight(weight), d_bias(bias), d_y(count), d_dy(dy);
    OnDevice<float> d_mean(of.rows), d_rstd(of.rows), d_dweight(filled<float>(of.width, 0.5f)),
        d_dbias(filled<float>(of.width, 0.25f)), partials(kernels::cuda::norm_partials(of.rows, of.width, biased));
    Queue on;
    kernels::cuda::layer_norm_forward<T>(on, d_x.data(), d_weight.data(), biased ? d_bias.data() : nullptr, d_y.data(),
                                         d_mean.data(), d_rstd.data(), of.rows, of.width, kEps);
    check_alike(d_y.values(), y, row);
    check_alike(d_mean.values(), mean, sum_of<float>(of.width));
    check_alike(d_rstd.values(), rstd, sum_of<float>(of.width));
    // dx may be dy.
    kernels::cuda::layer_norm_backward<T>(on, d_dy.data(), d_x.data(), d_weight.data(), d_mean.data(), d_rstd.data(),
                                          d_dy.data(), d_dweight.data(), biased ? d_dbias.data() : nullptr, of.rows,
                                          of.width, partials.data());
    check_alike(d_dy.values(), dx, row);
    check_alike(d_dweight.values(), dweight, column);
    check_alike(d_dbias.values(), dbias, column);
  });
}

template <typename T>
void rms_norm(Shape of) {
  const int64_t count = of.rows * of.width;
  const Tolerance row = chain_of_sums<T>(of.width), column = chain_of_sums<float>(of.width + of.rows);
  const auto x = normals<T>("x", count), weight = normals<T>("weight", of.width), dy = normals<T>("dy", count);
  std::vector<T> y(x.size()), dx(x.size());
  std::vector<float> rstd(of.rows), dweight(of.width, 0.5f);
  const kernels::NormRows norm{of.rows, of.width, kEps};
  kernels::rms_norm_forward<T>(norm, x.data(), weight.data(), y.data(), rstd.data());
  kernels::rms_norm_backward<T>(norm, dy.data(), x.data(), weight.data(), rstd.data(), dx.data(),
                                {.weight = DevicePtr(dweight.data())});
  in_every_order([&] {
    OnDevice<T> d_x(x), d_weight(weight), d_y(count), d_dy(dy), d_dx(count);
    OnDevice<float> d_rstd(of.rows), d_dweight(filled<float>(of.width, 0.5f)),
        partials(kernels::cuda::norm_partials(of.rows, of.width, false));
    Queue on;
    kernels::cuda::rms_norm_forward<T>(on, d_x.data(), d_weight.data(), d_y.data(), d_rstd.data(), of.rows, of.width,
                                       kEps);
    check_alike(d_y.values(), y, row);
    check_alike(d_rstd.values(), rstd, sum_of<float>(of.width));
    kernels::cuda::rms_norm_backward<T>(on, d_dy.data(), d_x.data(), d_weight.data(), d_rstd.data(), d_dx.data(),
                                        d_dweight.data(), of.rows, of.width, partials.data());
    check_alike(d_dx.values(), dx, row);
    check_alike(d_dweight.values(), dweight, column);
  });
}

template <typename T>
void fused(Shape of) {
  const int64_t count = of.rows * of.width;
  const auto a = normals<T>("a", count), b = normals<T>("b", count), weight = normals<T>("weight", of.width);
  const auto bias = normals<T>("bias", of.width);
  std::vector<T> sum(a.size()), y(a.size()), centred(a.size());
  std::vector<float> mean(of.rows), rstd(of.rows);
  kernels::add<T>(a.data(), b.data(), sum.data(), count);
  const kernels::NormRows norm{of.rows, of.width, kEps};
  kernels::rms_norm_forward<T>(norm, sum.data(), weight.data(), y.data(), rstd.data());
  kernels::layer_norm_forward<T>(norm, sum.data(), weight.data(), bias.data(), centred.data(), mean.data(),
                                 rstd.data());
  in_every_order([&] {
    OnDevice<T> d_a(a), d_b(b), d_weight(weight), d_bias(bias), d_sum(count), d_y(count);
    OnDevice<float> d_mean(of.rows), d_rstd(of.rows);
    Queue on;
    kernels::cuda::add_rms_norm_forward<T>(on, d_a.data(), d_b.data(), d_sum.data(), d_weight.data(), d_y.data(),
                                           d_rstd.data(), of.rows, of.width, kEps);
    CHECK(same_bits(d_sum.values(), sum));
    check_alike(d_y.values(), y, chain_of_sums<T>(of.width));
    // In place.
    kernels::cuda::add_layer_norm_forward<T>(on, d_a.data(), d_b.data(), d_a.data(), d_weight.data(), d_bias.data(),
                                             d_y.data(), d_mean.data(), d_rstd.data(), of.rows, of.width, kEps);
    CHECK(same_bits(d_a.values(), sum));
    check_alike(d_y.values(), centred, chain_of_sums<T>(of.width));
  });
}

template <typename T>
void head_norm(int64_t head_dim) {
  constexpr int64_t kRows = 3, kHeads = 2;
  const int64_t stride = kHeads * head_dim + 8;
  const Tolerance row = chain_of_sums<T>(head_dim), column = chain_of_sums<float>(head_dim + kRows * kHeads);
  const auto x = normals<T>("x", kRows * stride), dy = normals<T>("dy", kRows * stride);
  const auto weight = normals<T>("weight", head_dim);
  std::vector<T> y = x, dx = dy;
  std::vector<float> stats(2 * kRows * kHeads), dweight(head_dim, 0.5f);
  const kernels::HeadNorm norm{.rows = kRows, .heads = kHeads, .head_dim = head_dim, .eps = kEps};
  kernels::head_norm_forward<T>(norm, {DevicePtr<const T>(y.data()), stride}, weight.data(), nullptr,
                                {DevicePtr(y.data()), stride});
  kernels::head_norm_backward<T>(norm, {DevicePtr<const T>(dx.data()), stride}, {DevicePtr<const T>(x.data()), stride},
                                 weight.data(), {DevicePtr(dx.data()), stride},
                                 {DevicePtr(dweight.data()), nullptr, {}}, stats.data());
  in_every_order([&] {  // in place: what stands between heads of rows stays
    OnDevice<T> d_x(x), d_y(x), d_dx(dy), d_weight(weight);
    OnDevice<float> d_dweight(filled<float>(head_dim, 0.5f)),
        partials(kernels::cuda::norm_partials(kRows * kHeads, head_dim, false));
    Queue on;
    kernels::cuda::head_norm_forward<T>(on, d_y.data(), stride, d_weight.data(), d_y.data(), stride, kRows, kHeads,
                                        head_dim, kEps);
    check_alike(d_y.values(), y, row);
    kernels::cuda::head_norm_backward<T>(on, d_dx.data(), stride, d_x.data(), stride, d_weight.data(), d_dx.data(),
                                         stride, d_dweight.data(), kRows, kHeads, head_dim, kEps, partials.data());
    check_alike(d_dx.values(), dx, row);
    check_alike(d_dweight.values(), dweight, column);
  });
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/norm") {
  TEST_CASE_TEMPLATE("LayerNorm is the CPU's, forward and backward, with a bias and without", T, float, bf16, f16) {
    for (const Shape& shape : kShapes) {
      CAPTURE(shape.width);
      layer_norm<T>(shape, true);
    }
    layer_norm<T>(kShapes[0], false);
  }
  TEST_CASE_TEMPLATE("RMSNorm is the CPU's, forward and backward", T, float, bf16, f16) {
    for (const Shape& shape : kShapes) {
      CAPTURE(shape.width);
      rms_norm<T>(shape);
    }
  }
  TEST_CASE_TEMPLATE("a norm fused with the sum before it is both", T, float, bf16, f16) {
    for (const Shape& shape : kShapes) {
      CAPTURE(shape.width);
      fused<T>(shape);
    }
  }
  TEST_CASE_TEMPLATE("norms of heads are the CPU's in place, forward and backward", T, float, bf16, f16) {
    for (const int64_t head_dim : {8, 5}) head_norm<T>(head_dim);
  }
  TEST_CASE("norms of whole packs waste no sector, and their sums in shared memory meet no conflict") {
    if (simt::build() != simt::Build::kWatched) return;
    constexpr int64_t kRows = 8, kWidth = 1024;
    OnDevice<bf16> x(normals<bf16>("x", kRows * kWidth)), weight(normals<bf16>("w", kWidth)), y(kRows * kWidth);
    OnDevice<float> rstd(kRows), dweight(filled<float>(kWidth, 0)),
        partials(kernels::cuda::norm_partials(kRows, kWidth, false));
    Queue on;
    simt::take_traffic();
    kernels::cuda::rms_norm_forward<bf16>(on, x.data(), weight.data(), y.data(), rstd.data(), kRows, kWidth, kEps);
    kernels::cuda::rms_norm_backward<bf16>(on, y.data(), x.data(), weight.data(), rstd.data(), y.data(), dweight.data(),
                                           kRows, kWidth, partials.data());
    int64_t rows = 0, sums = 0;
    for (const simt::Traffic& traffic : simt::take_traffic()) {
      CAPTURE(traffic.line);
      const int64_t each = traffic.bytes / traffic.requests;  // bytes
      if (each < 128) continue;                               // what a row, or a warp, has one of
      if (traffic.shared) {
        CHECK(traffic.turns == traffic.bytes / 128);
        ++sums;
      } else {
        CHECK(traffic.used() >= 1);  // more where lanes read the same
        ++rows;
      }
    }
    CHECK(rows >= 8);
    CHECK(sums >= 3);
  }
  TEST_CASE("a NaN in a row stays in its row") {
    std::vector<float> x(4 * 40, 1.0f);
    x[40 + 7] = NAN;
    OnDevice<float> d_x(x), weight(filled<float>(40, 1.0f)), y(160), rstd(4);
    Queue on;
    kernels::cuda::rms_norm_forward<float>(on, d_x.data(), weight.data(), y.data(), rstd.data(), 4, 40, kEps);
    for (int i = 0; i < 160; ++i) CHECK(std::isnan(y.values()[i]) == (i / 40 == 1));
  }
  TEST_CASE("no row is no launch") {
    Queue on;
    simt::take_counts();
    kernels::cuda::rms_norm_forward<float>(on, nullptr, nullptr, nullptr, nullptr, 0, 64, kEps);
    CHECK(simt::take_counts().launches == 0);
  }
}
