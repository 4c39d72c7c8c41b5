// Input: patches of a position's JSON (tests/fuzz/target.h). What is still accepted is written as text that reads as
// the same.
#include <string>

#include "ckpt/position.h"
#include "runtime/core/check.h"
#include "runtime/data/sampler.h"
#include "tests/fuzz/target.h"

using namespace cairn;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string text =
      ckpt::encode_position(trainer::TrainPosition{.step = 12,
                                                   .samples = 96,
                                                   .tokens = 3072,
                                                   .loss = 2.5,
                                                   .guards = {.level = 5,
                                                              .losses = {2.5f, -0.0f},
                                                              .norms = {0.5f},
                                                              .outliers_in_row = 1,
                                                              .skipped = 3,
                                                              .skipped_steps = {4, 7},
                                                              .recomputed = {7},
                                                              .audited = 8},
                                                   .past = {.points = {{3, 24, 768}}, .moments_from = 2},
                                                   .seed = 7,
                                                   .sampler = data::to_json(data::SamplerState{.position = 96})});
  const auto read = ckpt::decode_position(fuzz::patched(text, fuzz::Feed(data, size)));
  if (!read.ok()) {
    RT_CHECK(!read.error().message.empty(), "refused without a word");
    return 0;
  }
  const std::string again = ckpt::encode_position(read.value());
  const auto second = ckpt::decode_position(again);
  RT_CHECK(second.ok() && ckpt::encode_position(second.value()) == again, "a position reads as another one");
  return 0;
}
