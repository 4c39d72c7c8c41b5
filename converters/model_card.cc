#include "converters/model_card.h"

#include <fmt/format.h>

namespace cairn::convert {

std::string model_card(const ModelCard& card) {
  std::string out = fmt::format(
      "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- {}\n- cairn\n---\n\n# {}\n\n"
      "A `{}` model of {} parameters, weights in {}. Written by Cairn {}.\n\n## Lineage\n\n",
      card.model_type, card.name, card.model_type, card.parameters, card.dtype, CAIRN_VERSION);
  for (const std::string& line : card.lineage) out += fmt::format("- {}\n", line);
  out +=
      "\n## To be written before this is published\n\n- licence, of the weights and of what they were made from\n"
      "- data: what the model was trained on\n- intended use, limits, evaluation\n";
  return out;
}

}  // namespace cairn::convert
