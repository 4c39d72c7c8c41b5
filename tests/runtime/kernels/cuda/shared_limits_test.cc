#include "runtime/kernels/cuda/shared_limits.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

using cairn::kernels::cuda::SharedLimits;

TEST_SUITE("runtime/kernels/cuda/shared_limits") {
  TEST_CASE("a kernel's limit is raised once on each device, and again for more") {
    SharedLimits limits;
    const char kernels[2] = {};
    int raised = 0;
    const auto allow = [&](int device, int kernel, int64_t bytes) {
      return limits.allow(device, &kernels[kernel], bytes, [&] { return ++raised, 0; });
    };
    struct Row {
      int device, kernel;
      int64_t bytes;
      int raised;
    };
    for (const Row& row : {Row{0, 0, SharedLimits::kUnasked, 0},
                           {0, 0, 60000, 1},
                           {0, 0, 60000, 1},
                           {0, 0, 50000, 1},
                           {0, 1, 60000, 2},
                           {1, 0, 60000, 3},
                           {0, 0, 70000, 4},
                           {0, 0, 70000, 4}}) {
      CHECK(allow(row.device, row.kernel, row.bytes) == 0);
      CHECK(raised == row.raised);
    }
  }

  TEST_CASE("a limit that was refused is asked for again") {
    SharedLimits limits;
    int asked = 0;
    const auto allow = [&](int error) { return limits.allow(0, &asked, 60000, [&] { return ++asked, error; }); };
    CHECK(allow(1) == 1);
    CHECK(allow(2) == 2);
    CHECK(allow(0) == 0);
    CHECK(allow(3) == 0);
    CHECK(asked == 3);
  }

  TEST_CASE("no thread launches before the limit is raised") {
    constexpr int64_t kFirst = 50000, kLast = 50200;
    SharedLimits limits;
    std::atomic<int64_t> limit = 0;
    std::atomic<int> raised = 0, early = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int64_t bytes = kFirst; bytes < kLast; ++bytes) {
          const int error = limits.allow(0, &limits, bytes, [&] {
            std::this_thread::yield();
            limit = bytes;
            return ++raised, 0;
          });
          if (error != 0 || limit < bytes) ++early;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(early == 0);
    CHECK(raised <= kLast - kFirst);
    CHECK(limit == kLast - 1);
  }
}
