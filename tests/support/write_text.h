#pragma once
// Files of a test, as of a folder that stands for /proc or for a cgroup's.

#include <filesystem>
#include <fstream>
#include <string>

namespace cairn::testing {

/// The file with this text; its folders are made.
inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

}  // namespace cairn::testing
