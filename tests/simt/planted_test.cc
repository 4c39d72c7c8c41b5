// Each build sees the faults that are planted, in its way, and nothing else. What a build does not see is in the table
// too: the day it does, the table is to be mended, and docs/cuda-tests.md with it.
#include "tests/simt/planted.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/simt/device_memory.h"
#include "tests/simt/executor.h"
#include "tests/simt/reports.h"

using namespace cairn::simt;
using namespace cairn::simt::planted;
using cairn::kernels::cuda::Queue;

namespace {

constexpr int64_t kRows = 5, kWidth = 268;

std::vector<float> numbers(int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>((i * 37 + 11) % 101) / 50.0f - 1.0f;
  return out;
}

bool close(const std::vector<float>& got, const std::vector<float>& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!(std::abs(got[i] - wanted[i]) <= 1e-4f * (1 + std::abs(wanted[i])))) return false;  // NaN: false
  }
  return true;
}

// Each runs its kernel with the fault and says whether the result is right.
bool centres(Bug bug) {
  const std::vector<float> x = numbers(kRows * kWidth);
  std::vector<float> wanted(x.size());
  for (int64_t r = 0; r < kRows; ++r) {
    double sum = 0;
    float top = -INFINITY;
    for (int64_t c = 0; c < kWidth; ++c) {
      sum += x[r * kWidth + c];
      top = std::max(top, x[r * kWidth + c]);
    }
    const float mean = static_cast<float>(sum / kWidth);
    for (int64_t c = 0; c < kWidth; ++c) wanted[r * kWidth + c] = (x[r * kWidth + c] - mean) * top;
  }
  DeviceArray<float> from(x), to(kRows * kWidth);
  Queue on;
  centre_rows(on, from.data(), to.data(), kRows, kWidth, bug);
  return close(to.values(), wanted);
}

bool softmaxes(Bug bug) {
  const std::vector<float> x = numbers(kRows * kWidth);
  std::vector<int32_t> targets = {3, 200, 17, 99, 1};
  std::vector<float> wanted(x.size()), losses(kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < kWidth; ++c) sum += std::exp(x[r * kWidth + c]);
    for (int64_t c = 0; c < kWidth; ++c) {
      wanted[r * kWidth + c] = static_cast<float>(std::exp(x[r * kWidth + c]) / sum);
    }
    losses[r] = static_cast<float>(std::log(sum)) - x[r * kWidth + targets[r]];
  }
  DeviceArray<float> logits(x), loss(kRows);
  DeviceArray<int32_t> of(targets);
  Queue on;
  softmax_rows(on, logits.data(), of.data(), loss.data(), kRows, kWidth, bug);
  return close(logits.values(), wanted) && close(loss.values(), losses);
}

bool adds(Bug bug) {
  constexpr int64_t kCount = 1001;
  const std::vector<float> w = numbers(kCount), g = numbers(kCount);
  std::vector<float> wanted = w;
  for (int64_t i = 0; i < kCount; ++i) wanted[i] += 0.5f * g[i];
  DeviceArray<float> to(w), by(g);
  Queue on;
  add_to(on, to.data(), by.data(), 0.5f, kCount, bug);
  return close(to.values(), wanted);
}

bool adds_tiles(Bug bug) {
  constexpr int64_t kTile = 96 * 4, kTiles = 4;
  const std::vector<float> x = numbers(kTiles * kTile);
  std::vector<float> wanted(kTile, 0.0f);
  for (int64_t tile = 0; tile < kTiles; ++tile) {
    for (int64_t i = 0; i < kTile; ++i) wanted[i] += x[tile * kTile + kTile - 1 - i];
  }
  DeviceArray<float> from(x), sums(kTile);
  Queue on;
  add_tiles(on, from.data(), sums.data(), kTiles, bug);
  return close(sums.values(), wanted);
}

struct Planted {
  Bug bug;
  bool (*run)(Bug);
  int wrong_at_least;  // of the five orders, in a plain build
  const char* asan;    // in its reports; "" where it sees nothing
  const char* watched;
};

const Planted kTable[] = {
    {Bug::kSumReadEarly, centres, 5, "", "RACE in a block"},
    {Bug::kRoomWrittenEarly, centres, 1, "", "RACE in a block"},
    {Bug::kBehindTheRow, centres, 1, "heap-buffer-overflow simt.h:", "OUTSIDE by 16 bytes: written at planted.cu:"},
    {Bug::kMaximaReadEarly, centres, 1, "", "RACE in a block"},
    {Bug::kTargetOverwritten, softmaxes, 1, "", "RACE in a block"},
    {Bug::kTailTooLong, adds, 0, "heap-buffer-overflow planted.cu:", "OUTSIDE by 4 bytes: read at planted.cu:"},
    {Bug::kBlocksMeet, centres, 1, "", "RACE of blocks"},
    {Bug::kSharedUnwritten, centres, 0, "", "UNWRITTEN shared memory: read at planted.cu:"},
    {Bug::kCopyReadEarly, adds_tiles, 5, "", "RACE in a block"},
    {Bug::kCopySeenEarly, adds_tiles, 1, "", "RACE in a block"},
    {Bug::kCopyBegunEarly, adds_tiles, 1, "", "RACE in a block"},
};

std::string joined(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

}  // namespace

TEST_SUITE("simt/planted") {
  TEST_CASE("kernels without a fault are right in every order, and nothing is reported") {
    for (const Order& order : kOrders) {
      CAPTURE(std::string(order.name));
      set_order(order);
      CHECK(centres(Bug::kNone));
      CHECK(softmaxes(Bug::kNone));
      CHECK(adds(Bug::kNone));
      CHECK(adds_tiles(Bug::kNone));
      CHECK(joined(take_reports()) == "");
    }
    set_order({});
  }

  TEST_CASE("each planted fault is seen as the table says") {
    for (const Planted& planted : kTable) {
      CAPTURE(static_cast<int>(planted.bug));
      int wrong = 0;
      std::string reports;
      for (const Order& order : kOrders) {
        set_order(order);
        wrong += planted.run(planted.bug) ? 0 : 1;
        const std::string seen = joined(take_reports());
        CAPTURE(std::string(order.name));
        if (build() == Build::kWatched) {  // whatever the order
          INFO(seen);
          CHECK(seen.find(planted.watched) != std::string::npos);
        }
        reports += seen;
      }
      MESSAGE(static_cast<int>(planted.bug) << ": wrong in " << wrong << " of 5 orders\n" << reports);
      CHECK(wrong >= planted.wrong_at_least);
      if (build() == Build::kAsan) CHECK(reports.find(planted.asan) != std::string::npos);
      if (build() == Build::kAsan && *planted.asan == '\0') CHECK(reports == "");
    }
    set_order({});
  }

  TEST_CASE("the watch counts sectors and turns of the banks") {
    if (build() != Build::kWatched) return;
    constexpr int64_t kCount = 96 * 32;
    DeviceArray<float> from(numbers(kCount)), to(kCount);
    Queue on;
    for (const int64_t stride : {1, 2, 32}) {
      take_traffic();
      copy_strided(on, from.data(), to.data(), kCount, stride);
      int64_t lines = 0;
      for (const Traffic& traffic : take_traffic()) {
        CAPTURE(traffic.line);
        CHECK(traffic.requests == kCount / 32);
        CHECK(traffic.sectors == traffic.requests * (stride == 1 ? 4 : stride == 2 ? 8 : 32));
        CHECK(traffic.used() == doctest::Approx(stride == 1 ? 1 : stride == 2 ? 0.5 : 0.125));
        ++lines;
      }
      CHECK(lines == 2);
    }
    take_reports();  // strided copies write a place twice
    const std::vector<float> square = numbers(1024);
    DeviceArray<float> in(square), out(1024);
    for (const int64_t pitch : {32, 33}) {
      take_traffic();
      transpose(on, in.data(), out.data(), pitch);
      CHECK(out.values()[5 * 32 + 9] == square[9 * 32 + 5]);
      double worst = 0;
      for (const Traffic& traffic : take_traffic()) {
        if (traffic.shared) worst = std::max(worst, static_cast<double>(traffic.turns) / traffic.requests);
      }
      CHECK(worst == (pitch == 32 ? 32 : 1));
    }
    CHECK(joined(take_reports()) == "");
  }
}
