#pragma once
// The beginning of a model card (README.md of a Hugging Face folder): what Cairn knows, where the weights come from,
// and what whoever publishes them must still say.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn::convert {

struct ModelCard {
  std::string name, model_type, dtype;
  int64_t parameters = 0;
  std::vector<std::string> lineage;  // Markdown, newest first
};

std::string model_card(const ModelCard& card);

}  // namespace cairn::convert
