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
// The widest of which sums lie in shared memory, and wider than 99 KiB would hold: with a bias, and without.
constexpr Shape kWidest{2, 12288}, kWider{5, 12676}, kWidestPlain{1, 24576}, kWiderPlain{2, 25348};

/// The sum, rounded, of what dx held and of a rounded gradient.
template <typename T>
std::vector<T> sums_of(std::vector<T> held, const std::vector<T>& gradient) {
  for (size_t i = 0; i < held.size(); ++i) {
    const float sum = to_f32(held[i]) + to_f32(gradient[i]);
    if constexpr (std::is_same_v<T, float>) {
      held[i] = sum;
    } else {
      held[i] = std::is_same_v<T, bf16> ? T{to_bf16(sum).bits} : T{to_f16(sum).bits};
    }
  }
  return held;
}

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
        d_dbias(filled<float>(of.width, 0.25f));
    ScratchQueue on(kernels::cuda::norm_partials(of.rows, of.width, biased));
    kernels::cuda::layer_norm_forward<T>(on, norm, d_x.data(), d_weight.data(), biased ? d_bias.data() : nullptr,
                                         d_y.data(), d_mean.data(), d_rstd.data());
    check_alike(d_y.values(), y, row);
    check_alike(d_mean.values(), mean, sum_of<float>(of.width));
    check_alike(d_rstd.values(), rstd, sum_of<float>(of.width));
    OnDevice<T> held(dy), own(dy);
    OnDevice<float> unused(of.width), also_unused(of.width);
    kernels::NormRows adding = norm;
    adding.adds = true;
    kernels::cuda::layer_norm_backward<T>(on, adding, own.data(), d_x.data(), d_weight.data(), d_mean.data(),
                                          d_rstd.data(), held.data(),
                                          {DevicePtr(unused.data()), DevicePtr(biased ? also_unused.data() : nullptr)});
    // dx may be dy.
    kernels::cuda::layer_norm_backward<T>(on, norm, d_dy.data(), d_x.data(), d_weight.data(), d_mean.data(),
                                          d_rstd.data(), d_dy.data(),
                                          {DevicePtr(d_dweight.data()), DevicePtr(biased ? d_dbias.data() : nullptr)});
    check_alike(d_dy.values(), dx, row);
    CHECK(same_bits(held.values(), sums_of(dy, d_dy.values())));
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
    OnDevice<float> d_rstd(of.rows), d_dweight(filled<float>(of.width, 0.5f));
    ScratchQueue on(kernels::cuda::norm_partials(of.rows, of.width, false));
    kernels::cuda::rms_norm_forward<T>(on, norm, d_x.data(), d_weight.data(), d_y.data(), d_rstd.data());
    check_alike(d_y.values(), y, row);
    check_alike(d_rstd.values(), rstd, sum_of<float>(of.width));
    kernels::cuda::rms_norm_backward<T>(on, norm, d_dy.data(), d_x.data(), d_weight.data(), d_rstd.data(), d_dx.data(),
                                        {.weight = DevicePtr(d_dweight.data())});
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
    kernels::cuda::add_rms_norm_forward<T>(on, norm, d_a.data(), d_b.data(), d_sum.data(), d_weight.data(), d_y.data(),
                                           d_rstd.data());
    CHECK(same_bits(d_sum.values(), sum));
    check_alike(d_y.values(), y, chain_of_sums<T>(of.width));
    // In place.
    kernels::cuda::add_layer_norm_forward<T>(on, norm, d_a.data(), d_b.data(), d_a.data(), d_weight.data(),
                                             d_bias.data(), d_y.data(), d_mean.data(), d_rstd.data());
    CHECK(same_bits(d_a.values(), sum));
    check_alike(d_y.values(), centred, chain_of_sums<T>(of.width));
  });
}

/// What a norm of heads is: RMSNorm, LayerNorm, with a bias, with weights of each head.
struct Heads {
  bool centred, biased, own;
};
constexpr Heads kHeads[] = {{false, false, false}, {true, false, false}, {true, true, false}, {true, false, true}};

template <typename T>
void head_norm(int64_t head_dim, const Heads& of) {
  constexpr int64_t kRows = 9, kCount = 3;
  const int64_t stride = kCount * head_dim + 8, weights = of.own ? kCount * head_dim : head_dim;
  const Tolerance row = chain_of_sums<T>(head_dim), column = chain_of_sums<float>(head_dim + kRows * kCount);
  auto x = normals<T>("x", kRows * stride);
  const auto dy = normals<T>("dy", kRows * stride);
  for (T& at : x) at = filled<T>(1, 3 + to_f32(at)).front();  // far from 0, so that it shows what is centred
  const auto weight = normals<T>("weight", weights), bias = normals<T>("bias", head_dim);
  std::vector<T> y = x, dx = dy;
  std::vector<float> stats(2 * kRows * kCount), dweight(weights, 0.5f), dbias(head_dim, 0.25f);
  const kernels::HeadNorm norm{.rows = kRows,
                               .heads = kCount,
                               .head_dim = head_dim,
                               .eps = kEps,
                               .offset = 0.5f,
                               .centred = of.centred,
                               .own_weights = of.own};
  const auto rows = [&](auto* at) { return kernels::Rows<std::remove_pointer_t<decltype(at)>>{DevicePtr(at), stride}; };
  const auto both = [&](const auto& forward, const auto& backward, T* y_at, const T* x_at, T* dx_at, const T* w,
                        const T* b) {
    forward(norm, rows(static_cast<const T*>(y_at)), w, of.biased ? b : nullptr, rows(y_at));
    backward(norm, rows(static_cast<const T*>(dx_at)), rows(x_at), w, rows(dx_at));
  };
  both(
      kernels::head_norm_forward<T>,
      [&](const auto& d, const auto& g, const auto& in, const T* w, const auto& to) {
        kernels::head_norm_backward<T>(d, g, in, w, to,
                                       {DevicePtr(dweight.data()), DevicePtr(of.biased ? dbias.data() : nullptr), {}},
                                       stats.data());
      },
      y.data(), x.data(), dx.data(), weight.data(), bias.data());
  in_every_order([&] {  // in place: what stands between heads of rows stays
    OnDevice<T> d_x(x), d_y(x), d_dx(dy), d_weight(weight), d_bias(bias);
    OnDevice<float> d_dweight(filled<float>(weights, 0.5f)), d_dbias(filled<float>(head_dim, 0.25f)),
        d_stats(2 * kRows * kCount);
    ScratchQueue on(kernels::cuda::head_norm_partials(norm, of.biased));
    both([&](const auto& d, const auto& in, const T* w, const T* b,
             const auto& to) { kernels::cuda::head_norm_forward<T>(on, d, in, w, b, to); },
         [&](const auto& d, const auto& g, const auto& in, const T* w, const auto& to) {
           kernels::cuda::head_norm_backward<T>(
               on, d, g, in, w, to, {DevicePtr(d_dweight.data()), DevicePtr(of.biased ? d_dbias.data() : nullptr), {}},
               d_stats.data());
         },
         d_y.data(), d_x.data(), d_dx.data(), d_weight.data(), d_bias.data());
    check_alike(d_y.values(), y, row);
    check_alike(d_dx.values(), dx, row);
    check_alike(d_dweight.values(), dweight, column);
    check_alike(d_dbias.values(), dbias, column);
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
  TEST_CASE("norms of very wide rows are the CPU's, with no more shared memory than every card gives") {
    for (const Shape& shape : {kWidest, kWider}) layer_norm<bf16>(shape, true);
    for (const Shape& shape : {kWidestPlain, kWiderPlain}) rms_norm<bf16>(shape);
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
    for (const Heads& heads : kHeads) {
      CAPTURE(heads.centred);
      CAPTURE(heads.own);
      for (const int64_t head_dim : {8, 5, 136}) head_norm<T>(head_dim, heads);
    }
  }
  TEST_CASE(
      "norms of whole packs, of wide rows too, waste no sector, and their sums in shared memory meet no conflict") {
    if (simt::build() != simt::Build::kWatched) return;
    constexpr int64_t kRows = 8;
    for (const int64_t kWidth : {1024, 12288}) {
      CAPTURE(kWidth);
      OnDevice<bf16> x(normals<bf16>("x", kRows * kWidth)), weight(normals<bf16>("w", kWidth)), y(kRows * kWidth);
      OnDevice<float> rstd(kRows), dweight(filled<float>(kWidth, 0));
      ScratchQueue on(kernels::cuda::norm_partials(kRows, kWidth, false));
      const kernels::NormRows norm{kRows, kWidth, kEps};
      simt::take_traffic();
      kernels::cuda::rms_norm_forward<bf16>(on, norm, x.data(), weight.data(), y.data(), rstd.data());
      kernels::cuda::rms_norm_backward<bf16>(on, norm, y.data(), x.data(), weight.data(), rstd.data(), y.data(),
                                             {.weight = DevicePtr(dweight.data())});
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
  }
  TEST_CASE("a NaN in a row stays in its row") {
    std::vector<float> x(4 * 40, 1.0f);
    x[40 + 7] = NAN;
    OnDevice<float> d_x(x), weight(filled<float>(40, 1.0f)), y(160), rstd(4);
    Queue on;
    kernels::cuda::rms_norm_forward<float>(on, {4, 40, kEps}, d_x.data(), weight.data(), y.data(), rstd.data());
    for (int i = 0; i < 160; ++i) CHECK(std::isnan(y.values()[i]) == (i / 40 == 1));
  }
  TEST_CASE("no row is no launch") {
    Queue on;
    simt::take_counts();
    kernels::cuda::rms_norm_forward<float>(on, {0, 64, kEps}, nullptr, nullptr, nullptr, nullptr);
    CHECK(simt::take_counts().launches == 0);
  }
}
