#pragma once
// A folder of one test below the build tree (a real disk: tmpfs may refuse O_DIRECT), removed at the end.

#include <unistd.h>

#include <filesystem>
#include <string>

namespace cairn::testing {

struct TempDir {
  std::filesystem::path path;
  explicit TempDir(const std::string& name)
      : path(std::filesystem::path(CAIRN_BINARY_DIR) / "test-tmp" / (name + "-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  TempDir(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

}  // namespace cairn::testing
