#pragma once
// PREFIX.origin, beside a Megatron pair: the file and byte that each document came from (docs/format.md). Training does
// not read it; `cairn data samples` does. Little-endian:
//   8 bytes   "CAIRNOR1"
//   12 a document   u32 its file, u64 its first byte there
//   table     for each file u32 length of its name, u8 packing (0: none, 1: gzip, 2: zstd, 3: a table), the
//             name
//   u64 x 4   files, bytes of the table; documents and tokens of the pair
//   u64       XXH3-64 of the table and those four
// Bytes of a packed file are counted in what it unpacks to. A table has rows in place of bytes, counted from 1.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/new_file.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "runtime/data/unpack.h"

namespace cairn::data {

std::string document_origins_path(const std::string& prefix);

struct OriginFile {
  std::string name;
  Packing packing = Packing::kNone;
  bool operator==(const OriginFile&) const = default;
};

struct DocumentOrigin {
  uint32_t file = 0;  // of the table
  uint64_t byte = 0;  // of a table of rows: the row
  bool operator==(const DocumentOrigin&) const = default;
};

/// Writes it under a temporary name, until publish(). Memory: a buffer, and the files' names.
class OriginWriter {
 public:
  /// Errors: as a file system fails.
  static Result<OriginWriter> create(const std::string& prefix);
  Status add_document(const DocumentOrigin& origin);
  /// `files`: the table. `tokens`: of the pair.
  Status publish(const std::vector<OriginFile>& files, int64_t tokens);

 private:
  explicit OriginWriter(NewFile file) : file_(std::move(file)) {}
  NewFile file_;
  std::string buffer_;
  uint64_t documents_ = 0;
};

/// Reads it. Threads: any number.
class DocumentOrigins {
 public:
  /// None: there is no such file, or it is of a pair with other counts. Errors: kCorrupt with the byte; kIo.
  static Result<std::optional<DocumentOrigins>> open(const std::string& prefix, int64_t documents, int64_t tokens);

  const std::vector<OriginFile>& files() const { return files_; }
  /// The origins of documents [first, first + count). Errors: kCorrupt for a file that the table lacks; kIo.
  Result<std::vector<DocumentOrigin>> read(int64_t first, int64_t count) const;

 private:
  std::string path_;
  std::shared_ptr<const Fd> fd_;
  int64_t documents_ = 0;
  std::vector<OriginFile> files_;
};

}  // namespace cairn::data
