// Input: the first byte chooses what JSON inside a checkpoint is read: a recipe, a sampler's state, labels.
// The rest are patches (offset, bytes taken away, bytes put in) of a text that is accepted. What is still accepted is
// written as text that reads as the same.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "ckpt/retention/labels.h"
#include "dsl/dsl.h"
#include "runtime/core/check.h"
#include "runtime/data/sampler.h"
#include "tests/fuzz/target.h"

using namespace cairn;

namespace {

template <typename T>
bool told(const Result<T>& read) {
  RT_CHECK(read.ok() || !read.error().message.empty(), "refused without a word");
  return read.ok();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const fuzz::Feed feed(data + 1, size - 1);
  switch (data[0] % 3) {
    case 0: {
      static const std::string text = dsl::encode_recipe(Recipe{});
      const Result<Recipe> read = dsl::decode_recipe(fuzz::patched(text, feed));
      if (!told(read)) break;
      const std::string again = dsl::encode_recipe(read.value());
      const Result<Recipe> second = dsl::decode_recipe(again);
      RT_CHECK(second.ok() && dsl::encode_recipe(second.value()) == again, "a recipe reads as another one");
      break;
    }
    case 1: {
      static const std::string text = data::to_json(data::SamplerState{.position = 96, .seed = 7});
      const auto read = data::sampler_state_from_json(fuzz::patched(text, feed));
      if (!told(read)) break;
      const std::string again = data::to_json(read.value());
      const auto second = data::sampler_state_from_json(again);
      RT_CHECK(second.ok() && data::to_json(second.value()) == again, "a sampler's state reads as another one");
      break;
    }
    default: {
      static const std::string text = ckpt::encode_labels({{12, {.why = "nan", .by = "guard"}}, {3, {.by = "hand"}}});
      const auto read = ckpt::decode_labels(fuzz::patched(text, feed));
      if (!told(read)) break;
      const auto second = ckpt::decode_labels(ckpt::encode_labels(read.value()));
      RT_CHECK(second.ok() && second.value() == read.value(), "labels read as others");
    }
  }
  return 0;
}
