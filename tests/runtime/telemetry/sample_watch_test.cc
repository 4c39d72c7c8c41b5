#include "runtime/telemetry/sample_watch.h"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "runtime/core/random.h"

using namespace cairn;
using namespace cairn::telemetry;

namespace {

/// Steps of 16 samples of two sources, whose losses are about 3 and 5, within 0.2.
class Losses {
 public:
  std::vector<SampleLoss> next() {
    std::vector<SampleLoss> out;
    for (int64_t k = 0; k < 16; ++k, ++position_) {
      const auto source = static_cast<int32_t>(k % 2);
      out.push_back({position_, source, (source == 0 ? 3 : 5) + shift_ + 0.4 * (uniform_at(1, position_) - 0.5)});
    }
    return out;
  }
  void shift(double by) { shift_ += by; }

 private:
  int64_t position_ = 0;
  double shift_ = 0;
};

}  // namespace

TEST_SUITE("runtime/telemetry/sample_watch") {
  TEST_CASE("a sample is compared with those of its own source, upwards and downwards, once there are enough") {
    SampleWatch watch(2);
    Losses losses;
    std::vector<SampleLoss> young = losses.next();
    young[4].loss = 50;
    CHECK(watch.add(young).empty());
    for (int step = 1; step < 31; ++step) CHECK(watch.add(losses.next()).empty());  // 248 of each source
    std::vector<SampleLoss> step = losses.next();
    step[0].loss = 50;
    CHECK(watch.add(step).empty());
    step = losses.next();  // 256
    step[0].loss = 5;      // as the other source's
    step[1].loss = 3;
    step[2].loss = 3.4;
    step[3].loss = std::nan("");  // a sample without a token that counts
    const std::vector<OutlierSample> found = watch.add(step);
    REQUIRE(found.size() == 2);
    CHECK(found[0].position == step[0].position);
    CHECK(found[0].loss == 5);
    CHECK(found[0].z == doctest::Approx(2 / (1.4826 * 0.1)).epsilon(0.1));
    CHECK(found[1].position == step[1].position);
    CHECK(found[1].z < -6);
  }

  TEST_CASE("the four furthest samples on either side are named, and a level that lasts becomes the new one") {
    SampleWatch watch(2);
    Losses losses;
    for (int step = 0; step < 64; ++step) watch.add(losses.next());
    std::vector<SampleLoss> step = losses.next();
    for (int k = 0; k < 8; ++k) step[static_cast<size_t>(2 * k)].loss = k < 6 ? 10 + k : 1.5 - k / 10.0;
    const std::vector<OutlierSample> found = watch.add(step);
    std::vector<double> seen;
    for (const OutlierSample& one : found) seen.push_back(one.loss);
    CHECK(seen == std::vector<double>{15, 14, 13, 12, 0.9, 0.8});
    losses.shift(-2);
    CHECK(watch.add(losses.next()).size() == 4);
    for (int64_t step = 1; step < SampleWatch::kWindow / 8; ++step) watch.add(losses.next());
    for (int more = 0; more < 20; ++more) CHECK(watch.add(losses.next()).empty());
  }
}
