#pragma once
// Text as people give it: a file, a pipe, a FIFO or standard input, read from its beginning to its end; and the check
// that it is text. Every command that reads text reads it here.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::data {

/// The text that a reader takes.
enum class TextRule {
  kAnything,  // every byte is taken as it stands
  kNoJson,    // text, but not JSON objects: their braces and keys would become tokens
  kAlsoJson,  // text of any form
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

/// Checks that no pipe is named twice: its second reader would find nothing. Errors: kInvalidInput.
Status check_read_once(const std::vector<std::string>& paths);

class TextInput {
 public:
  /// `path`: "-" is standard input. `patience`: how long a pipe may give no byte. Errors: kInvalidInput for a folder
  /// or a device that is no text, kIo.
  static Result<TextInput> open(const std::string& path, std::chrono::milliseconds patience = std::chrono::hours(1));

  /// -1: a pipe, whose end is known when it comes.
  int64_t size_bytes() const { return size_bytes_; }

  /// The next `most` bytes, fewer only at the end, into `out`. Errors: kCorrupt for a file that was cut since it was
  /// opened, kTimeout for a pipe that gives nothing, kIo.
  Status read(size_t most, std::string* out);

 private:
  Result<size_t> read_some(char* out, size_t most);
  std::string path_;
  std::chrono::milliseconds patience_{};
  Fd fd_;
  int64_t size_bytes_ = -1, done_ = 0;
};

/// The whole text, without a byte order mark except by kAnything. Errors: those of TextInput and check_text;
/// kInvalidInput for more than `most_bytes`.
Result<std::string> read_text(const std::string& path, int64_t most_bytes, TextRule rule);

/// Whether the name says JSON lines: .jsonl, .ndjson.
bool named_as_json_lines(std::string_view path);

}  // namespace cairn::data
