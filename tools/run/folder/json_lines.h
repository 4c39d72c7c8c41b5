#pragma once
// metrics.jsonl and events.jsonl as they lie.

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace cairn::tools {

/// Whole objects of a file of lines, in order; a line that a kill has torn is passed over. No file: none.
std::vector<nlohmann::json> json_lines(const std::filesystem::path& path);

}  // namespace cairn::tools
