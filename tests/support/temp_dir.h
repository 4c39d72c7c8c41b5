#pragma once
// A folder of one test below the build tree (a real disk: tmpfs may refuse O_DIRECT), removed at the end.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace cairn::testing {

class TempDir {
 public:
  /// `name` tells a person whose folder it is, should a killed test leave it behind.
  explicit TempDir(const std::string& name = "test") : path(make(name)) {}
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path / name; }

  const std::filesystem::path path;

 private:
  static std::filesystem::path make(const std::string& name) {
    const auto parent = std::filesystem::path(CAIRN_BINARY_DIR) / "test-tmp";
    std::filesystem::create_directories(parent);
    std::string pattern = parent / (name + "-XXXXXX");
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    return pattern;
  }
};

}  // namespace cairn::testing
