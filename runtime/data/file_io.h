#pragma once
// Whole reads and writes of the token files, private to runtime/data. Errors carry path and offset.

#include <cstdint>
#include <string>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::data {

/// Opens a regular file for reading and tells its size. Errors: kInvalidInput when there is none or it is no file.
struct OpenedFile {
  Fd fd;
  int64_t size_bytes = 0;
};
Result<OpenedFile> open_readable(const std::string& path);

/// Reads exactly `count_bytes` at `offset`. Errors: kCorrupt when the file ends before (it was cut after it was
/// opened), kIo when the storage fails. Never SIGBUS, which a mapped file would raise in both cases.
Status read_exact(int fd, const std::string& path, int64_t offset, void* out, int64_t count_bytes);

Status write_exact(int fd, const std::string& path, int64_t offset, const void* bytes, int64_t count_bytes);

Status sync_file(int fd, const std::string& path);

/// fsync of the directory that holds `path`: from then on a rename or unlink in it survives a power cut.
Status sync_parent_dir(const std::string& path);

}  // namespace cairn::data
