#pragma once
// Text as people give it: a file, a pipe, a FIFO or standard input, plain or packed by gzip or zstd, or the rows of a
// table, read from its beginning to its end; and the check that it is text. Every command that reads text reads it
// here.

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "runtime/data/table.h"
#include "runtime/data/unpack.h"

namespace cairn::data {

/// The text that a reader takes.
enum class TextRule {
  kAnything,  // every byte is taken as it stands
  kNoJson,    // text, but not JSON objects: their braces and keys would become tokens
  kAlsoJson,  // text of any form
  kRows,      // the same, and tables: their rows, as JSON lines, where the build has the module for them (table.h)
};

/// Refuses what is no text by `begin`, the first bytes of a file (4 KiB suffice): packed files and archives, tables
/// and arrays, documents, pages of HTML, pictures and programs by their signatures; pointers of Git LFS; UTF-16 and
/// UTF-32 by their mark or their NULs. Errors: kInvalidInput, with the kind and the remedy.
Status check_text(std::string_view begin, TextRule rule);

/// Names the kind of a token file that has no tokens, with the remedy: "is packed by gzip: unpack it first (gunzip
/// -c)"; empty: none is known. `begin`: its first bytes. Tokens may begin as a short signature does, so only longer
/// ones count.
std::string no_tokens(std::string_view begin);

/// How many bytes a reader of the text skips first: those of UTF-8's byte order mark, which is no part of it.
size_t mark_bytes(std::string_view begin, TextRule rule);

/// Most bytes of a line of JSON, which is read as a whole. Errors: kInvalidInput, with the remedy.
inline constexpr int64_t kMostJsonLineBytes = int64_t{64} << 20;
Status check_json_line(int64_t bytes, int64_t most = kMostJsonLineBytes);

class TextInput {
 public:
  /// `path`: "-" is standard input. Text packed by gzip or zstd is unpacked, except by kAnything. A file takes a
  /// descriptor only once it is read. `patience`: how long a pipe may give no byte. Errors: kInvalidInput for a folder
  /// or a device that is no text, kIo.
  static Result<TextInput> open(const std::string& path, TextRule rule,
                                std::chrono::milliseconds patience = std::chrono::hours(1));

  /// A table is read by this column only; otherwise by all. Before the first read().
  void only_column(std::string name) { column_ = std::move(name); }

  /// Stored bytes. -1: a pipe, whose end is known when it comes.
  int64_t size_bytes() const { return size_bytes_; }
  /// Stored bytes read so far; of a table an estimate.
  int64_t taken_bytes() const;
  /// How it is packed; known after the first read().
  Packing packing() const { return packing_; }
  bool packed() const { return packing_ != Packing::kNone; }

  /// The next `most` bytes of text, fewer only at the end, into `out`. Errors: those of check_text for the first;
  /// kCorrupt with the byte for a damaged or cut member of a packed file, one named .gz or .zst that is neither, or a
  /// file that was cut since it was opened; kInvalidInput for a file that was replaced since then; kTimeout for a pipe
  /// that gives nothing; those of table.h; kIo.
  Status read(size_t most, std::string* out);

 private:
  Status begin();
  Status reopen();
  Result<size_t> read_some(char* out, size_t most);
  Result<size_t> read_stored(char* out, size_t most);
  Status read_plain(size_t most, std::string* out);
  Status read_unpacked(size_t most, std::string* out);
  Status begin_table(TableKind kind);
  Status read_table(size_t most, std::string* out);
  Result<bool> next_member();
  Status refill();
  Error damage(std::string_view what) const;

  std::string path_;
  TextRule rule_ = TextRule::kAnything;
  std::chrono::milliseconds patience_{};
  Fd fd_;
  dev_t device_ = 0;  // of a file, to find it again
  ino_t inode_ = 0;
  int64_t size_bytes_ = -1, taken_ = 0;
  bool begun_ = false, checked_ = false;
  // Stored bytes that are read and not yet used: [at_, size).
  std::string stored_;
  size_t at_ = 0;
  Packing packing_ = Packing::kNone;
  std::unique_ptr<Unpacker> unpacker_;  // of gzip and zstd
  std::unique_ptr<TableReader> table_;  // of a table, whose lines are in stored_
  std::string column_;
  bool in_member_ = false;
  int64_t member_at_ = 0;  // its first stored byte
};

/// The whole text, without a byte order mark except by kAnything. Errors: those of TextInput and check_text;
/// kInvalidInput for more than `most_bytes`.
Result<std::string> read_text(const std::string& path, int64_t most_bytes, TextRule rule);

/// Whether the name says JSON lines: .jsonl, .ndjson, and these packed.
bool named_as_json_lines(std::string_view path);

}  // namespace cairn::data
