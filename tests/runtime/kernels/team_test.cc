#include "runtime/kernels/team.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "kernel_testing.h"
#include "runtime/kernels/parallel.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::parallel_ranges;
using kernels::parallel_tasks;

TEST_SUITE("runtime/kernels/team") {
  TEST_CASE("every task runs once, and is done when the call returns, job after job") {
    for (const int threads : {1, 2, 3, 8}) {
      CAPTURE(threads);
      with_threads(threads, [] {
        for (int64_t count = 0; count < 300; ++count) {
          std::vector<int> runs(count, 0);  // plain: what a helper wrote must be visible here
          parallel_tasks(count, false, [&](int64_t task) { ++runs[task]; });
          for (const int n : runs) REQUIRE(n == 1);
        }
      });
    }
  }

  TEST_CASE("helpers that have fallen asleep come back") {
    with_threads(2, [] {
      for (int round = 0; round < 5; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        std::atomic<int> inside = 0;
        std::atomic<bool> met = false;
        // Two tasks that end only once both run: the caller alone would wait here for ever.
        parallel_tasks(2, false, [&](int64_t) {
          ++inside;
          while (inside.load() < 2 && !met.load()) std::this_thread::yield();
          met = true;
        });
        CHECK(inside == 2);
      }
    });
  }

  TEST_CASE("a task that splits its work runs it itself") {
    with_threads(4, [] {
      std::vector<int> runs(64, 0);
      parallel_tasks(8, false, [&](int64_t outer) {
        CHECK(kernels::team_threads() == 1);
        parallel_tasks(8, false, [&](int64_t inner) { ++runs[outer * 8 + inner]; });
      });
      for (const int n : runs) CHECK(n == 1);
      CHECK(kernels::team_threads() == 4);
    });
  }

  TEST_CASE("ranks as threads have teams of their own") {
    std::vector<std::thread> ranks;
    std::vector<int64_t> sums(4, 0);
    for (int64_t rank = 0; rank < 4; ++rank) {
      ranks.emplace_back([rank, &sums] {
        with_threads(2, [&] {
          for (int round = 0; round < 200; ++round) {
            std::atomic<int64_t> sum = 0;
            parallel_tasks(16, false, [&](int64_t task) { sum += task + rank; });
            sums[rank] += sum;
          }
        });
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (int64_t rank = 0; rank < 4; ++rank) CHECK(sums[rank] == 200 * (120 + 16 * rank));
  }

  TEST_CASE("ranges cover what they are to cover, and begin at whole units") {
    with_threads(3, [] {
      for (const int64_t count : {1, 63, 64, 65, 1000, 100'000}) {
        std::vector<int> runs(count, 0);
        std::atomic<bool> aligned = true;
        parallel_ranges(count, 64, 10'000, [&](int64_t begin, int64_t end) {
          if (begin % 64 != 0) aligned = false;
          for (int64_t i = begin; i < end; ++i) ++runs[i];
        });
        CHECK(aligned);
        for (const int n : runs) REQUIRE(n == 1);
      }
    });
  }
}
