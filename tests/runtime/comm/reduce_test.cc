#include "runtime/comm/reduce.h"

#include <doctest/doctest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

using namespace cairn;
using namespace cairn::comm;

TEST_SUITE("runtime/comm/reduce") {
  TEST_CASE("the vector loop rounds every upper half of a float32 to bf16 as to_bf16 does, NaN and infinity included") {
    // All 2^16 upper halves with lower halves around the tie.
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      // The sum high + tail in float32 is exact where both share sign and exponent; elsewhere it is some other float32.
      std::vector<bf16> high(1 << 16), tail(1 << 16), out(1 << 16);
      for (uint32_t u = 0; u < high.size(); ++u) {
        high[u].bits = static_cast<uint16_t>(u);
        tail[u] = to_bf16(std::bit_cast<float>(u << 16 | low) - std::bit_cast<float>(u << 16));
      }
      const void* inputs[] = {high.data(), tail.data()};
      reduce_ordered(out.data(), inputs, 2, static_cast<int64_t>(out.size()), DType::kBf16, ReduceOp::kSum);
      int64_t wrong = 0;
      for (size_t u = 0; u < high.size(); ++u) wrong += out[u].bits != to_bf16(to_f32(high[u]) + to_f32(tail[u])).bits;
      CHECK(wrong == 0);
    }
  }

  TEST_CASE("f16 is folded in float and rounded once") {
    const f16 in[3] = {to_f16(2048.0f), to_f16(1.0f), to_f16(1.0f)};  // 2048 + 1 alone is no f16
    const void* inputs[] = {&in[0], &in[1], &in[2]};
    f16 out;
    reduce_ordered(&out, inputs, 3, 1, DType::kF16, ReduceOp::kSum);
    CHECK(to_f32(out) == 2050.0f);
  }

  TEST_CASE("the fold goes from the first input to the last, and the output may be any of them") {
    const float big = 1e8f;  // (1 + big) - big is 0, 1 + (big - big) is 1
    for (size_t into = 0; into < 3; ++into) {
      std::vector<std::vector<float>> in = {std::vector<float>(5000, 1.0f), std::vector<float>(5000, big),
                                            std::vector<float>(5000, -big)};
      const void* inputs[] = {in[0].data(), in[1].data(), in[2].data()};
      reduce_ordered(in[into].data(), inputs, 3, 5000, DType::kF32, ReduceOp::kSum);
      CHECK(in[into] == std::vector<float>(5000, 0.0f));
    }
  }

  TEST_CASE("a tree adds neighbours first, and subtrees that others have added give its bits again") {
    const float big = 1e8f;  // (1 + big) - big is 0 in order; 1 + (big - big) is 1
    std::vector<std::vector<float>> in = {std::vector<float>(1300, 1.0f), std::vector<float>(1300, 0.0f),
                                          std::vector<float>(1300, big), std::vector<float>(1300, -big)};
    const void* inputs[] = {in[0].data(), in[1].data(), in[2].data(), in[3].data()};
    std::vector<float> out(1300), ordered(1300), left(1300), right(1300), both(1300);
    reduce_ordered(out.data(), inputs, 4, 1300, DType::kF32, ReduceOp::kTreeSum);
    CHECK(out == std::vector<float>(1300, 1.0f));
    reduce_ordered(ordered.data(), inputs, 4, 1300, DType::kF32, ReduceOp::kSum);
    CHECK(ordered == std::vector<float>(1300, 0.0f));
    reduce_ordered(left.data(), inputs, 2, 1300, DType::kF32, ReduceOp::kTreeSum);
    reduce_ordered(right.data(), inputs + 2, 2, 1300, DType::kF32, ReduceOp::kTreeSum);
    const void* halves[] = {left.data(), right.data()};
    reduce_ordered(both.data(), halves, 2, 1300, DType::kF32, ReduceOp::kTreeSum);
    CHECK(both == out);
  }

  TEST_CASE("a maximum is exact for every dtype and hands a NaN on from any place") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int place = 0; place < 3; ++place) {
      float x[3] = {1, 2, 3};
      x[place] = nan;
      const void* inputs[] = {&x[0], &x[1], &x[2]};
      float out = 0;
      reduce_ordered(&out, inputs, 3, 1, DType::kF32, ReduceOp::kMax);
      CHECK(out != out);
    }
    const int64_t a = -5, b = std::numeric_limits<int64_t>::min();
    const void* inputs[] = {&a, &b};
    int64_t out = 0;
    reduce_ordered(&out, inputs, 2, 1, DType::kI64, ReduceOp::kMax);
    CHECK(out == -5);
  }
}
