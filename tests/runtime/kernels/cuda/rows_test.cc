#include "runtime/kernels/rows.h"

#include "runtime/kernels/cuda/rows.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/cuda/rows") {
  TEST_CASE_TEMPLATE("rows are copied, rounded and scattered as on a CPU, and what is between them stays", T, float,
                     bf16, f16) {
    struct {
      int64_t width, from_stride, to_stride;
    } const shapes[] = {{16, 24, 32}, {5, 7, 6}};
    constexpr int64_t kRows = 6;
    const std::vector<int64_t> places = {3, -1, 0, 5, 1, -1};
    for (const auto& [width, from_stride, to_stride] : shapes) {
      CAPTURE(width);
      const auto from = normals<T>("from", kRows * from_stride);
      const auto floats = normals<float>("floats", kRows * from_stride);
      std::vector<T> copied = filled<T>(kRows * to_stride, 9), rounded = copied,
                     scattered = filled<T>(kRows * width, 9);
      kernels::copy_rows<T>(from.data(), from_stride, copied.data(), to_stride, kRows, width);
      kernels::round_rows<T>(floats.data(), from_stride, rounded.data(), to_stride, kRows, width);
      kernels::scatter_rows<T>(from.data(), from_stride, places.data(), kRows, width, scattered.data());
      in_every_order([&] {
        OnDevice<T> d_from(from), d_copied(filled<T>(kRows * to_stride, 9)), d_rounded(filled<T>(kRows * to_stride, 9)),
            d_scattered(filled<T>(kRows * width, 9));
        OnDevice<float> d_floats(floats);
        OnDevice<int64_t> d_places(places);
        Queue on;
        kernels::cuda::copy_rows<T>(on, d_from.data(), from_stride, d_copied.data(), to_stride, kRows, width);
        CHECK(same_bits(d_copied.values(), copied));
        kernels::cuda::round_rows<T>(on, d_floats.data(), from_stride, d_rounded.data(), to_stride, kRows, width);
        CHECK(same_bits(d_rounded.values(), rounded));
        kernels::cuda::scatter_rows<T>(on, d_from.data(), from_stride, d_places.data(), kRows, width,
                                       d_scattered.data());
        CHECK(same_bits(d_scattered.values(), scattered));
      });
    }
  }

  TEST_CASE_TEMPLATE("elements become floats and back, with the CPU's rounding", T, float, bf16, f16) {
    constexpr int64_t kCount = 4 * 256 + 3;
    std::vector<float> x = normals<float>("x", kCount, 100.0);
    x[0] = INFINITY;
    x[1] = -0.0f;
    x[2] = 65520.0f;     // infinite in f16
    x[3] = 3e-8f;        // subnormal there
    x[4] = 1.00390625f;  // a tie in bf16
    std::vector<T> low(kCount);
    std::vector<float> high(kCount);
    kernels::from_floats<T>(x.data(), low.data(), kCount);
    kernels::to_floats<T>(low.data(), high.data(), kCount);
    in_every_order([&] {
      OnDevice<float> d_x(x), d_high(kCount);
      OnDevice<T> d_low(kCount);
      Queue on;
      kernels::cuda::from_floats<T>(on, d_x.data(), d_low.data(), kCount);
      CHECK(same_bits(d_low.values(), low));
      kernels::cuda::to_floats<T>(on, d_low.data(), d_high.data(), kCount);
      CHECK(same_bits(d_high.values(), high));
    });
  }

  TEST_CASE("floats are gathered and scattered by places") {
    const std::vector<float> x = normals<float>("x", 300);
    std::vector<int32_t> places;
    for (int i = 0; i < 299; ++i) places.push_back((i * 7) % 299);
    std::vector<float> gathered(299), scattered(300, 9.0f);
    kernels::gather_floats(x.data(), places.data(), 299, gathered.data());
    kernels::scatter_floats(x.data(), places.data(), 299, scattered.data());
    in_every_order([&] {
      OnDevice<float> d_x(x), d_gathered(299), d_scattered(filled<float>(300, 9));
      OnDevice<int32_t> d_places(places);
      Queue on;
      kernels::cuda::gather_floats(on, d_x.data(), d_places.data(), 299, d_gathered.data());
      CHECK(same_bits(d_gathered.values(), gathered));
      kernels::cuda::scatter_floats(on, d_x.data(), d_places.data(), 299, d_scattered.data());
      CHECK(same_bits(d_scattered.values(), scattered));
    });
  }
}
