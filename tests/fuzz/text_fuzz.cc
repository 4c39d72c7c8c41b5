// Input: the first bytes of a text, a line of JSON lines, a file beside a tokenizer. Each reader takes it or says why
// not, and Python's dialect of JSON reads standard JSON as the standard does.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/core/check.h"
#include "runtime/data/text_input.h"
#include "runtime/json/json.h"
#include "runtime/text/beside.h"
#include "tests/fuzz/target.h"

using namespace cairn;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(fuzz::text(data, size));
  const Status kind = data::check_text(text, data::TextRule::kNoJson);
  RT_CHECK(kind.ok() || !kind.error().message.empty(), "refused without a word");
  const Result<std::string> field = json_text_field(text, "text");
  RT_CHECK(field.ok() || !field.error().message.empty(), "refused without a word");
  const nlohmann::json standard = json_or_nothing(text), python = json_or_nothing(text, JsonNumbers::kPython);
  RT_CHECK(standard.is_discarded() || standard == python, "the dialects differ on standard JSON");
  if (!standard.is_discarded() && standard.is_object() && standard.contains("text") && standard["text"].is_string()) {
    RT_CHECK(field.ok() && field.value() == standard["text"].get<std::string>(), "another text of the line");
  }
  const auto beside = text::read_beside({text, text, text});
  RT_CHECK(beside.ok() || !beside.error().message.empty(), "refused without a word");
  return 0;
}
