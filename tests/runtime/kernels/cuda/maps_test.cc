#include "runtime/kernels/cuda/maps.h"

#include "runtime/kernels/cuda/sums.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::Gate;

namespace {

// Nothing, less than a pack, whole packs, more than a block with a tail.
constexpr int64_t kCounts[] = {0, 3, 64, 256 * 8 + 13};

template <typename T>
struct Functions {
  Gate gate;
  void (*forward)(const T*, T*, int64_t);
  void (*backward)(const T*, const T*, T*, int64_t);
};
template <typename T>
const Functions<T> kFunctions[] = {{Gate::kSilu, kernels::silu_forward<T>, kernels::silu_backward<T>},
                                   {Gate::kGeluErf, kernels::gelu_erf_forward<T>, kernels::gelu_erf_backward<T>},
                                   {Gate::kGeluTanh, kernels::gelu_tanh_forward<T>, kernels::gelu_tanh_backward<T>},
                                   {Gate::kRelu, kernels::relu_forward<T>, kernels::relu_backward<T>},
                                   {Gate::kGeluQuick, kernels::gelu_quick_forward<T>, kernels::gelu_quick_backward<T>},
                                   {Gate::kRelu2, kernels::relu2_forward<T>, kernels::relu2_backward<T>}};

template <typename T>
bool is_nan(T x) {
  return std::isnan(to_f32(x));
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/maps") {
  TEST_CASE_TEMPLATE("sums and products are the CPU's, in place too, aligned and not", T, float, bf16, f16) {
    for (const int64_t count : kCounts) {
      const auto a = normals<T>("a", count + 1), b = normals<T>("b", count + 1);
      for (const int64_t from : {0, 1}) {  // of an array that is not aligned there
        CAPTURE(count);
        CAPTURE(from);
        std::vector<T> sum(count), scaled(a.begin() + from, a.begin() + from + count), added(count);
        kernels::add<T>(a.data() + from, b.data() + from, sum.data(), count);
        kernels::scale<T>(scaled.data(), 0.3f, count);
        kernels::add_scaled<T>(a.data() + from, -1.7f, b.data() + from, added.data(), count);
        in_every_order([&] {
          OnDevice<T> d_a(a), d_b(b), out(count + 1);
          Queue on;
          const auto made = [&](const OnDevice<T>& of) {
            const std::vector<T> all = of.values();
            return std::vector<T>(all.begin() + from, all.begin() + from + count);
          };
          kernels::cuda::add<T>(on, d_a.data() + from, d_b.data() + from, out.data() + from, count);
          CHECK(same_bits(made(out), sum));
          CHECK(is_nan(out.values()[from == 1 ? 0 : static_cast<size_t>(count)]));
          kernels::cuda::add_scaled<T>(on, d_a.data() + from, -1.7f, d_b.data() + from, out.data() + from, count);
          check_alike(made(out), added, pointwise<T>());
          kernels::cuda::scale<T>(on, d_a.data() + from, 0.3f, count);
          CHECK(same_bits(made(d_a), scaled));
          kernels::cuda::add<T>(on, d_b.data() + from, d_b.data() + from, d_b.data() + from, count);
          for (int64_t i = 0; i < count; ++i) CHECK(to_f32(made(d_b)[i]) == 2 * to_f32(b[from + i]));
        });
      }
    }
  }

  TEST_CASE_TEMPLATE("a bias is added to rows, and its gradient is the sum over them", T, float, bf16, f16) {
    struct {
      int64_t rows, width;
    } const shapes[] = {{5, 64}, {3, 7}, {131, 36}, {9, 129}};  // 131: three runs; 129: two blocks of columns
    for (const auto& [rows, width] : shapes) {
      CAPTURE(rows);
      const auto x = normals<T>("x", rows * width), bias = normals<T>("bias", width);
      std::vector<T> y = x;
      std::vector<float> dbias(width, 0.5f);
      kernels::add_bias<T>(y.data(), bias.data(), rows, width);
      kernels::bias_backward<T>(x.data(), dbias.data(), rows, width);
      in_every_order([&] {
        OnDevice<T> d_x(x), d_bias(bias);
        OnDevice<float> d_dbias(filled<float>(width, 0.5f));
        ScratchQueue on(kernels::cuda::bias_partials(rows, width));
        kernels::cuda::bias_backward<T>(on, d_x.data(), d_dbias.data(), rows, width);
        check_alike(d_dbias.values(), dbias, sum_of<float>(rows));
        kernels::cuda::add_bias<T>(on, d_x.data(), d_bias.data(), rows, width);
        CHECK(same_bits(d_x.values(), y));
      });
    }
  }

  TEST_CASE("sums over rows in parts: two halves of the rows give subtrees of the whole, with its bits") {
    constexpr int64_t kRows = 4 * 70, kWidth = 36, kHalf = kRows / 2;  // a part is two runs; sums of floats round
    const auto x = normals<float>("x", kRows * kWidth);
    std::vector<float> dbias(kWidth), levels(3 * kWidth);
    kernels::bias_backward<float>(x.data(), dbias.data(), kRows, kWidth, {4, DevicePtr(levels.data())});
    in_every_order([&] {
      OnDevice<float> d_x(x);
      OnDevice<float> whole(filled<float>(kWidth, 0)), first(filled<float>(kWidth, 0)),
          second(filled<float>(kWidth, 0));
      ScratchQueue on(kernels::cuda::bias_partials(kRows, kWidth, 4));
      const DevicePtr<float> some(on.memory.data());
      kernels::cuda::bias_backward<float>(on, d_x.data(), whole.data(), kRows, kWidth, {4, some});
      kernels::cuda::bias_backward<float>(on, d_x.data(), first.data(), kHalf, kWidth, {2, some});
      kernels::cuda::bias_backward<float>(on, d_x.data() + kHalf * kWidth, second.data(), kHalf, kWidth, {2, some});
      check_alike(whole.values(), dbias, sum_of<float>(kRows));
      std::vector<float> joined = first.values();
      for (int64_t c = 0; c < kWidth; ++c) joined[c] += second.values()[c];
      CHECK(same_bits(joined, whole.values()));
    });
  }

  TEST_CASE_TEMPLATE("activations are the CPU's, forward, backward and both at once", T, float, bf16, f16) {
    const int64_t count = 2 * 8 * 256 + 5;
    auto x = normals<T>("x", count, 3.0);
    const auto dy = normals<T>("dy", count);
    x[17] = filled<T>(1, 0.0f)[0];
    store_nan(x[23]);
    for (const Functions<T>& function : kFunctions<T>) {
      CAPTURE(static_cast<int>(function.gate));
      std::vector<T> y(x.size()), dx(x.size());
      function.forward(x.data(), y.data(), count);
      function.backward(dy.data(), x.data(), dx.data(), count);
      CHECK(is_nan(y[23]));
      y[23] = dx[23] = filled<T>(1, 1.0f)[0];
      // Values of up to 10: the slope's rounding is of its terms, which are as large as x.
      const Tolerance tolerance = pointwise<T>() + Tolerance{0, 64 * kF32Unit};
      const auto alike = [&](std::vector<T> got, const std::vector<T>& wanted) {
        CHECK(is_nan(got[23]));
        got[23] = wanted[23];
        check_alike(got, wanted, tolerance);
      };
      in_every_order([&] {
        OnDevice<T> d_x(x), d_dy(dy), d_y(count), d_dx(count);
        Queue on;
        kernels::cuda::activation_forward<T>(on, function.gate, d_x.data(), d_y.data(), count);
        alike(d_y.values(), y);
        kernels::cuda::activation_backward<T>(on, function.gate, d_dy.data(), d_x.data(), d_dx.data(), count);
        alike(d_dx.values(), dx);
        OnDevice<T> both_y(count);
        kernels::cuda::activation_both<T>(on, function.gate, d_x.data(), d_dy.data(), both_y.data(), count);
        const auto numbers = [](std::vector<T> of) {  // a NaN's sign is nobody's business
          CHECK(is_nan(of[23]));
          of[23] = T{};
          return of;
        };
        CHECK(same_bits(numbers(both_y.values()), numbers(d_y.values())));
        CHECK(same_bits(numbers(d_dy.values()), numbers(d_dx.values())));
      });
    }
  }

  TEST_CASE_TEMPLATE("gated activations are the CPU's, forward and backward", T, float, bf16, f16) {
    for (const int64_t ffn : {40, 13}) {
      CAPTURE(ffn);
      constexpr int64_t kRows = 7;
      const auto gate_up = normals<T>("gate_up", kRows * 2 * ffn, 2.0), dy = normals<T>("dy", kRows * ffn);
      for (const Functions<T>& function : kFunctions<T>) {
        CAPTURE(static_cast<int>(function.gate));
        std::vector<T> y(kRows * ffn), dgate_up(kRows * 2 * ffn);
        kernels::gated_forward<T>(function.gate, gate_up.data(), y.data(), kRows, ffn);
        kernels::gated_backward<T>(function.gate, dy.data(), gate_up.data(), dgate_up.data(), kRows, ffn);
        const Tolerance tolerance = pointwise<T>() + Tolerance{16 * kF32Unit, 64 * kF32Unit};
        in_every_order([&] {
          OnDevice<T> d_gate_up(gate_up), d_dy(dy), d_y(kRows * ffn);
          Queue on;
          kernels::cuda::gated_forward<T>(on, function.gate, d_gate_up.data(), d_y.data(), kRows, ffn);
          check_alike(d_y.values(), y, tolerance);
          kernels::cuda::gated_backward<T>(on, function.gate, d_dy.data(), d_gate_up.data(), d_gate_up.data(), kRows,
                                           ffn);
          check_alike(d_gate_up.values(), dgate_up, tolerance);
        });
      }
    }
  }

  TEST_CASE_TEMPLATE("clamped gates are the CPU's, forward and backward, beyond their limits and not", T, float, bf16,
                     f16) {
    for (const int64_t ffn : {40, 13}) {
      CAPTURE(ffn);
      constexpr int64_t kRows = 7;
      const kernels::ClampedGate of{.alpha = 1.702f, .limit = 1.5f};  // a good third is beyond it
      const auto gate_up = normals<T>("gate_up", kRows * 2 * ffn, 2.0);
      const auto dy = normals<T>("dy", kRows * ffn);
      std::vector<T> y(kRows * ffn), dgate_up(kRows * 2 * ffn);
      kernels::clamped_gate_forward<T>(of, gate_up.data(), y.data(), kRows, ffn);
      kernels::clamped_gate_backward<T>(of, dy.data(), gate_up.data(), dgate_up.data(), kRows, ffn);
      const Tolerance tolerance = pointwise<T>() + Tolerance{16 * kF32Unit, 64 * kF32Unit};
      in_every_order([&] {
        OnDevice<T> d_gate_up(gate_up), d_dy(dy), d_y(kRows * ffn);
        Queue on;
        kernels::cuda::clamped_gate_forward<T>(on, of, d_gate_up.data(), d_y.data(), kRows, ffn);
        check_alike(d_y.values(), y, tolerance);
        kernels::cuda::clamped_gate_backward<T>(on, of, d_dy.data(), d_gate_up.data(), d_gate_up.data(), kRows, ffn);
        check_alike(d_gate_up.values(), dgate_up, tolerance);
      });
    }
  }

  TEST_CASE_TEMPLATE("a bias of 16 bits is added to rows of floats", T, bf16, f16) {
    constexpr int64_t kRows = 5, kWidth = 11, kStride = 14;
    const auto x = normals<float>("x", kRows * kStride);
    const auto bias = normals<T>("bias", kWidth);
    std::vector<float> sums = x;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kWidth; ++c) sums[r * kStride + c] += to_f32(bias[c]);
    }
    in_every_order([&] {
      OnDevice<float> d_x(x);
      OnDevice<T> d_bias(bias);
      Queue on;
      kernels::cuda::add_bias_to_floats<T>(on, d_x.data(), kStride, d_bias.data(), kRows, kWidth);
      CHECK(same_bits(d_x.values(), sums));
    });
  }

  TEST_CASE("maps over whole packs use every byte of each sector") {
    if (simt::build() != simt::Build::kWatched) return;
    OnDevice<bf16> a(normals<bf16>("a", 4096)), b(normals<bf16>("b", 4096)), out(4096);
    Queue on;
    simt::take_traffic();
    kernels::cuda::add<bf16>(on, a.data(), b.data(), out.data(), 4096);
    int64_t requests = 0;
    for (const simt::Traffic& traffic : simt::take_traffic()) {
      CAPTURE(traffic.line);
      CHECK(traffic.used() == 1);
      CHECK(traffic.sectors == 16 * traffic.requests);
      requests += traffic.requests;
    }
    CHECK(requests == 3 * 4096 / 8 / 32);
  }
}
