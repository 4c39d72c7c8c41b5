#pragma once
// Files of folders that others made. The converters open each of them here, so what no reader can use is refused in one
// place and in the same words: no such file, a folder or a pipe, a pointer that Git LFS left in place of the file.

#include <cstdint>
#include <filesystem>
#include <string>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::convert {

struct ForeignFile {
  Fd fd;
  int64_t bytes = 0;
};

/// Opened for reading. Errors, with the path: kInvalidInput (not there, may not be read, no regular file, a pointer of
/// Git LFS), kIo.
Result<ForeignFile> open_foreign(const std::filesystem::path& path);

/// The whole of a small file. Errors: those above, kInvalidInput for one larger than max_bytes, kCorrupt for one that
/// gets shorter meanwhile.
Result<std::string> read_text_file(const std::filesystem::path& path, int64_t max_bytes);

bool is_plain_file(const std::filesystem::path& path);

}  // namespace cairn::convert
