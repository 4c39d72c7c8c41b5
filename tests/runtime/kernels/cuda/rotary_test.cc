#include "runtime/kernels/cuda/rotary.h"

#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/cuda/rotary") {
  TEST_CASE_TEMPLATE("rotary positions are the CPU's, both kinds of pairs, and back", T, float, bf16, f16) {
    struct {
      int64_t head_dim, turning, stride;
    } const shapes[] = {{16, 16, 40}, {12, 8, 24}, {10, 6, 20}, {8, 8, 16}};  // whole, in part, pairs one by one
    constexpr int64_t kRows = 10, kTokens = 5, kHeads = 2;
    for (const auto& [head_dim, turning, stride] : shapes) {
      for (const bool interleaved : {false, true}) {
        for (const bool given : {false, true}) {
          CAPTURE(head_dim);
          CAPTURE(interleaved);
          CAPTURE(given);
          std::vector<float> frequencies;
          for (int64_t i = 0; i < turning / 2; ++i) frequencies.push_back(1.0f / (1.0f + static_cast<float>(i)));
          std::vector<float> table(kTokens * turning);
          kernels::rotary_table(table.data(), 0, kTokens, frequencies, 1.25);
          const auto x = normals<T>("x", kRows * stride);
          std::vector<int32_t> positions = {4, 0, 2, 2, 1, 3, 4, 4, 0, 1};
          kernels::RotaryDims dims{kRows, kTokens, kHeads, head_dim, stride, turning, interleaved, nullptr};
          if (given) dims.positions = DevicePtr<const int32_t>(positions.data());
          std::vector<T> turned = x, back = x;
          kernels::rotary<T>(dims, turned.data(), table.data(), false);
          kernels::rotary<T>(dims, back.data(), table.data(), true);
          const Tolerance tolerance = pointwise<T>();
          in_every_order([&] {
            OnDevice<T> d_x(x), d_back(x);
            OnDevice<float> d_table(table);
            OnDevice<int32_t> d_positions(positions);
            kernels::RotaryDims there = dims;
            if (given) there.positions = DevicePtr<const int32_t>(d_positions.data());
            Queue on;
            kernels::cuda::rotary<T>(on, there, d_x.data(), d_table.data(), false);
            check_alike(d_x.values(), turned, tolerance);
            kernels::cuda::rotary<T>(on, there, d_back.data(), d_table.data(), true);
            check_alike(d_back.values(), back, tolerance);
          });
        }
      }
    }
  }
}
