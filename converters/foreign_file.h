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

/// Checks that file `name` of a folder is in the folder: a link may lead within it, and from a snapshot of the Hub's
/// cache to the blobs of the same repository. Asked before the content of a file is copied to a place that others may
/// read. Errors: kInvalidInput, naming the link and where it leads; those of following it.
Status check_inside(const std::filesystem::path& dir, const std::filesystem::path& name);

bool is_plain_file(const std::filesystem::path& path);

}  // namespace cairn::convert
