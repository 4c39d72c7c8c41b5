#include "ckpt/position.h"

#include <doctest/doctest.h>

#include <bit>
#include <limits>
#include <nlohmann/json.hpp>

#include "ckpt/snapshot/arena.h"
#include "runtime/json/json.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

trainer::TrainPosition position_of_window(int64_t window) {
  trainer::TrainPosition out{.step = 12, .samples = 96, .tokens = 3072, .loss = 2.5};
  out.guards = {.level = std::numeric_limits<uint64_t>::max(),
                .outliers_in_row = 2,
                .skipped = 70,
                .audited = 9,
                .replicated = 7};
  for (int64_t k = 0; k < window; ++k) {
    out.guards.losses.push_back(
        std::bit_cast<float>(static_cast<uint32_t>(0x3f9e3779u + 40503u * static_cast<uint32_t>(k))));
    out.guards.norms.push_back(-out.guards.losses.back());
  }
  for (int64_t k = 0; k < 64; ++k) {
    out.guards.skipped_steps.push_back((int64_t{1} << 40) + k);
    out.guards.recomputed.push_back((int64_t{1} << 40) + k);
  }
  return out;
}

}  // namespace

TEST_SUITE("ckpt/position") {
  TEST_CASE("guards' state is read back bit for bit, and the widest window leaves a snapshot's sampler its room") {
    const trainer::TrainPosition widest = position_of_window(256);
    const std::string text = encode_position(widest);
    const auto read = decode_position(text);
    REQUIRE(read.ok());
    CHECK(read.value().guards == widest.guards);
    CHECK(std::ssize(text) < 7 << 10);
    Manifest manifest;
    put_position(widest, manifest);
    const auto from_disk = position_of(manifest);
    REQUIRE(from_disk.ok());
    CHECK(from_disk.value().guards == widest.guards);
    CHECK(json_or_nothing(encode_position({})).contains("guards") == false);
  }

  TEST_CASE("a damaged window is refused with its field") {
    const nlohmann::json whole = json_or_nothing(encode_position(position_of_window(2)));
    const auto refused = [&](const char* field, const nlohmann::json& value) {
      nlohmann::json damaged = whole;
      damaged["guards"][field] = value;
      const auto read = decode_position(json_text(damaged));
      return !read.ok() && read.error().code == ErrorCode::kCorrupt &&
             read.error().message.find(field) != std::string::npos;
    };
    CHECK(refused("losses", "3f80000"));
    CHECK(refused("norms", "3f80000g"));
    CHECK(refused("norms", 5));
    CHECK(refused("level", -1));
    CHECK(refused("skipped", -1));
    CHECK(refused("skipped_steps", {3, 3}));
    CHECK(refused("recomputed", {0}));
  }
}
