#pragma once
// Files that Git LFS left a pointer in: a clone without `git lfs pull` has some lines of text in place of gigabytes.

#include <string_view>

namespace cairn {

/// By the beginning of a file, at least its first 64 bytes. Source: the Git LFS specification, "The Pointer".
inline bool is_lfs_pointer(std::string_view text) {
  return text.starts_with("version https://git-lfs.github.com/spec/");
}

inline constexpr std::string_view kLfsPointer =
    "is a pointer of Git LFS, not the file itself: run `git lfs pull` in the clone, or download the file";

}  // namespace cairn
