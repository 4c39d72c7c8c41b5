#pragma once
// The directory of a zip archive whose entries are stored as they are, as torch.save writes them (zip64 too): where
// the bytes of each entry lie. Nothing is ever unpacked, so an archive cannot grow. What an honest writer does not make
// is refused: packed or encrypted entries, entries that overlap or whose two headers disagree, doubled names, names
// that lead out of the archive. Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::convert {

/// Fills `out` from the file's bytes at `offset`.
using ReadAt = std::function<Status(int64_t offset, std::span<char> out)>;

struct ZipEntry {
  std::string name;
  int64_t offset = 0, bytes = 0;  // of the data in the file
  uint32_t crc32 = 0;             // as the directory has it; 0 may mean that it was not computed
};

/// In the order in which the data lies. Errors: kCorrupt and kUnsupported, naming entry and byte; those of `read`.
/// Memory: a small multiple of the directory's size, which lies in the file.
Result<std::vector<ZipEntry>> read_zip_directory(int64_t file_bytes, const ReadAt& read);

}  // namespace cairn::convert
