#include "runtime/kernels/cuda/dropout.h"

#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/cuda/dropout") {
  TEST_CASE_TEMPLATE("dropout has the CPU's masks bit for bit, whichever tokens a rank has", T, float, bf16, f16) {
    constexpr int64_t kSamples = 2;
    const std::vector<uint64_t> keys = {mix64(1), mix64(2)};
    const TokenRuns runs[] = {TokenRuns(8), TokenRuns::of_rank(16, 2, 1), TokenRuns::of_rank(16, 2, 0, 4)};
    for (const TokenRuns& tokens : runs) {
      for (const int64_t width : {24, 7}) {
        CAPTURE(tokens.count);
        CAPTURE(width);
        const int64_t first_row = 3, rows = kSamples * tokens.count - first_row;
        const auto x = normals<T>("x", rows * width);
        const auto rate = kernels::DropoutRate::of(0.3);
        const uint64_t site = kernels::dropout_site(4, 1);
        std::vector<T> out(x.size());
        kernels::dropout<T>(
            {rows, width, first_row, tokens, kSamples, DevicePtr<const uint64_t>(keys.data()), site, rate}, x.data(),
            out.data());
        in_every_order([&] {
          OnDevice<T> d_x(x), d_out(rows * width);
          OnDevice<uint64_t> d_keys(keys);
          Queue on;
          const kernels::DropoutRows of{
              rows, width, first_row, tokens, kSamples, DevicePtr<const uint64_t>(d_keys.data()), site, rate};
          kernels::cuda::dropout<T>(on, of, d_x.data(), d_out.data());
          CHECK(same_bits(d_out.values(), out));
          kernels::cuda::dropout<T>(on, of, d_x.data(), d_x.data());
          CHECK(same_bits(d_x.values(), out));
        });
      }
    }
  }
}
