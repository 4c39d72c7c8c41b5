#include "ckpt/shared_order.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "runtime/core/random.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

struct Shard {
  int64_t tensor, bytes;
};

std::vector<WriterPart> parts_of(const std::vector<std::vector<Shard>>& files) {
  std::vector<WriterPart> parts;
  for (const std::vector<Shard>& file : files) {
    WriterPart part;
    for (const Shard& shard : file) part.shards.push_back({.tensor = shard.tensor, .bytes = shard.bytes});
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<std::array<int64_t, 3>> as_numbers(const std::vector<WriteStep>& steps) {
  std::vector<std::array<int64_t, 3>> out;
  for (const WriteStep& step : steps) out.push_back({step.part, step.shard, step.end});
  return out;
}

}  // namespace

TEST_SUITE("ckpt/shared_order") {
  using Steps = std::vector<std::array<int64_t, 3>>;
  constexpr int64_t kPage = 4096;

  TEST_CASE("small tensors go several to a band, each file's behind the other's") {
    const auto parts = parts_of({{{0, 100}, {1, 100}, {3, 100}}, {{0, 100}, {2, 100}, {3, 100}}});
    CHECK((as_numbers(shared_order(parts, {10'000, kPage, 1 << 20})) == Steps{{0, 3, 0}, {1, 3, 0}}));
    CHECK(
        (as_numbers(shared_order(parts, {300, kPage, 1 << 20})) == Steps{{0, 2, 0}, {1, 1, 0}, {0, 3, 0}, {1, 3, 0}}));
    CHECK(
        (as_numbers(shared_order(parts, {400, kPage, 1 << 20})) == Steps{{0, 2, 0}, {1, 2, 0}, {0, 3, 0}, {1, 3, 0}}));
  }

  TEST_CASE("a tensor larger than a band goes in equal parts of each file's share, whole steps") {
    const auto parts = parts_of({{{0, 10 * kPage}, {1, 50}}, {{0, 10 * kPage}, {1, 50}}});
    const Steps parts_of_0{{0, 0, 2 * kPage}, {1, 0, 2 * kPage}, {0, 0, 5 * kPage},
                           {1, 0, 5 * kPage}, {0, 0, 7 * kPage}, {1, 0, 7 * kPage}};
    const auto then = [&](Steps more) {
      more.insert(more.begin(), parts_of_0.begin(), parts_of_0.end());
      return more;
    };
    // What is left of tensor 0 and tensor 1 are more than a band, or are not.
    CHECK((as_numbers(shared_order(parts, {5 * kPage, kPage, 1 << 30})) ==
           then({{0, 1, 0}, {1, 1, 0}, {0, 2, 0}, {1, 2, 0}})));
    CHECK((as_numbers(shared_order(parts, {6 * kPage, kPage, 1 << 30})) == then({{0, 2, 0}, {1, 2, 0}})));
  }

  TEST_CASE("whatever the parts: all is written, in each part forwards, in groups that may be open together") {
    uint64_t seed = 1;
    const auto draw = [&](int64_t n) { return static_cast<int64_t>(mix64(++seed) % static_cast<uint64_t>(n)); };
    for (int round = 0; round < 300; ++round) {
      std::vector<std::vector<Shard>> files(static_cast<size_t>(1 + draw(40)));
      for (auto& file : files) {
        const int64_t shards = draw(12);
        for (int64_t i = 0, tensor = draw(3); i < shards; ++i, tensor = std::max<int64_t>(0, tensor + draw(5) - 1))
          file.push_back({tensor, 1 + draw(draw(2) == 0 ? 100 : 100 * kPage)});
      }
      const auto parts = parts_of(files);
      const SharedOrderLimits limits{1 + draw(200 * kPage), kPage * (1 + draw(3)), 1 + draw(2000 * kPage)};
      std::vector<std::pair<int64_t, int64_t>> at(parts.size());
      std::set<int64_t> open, ended;
      for (const WriteStep& step : shared_order(parts, limits)) {
        REQUIRE((step.part >= 0 && step.part < std::ssize(parts)));
        const auto& shards = parts[static_cast<size_t>(step.part)].shards;
        REQUIRE(!ended.contains(step.part));
        open.insert(step.part);
        REQUIRE(open.size() <= kOpenFiles);
        auto& reached = at[static_cast<size_t>(step.part)];
        REQUIRE((std::pair(step.shard, step.end) >= reached));
        REQUIRE(step.end % limits.step_bytes == 0);
        REQUIRE((step.shard < std::ssize(shards) ? step.end < shards[static_cast<size_t>(step.shard)].bytes
                                                 : step.end == 0));
        reached = {step.shard, step.end};
        if (step.shard < std::ssize(shards)) continue;
        ended.insert(step.part);
        if (std::ranges::includes(ended, open)) open.clear();
      }
      REQUIRE(ended.size() == parts.size());
    }
  }
}
