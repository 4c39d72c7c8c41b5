#include "runtime/kernels/ema.h"

#include "runtime/core/word_sums.h"
#include "tests/runtime/kernels/kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

uint64_t average(double decay, const std::vector<float>& weight, const float* from, float* to) {
  uint64_t sum = 0;
  kernels::ema(decay, weight.data(), from, to, std::ssize(weight), {{&sum, 1}});
  return sum;
}

}  // namespace

TEST_SUITE("runtime/kernels/ema") {
  TEST_CASE("agrees with the formula, in place or not, on any number of threads, and tells the sum of what it wrote") {
    constexpr int64_t kCount = 200'003;
    const auto weight = normals<float>("w", kCount), from = normals<float>("e", kCount);
    std::vector<float> to(kCount);
    std::vector<double> wanted(kCount);
    for (const double decay : {0.0, 0.5, 0.999}) {
      for (int64_t i = 0; i < kCount; ++i) {
        wanted[i] = decay * static_cast<double>(from[i]) + (1 - decay) * static_cast<double>(weight[i]);
      }
      const uint64_t sum = average(decay, weight, from.data(), to.data());
      check_close(to, wanted, {.relative = 1e-6, .absolute = 1e-6});
      CHECK(sum == word_sums(reinterpret_cast<const std::byte*>(to.data()), kCount));
      auto in_place = from;
      omp_set_num_threads(1);
      CHECK(average(decay, weight, in_place.data(), in_place.data()) == sum);
      omp_set_num_threads(omp_get_num_procs());
      CHECK(in_place == to);
    }
    CHECK(average(0.9, weight, weight.data(), to.data()) ==
          word_sums(reinterpret_cast<const std::byte*>(weight.data()), kCount));  // equal stays equal
  }
}
