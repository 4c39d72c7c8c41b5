#include "tools/run/folder/json_lines.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "runtime/json/json.h"

namespace cairn::tools {

std::vector<nlohmann::json> json_lines(const std::filesystem::path& path) {
  std::vector<nlohmann::json> out;
  std::ifstream in(path, std::ios::binary);
  for (std::string line; std::getline(in, line);) {
    nlohmann::json value = json_or_nothing(line);
    if (value.is_object()) out.push_back(std::move(value));
  }
  return out;
}

}  // namespace cairn::tools
