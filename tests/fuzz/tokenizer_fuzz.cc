// Input: a tokenizer.json. What is accepted gives ids that it knows, and texts for them.
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/text/tokenizer.h"
#include "tests/fuzz/target.h"

using namespace cairn;
using namespace cairn::text;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto made = make_hf_tokenizer(fuzz::text(data, size), {.config = R"({"eos_token":"</s>"})"});
  if (!made.ok()) {
    RT_CHECK(!made.error().message.empty(), "refused without a word");
    return 0;
  }
  const Tokenizer& tokenizer = *made.value();
  std::vector<int32_t> ids;
  for (const std::vector<int32_t>& side : {tokenizer.before(), tokenizer.after()})
    ids.insert(ids.end(), side.begin(), side.end());
  for (const char* text :
       {"", "a", "Hello  w\xc3\xb6rld</s> 12\n\na\xcc\x81 \xf0\x9f\x8c\x8d<s>", "aaaaaaaaaaaaaaaab"}) {
    const Status encoded = tokenizer.encode(text, &ids);  // a pattern may give up
    RT_CHECK(encoded.ok() || !encoded.error().message.empty(), "gave up without a word");
  }
  for (const int32_t id : ids) RT_CHECK(tokenizer.has(id), "the id {} of a text is no token's", id);
  for (const Specials specials : {Specials::kKeep, Specials::kSkip}) {
    const Result<std::string> text = tokenizer.decode(ids, specials);
    RT_CHECK(text.ok() || !text.error().message.empty(), "gave up without a word");
  }
  return 0;
}
