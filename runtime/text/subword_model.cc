#include "runtime/text/subword_model.h"

#include <fmt/format.h>

#include "runtime/text/json_fields.h"

namespace cairn::text {

std::string byte_token(unsigned char byte) { return fmt::format("<0x{:02X}>", byte); }

Result<std::unique_ptr<SubwordModel>> make_subword_model(const nlohmann::json& spec) {
  if (!spec.is_object()) return bad_field("model", "an object", spec);
  // Files of the first years say no type.
  std::string type = spec.contains("merges") ? "BPE" : "";
  if (spec.contains("type")) {
    RT_TRY_SET(type, string_field(spec, "type"));
  }
  if (type == "BPE") return make_bpe(spec).with("model");
  if (type == "Unigram") return make_unigram(spec).with("model");
  return Error{ErrorCode::kUnsupported, fmt::format("the model type {} is not read here; known are BPE, Unigram",
                                                    type.empty() ? "(none)" : type)};
}

}  // namespace cairn::text
