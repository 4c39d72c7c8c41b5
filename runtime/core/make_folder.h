#pragma once
// Folders that a command makes on its way to what it writes.

#include <filesystem>

#include "runtime/core/result.h"

namespace cairn {

/// Makes the folder of `file`, with those above it, where it is missing. Errors: os_error naming the folder.
inline Status make_folder_of(const std::filesystem::path& file) {
  const std::filesystem::path folder = file.parent_path();
  if (folder.empty()) return {};
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) return os_error(failed.value(), folder.string());
  return {};
}

}  // namespace cairn
