#include "runtime/kernels/cuda/state.h"

#include "runtime/core/word_sums.h"
#include "runtime/kernels/state_copies.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::Clip;

TEST_SUITE("runtime/kernels/cuda/state") {
  TEST_CASE("experts' biases step by their rate towards the mean, and stay on it") {
    const std::vector<float> choices = {3, 5, 4, 0}, from = {0.5f, 0.25f, 1, -1};
    std::vector<float> to(4);
    kernels::balance_bias(0.125f, 4, nullptr, choices.data(), from.data(), to.data(), 4);
    in_every_order([&] {
      OnDevice<float> d_choices(choices), d_from(from), d_to(std::vector<float>(4));
      Queue on;
      OnDevice<Clip> clip(std::vector<Clip>{{.finite = 0}});
      kernels::cuda::balance_bias(on, 0.125f, 4, clip.data(), d_choices.data(), d_from.data(), d_to.data(), 4);
      CHECK(d_to.values() == std::vector<float>(4));
      clip.data()->finite = 1;
      kernels::cuda::balance_bias(on, 0.125f, 4, clip.data(), d_choices.data(), d_from.data(), d_to.data(), 4);
      CHECK(d_to.values() == to);
    });
  }
  TEST_CASE("an element that is not finite is noted, and stays noted until the first array of the next step") {
    std::vector<float> x(1003, 1.0f), bad = x;
    bad[777] = NAN;
    bad[3] = -INFINITY;
    in_every_order([&] {
      OnDevice<float> good(x), ruined(bad);
      OnDevice<double> found(std::vector<double>{5.0});
      Queue on;
      const auto note = [&](const OnDevice<float>& of, bool first) {
        kernels::cuda::note_not_finite(on, of.data(), std::ssize(x), first, found.data());
        return found.values()[0];
      };
      CHECK(note(good, true) == 0);
      CHECK(note(ruined, false) == 1);
      CHECK(note(good, false) == 1);
      CHECK(note(ruined, true) == 1);
      CHECK(note(good, true) == 0);
    });
  }
  TEST_CASE("checksums have the bits of the CPU's, wherever a block begins, and wait for a clip that is finite") {
    constexpr int64_t kFirst = 1000;
    const auto x = normals<float>("x", 20037);
    for (const int64_t shift : {0, 1}) {
      const int64_t count = std::ssize(x) - shift;
      const uint64_t sum = word_sums_plain(reinterpret_cast<const std::byte*>(x.data() + shift), count);
      in_every_order([&] {
        OnDevice<float> d_x(x);
        OnDevice<uint64_t> partials(kernels::cuda::kSumBlocks), d_sum(std::vector<uint64_t>{77});
        OnDevice<kernels::Clip> clips(std::vector<kernels::Clip>{{.finite = 0}, {.finite = 1}});
        Queue on;
        const auto add = [&](int64_t first, const kernels::Clip* clip) {
          kernels::cuda::add_word_sums(on, d_x.data() + shift, count, first, clip, partials.data(), d_sum.data());
          return d_sum.values()[0];
        };
        CHECK(add(0, clips.data()) == 77);
        CHECK(add(0, clips.data() + 1) == sum);
        CHECK(add(kFirst, nullptr) == add_word_sums(sum, shift_word_sums(sum, kFirst)));
      });
    }
  }
  TEST_CASE("checksums of many runs have the bits of the CPU's: of more chunks than one, aligned or not, or empty") {
    const auto x = normals<float>("x", 2 * kSumChunkWords + 1037);
    const std::vector<std::pair<int64_t, int64_t>> spans = {
        {0, 5}, {8, 0}, {3, 1030}, {16, 2 * kSumChunkWords + 7}, {1, kSumChunkWords + 1}, {64, kSumChunkWords}, {9, 1}};
    in_every_order([&] {
      OnDevice<float> d_x(x);
      std::vector<WordRun> runs;
      std::vector<uint64_t> expected;
      int64_t chunks = 0;
      for (const auto& [first, count] : spans) {
        runs.push_back({d_x.data() + first, count, chunks});
        chunks += sum_chunks(count);
        expected.push_back(word_sums(reinterpret_cast<const std::byte*>(x.data() + first), count));
      }
      OnDevice<WordRun> table(runs);
      OnDevice<uint64_t> partials(chunks), sums(std::ssize(runs));
      CHECK(kernels::cuda::sum_runs(nullptr, table.data(), std::ssize(runs), chunks, partials.data(), sums.data()) ==
            0);
      CHECK(sums.values() == expected);
    });
  }
  TEST_CASE("numbers that are not finite are counted, and added to what was counted before") {
    std::vector<float> x = normals<float>("x", 5003);
    x[0] = INFINITY;
    x[4096] = NAN;
    x[5002] = -INFINITY;
    in_every_order([&] {
      OnDevice<float> d_x(x);
      OnDevice<int64_t> partials(kernels::cuda::kSumBlocks), counts(std::vector<int64_t>{10});
      Queue on;
      kernels::cuda::count_not_finite(on, d_x.data(), std::ssize(x), partials.data(), counts.data());
      CHECK(counts.values()[0] == 13);
    });
  }
}
