#pragma once
// Token stores on disk, read-only: Megatron pairs (.bin/.idx), raw little-endian token files (nanoGPT), llm.c shards,
// lists that numpy.save wrote.
// Each becomes a TokenSource: one logical stream of n tokens with random access.
//
// Files are read with pread, not mapped. A file that is cut during a read, or a disk that fails, is then an Error with
// path and offset; a mapping would give SIGBUS in the middle of a step. Sizes are checked against the headers at open,
// so a wrong file is found before the run starts. The page cache serves repeated reads either way.
//
// Threads: a TokenSource is immutable; any number of threads may read from it.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/result.h"

namespace cairn::data {

/// The smallest and the largest of some ids, and how many are outside [0, a limit); none where least > greatest.
struct IdRange {
  int64_t least = std::numeric_limits<int64_t>::max();
  int64_t greatest = std::numeric_limits<int64_t>::min();
  int64_t outside = 0;
  void add(const IdRange& other) {
    least = std::min(least, other.least);
    greatest = std::max(greatest, other.greatest);
    outside += other.outside;
  }
  bool operator==(const IdRange&) const = default;
};

/// Tokens of a source that stand side by side in one document.
struct DocumentPart {
  std::string file;            // as TokenSource::name() of what was opened
  int64_t document = 0;        // of the file, from 0; -1: it has none
  int64_t begin = 0, end = 0;  // of the document's tokens, or of the file's where it has no documents
  int64_t at = 0;              // the first of them in the source
  bool operator==(const DocumentPart&) const = default;
};

class TokenSource {
 public:
  virtual ~TokenSource() = default;

  /// Path (and range, for a slice), for messages.
  virtual const std::string& name() const = 0;
  virtual int64_t token_count() const = 0;

  /// Tokens [start, start + count) as int32 into `out`. Errors: kCorrupt, naming file, token and byte, when a token
  /// is negative, does not fit int32, or is >= the vocabulary given at open; kCorrupt or kIo when the file no longer
  /// delivers. RT_CHECKs that the range is inside the source.
  virtual Status read(int64_t start, int64_t count, int32_t* out) const = 0;

  /// Of tokens [start, start + count) as they are stored, whatever the vocabulary; no id is refused. Errors: kCorrupt
  /// or kIo when the file no longer delivers. RT_CHECKs that the range is inside the source.
  virtual Result<IdRange> id_range(int64_t start, int64_t count, int64_t limit) const = 0;

  /// A cheap identity of the content, the same on every machine and for every path. XXH3-64 over: kind, element type,
  /// token count; for a Megatron pair the .idx header and 64 sampled blocks of the rest of the .idx; and 64 blocks of
  /// 4096 bytes of the tokens, evenly spaced, the first and the last included. A change of size is always seen; a
  /// change of same-size content between the sampled blocks is not (files up to 256 KiB are covered whole).
  virtual uint64_t fingerprint() const = 0;

  /// The places where a split may cut: sequences of a Megatron set (a document each, by custom); 1 for plain files.
  virtual int64_t sequence_count() const { return 1; }

  /// First token of sequence `index`, 0 <= index <= sequence_count(). The last value is token_count().
  virtual Result<int64_t> sequence_start(int64_t index) const;
  /// The same of sequences [first, first + count], count + 1 numbers.
  virtual Result<std::vector<int64_t>> sequence_starts(int64_t first, int64_t count) const;

  /// Whether samples have more than their tokens: rows().
  virtual bool has_rows() const { return false; }

  /// Writes the rows of the sample of `count` inputs from `start` on, [count] each: `targets` that do not count become
  /// kNoTarget; `positions` and `starts` are those of SequenceRows. Errors: as a file system fails.
  virtual Status rows(int64_t start, int64_t count, int32_t* targets, int32_t* positions, int32_t* starts) const;

  /// Identity of what is known of the tokens beside their ids; 0: nothing.
  virtual uint64_t marks() const { return 0; }

  /// The documents that tokens [start, start + count) are of, in their order; fill of a window (packed.h) is of none.
  /// RT_CHECKs that the range is inside the source. Errors: those of sequence_start.
  virtual Result<std::vector<DocumentPart>> documents(int64_t start, int64_t count) const;

  /// Where a token stands, for people: "text.bin: document 12, token 5 of it", both from 0; without documents the token
  /// of the file.
  std::string place(int64_t token) const;
};

struct OpenOptions {
  int64_t vocab = 0;  // tokens >= vocab are errors when read; 0: not checked
};

/// `prefix`.bin and `prefix`.idx. Reads dtype codes 1, 3, 4, 5, 8 (uint8, int16, int32, int64, uint16). The whole .idx
/// is checked against itself and the size of the .bin, streaming, in O(1) memory.
/// Errors: kCorrupt (path, byte offset, value stored, value expected); kUnsupported for codes 6 and 7 (float32 and
/// float64 to one writer, the reverse to another), code 2, multimodal sets and the legacy TNTIDX format; kInvalidInput
/// when a file is missing.
Result<std::unique_ptr<TokenSource>> open_megatron(const std::string& prefix, const OpenOptions& options = {});

/// The prefix of a Megatron pair that `path` names (the prefix itself, or one of its two files); empty: no pair.
std::string megatron_prefix(const std::string& path);

struct NamedTokens {
  std::unique_ptr<TokenSource> source;
  std::string prefix;  // of a Megatron pair; empty: a token file
};
/// Opens what a person names: a pair, else a token file. Errors: those of opening; kInvalidInput naming what is
/// missing.
Result<NamedTokens> open_named_tokens(const std::string& path, const std::string& dtype,
                                      const OpenOptions& options = {});

/// A raw token file of `dtype` "uint16" or "uint32", or an llm.c shard, which is recognised by its 1024-byte header, or
/// a .npy of integers, recognised by its own (then `dtype` must agree or be empty). `path` may be a glob pattern (`*`,
/// `?`, `[`), as llm.c's own: the matches, in byte order of their names, form one stream. A path that exists as it
/// stands is never taken for a pattern. Errors: kInvalidInput (no file, no tokens, unknown or missing dtype, dtype
/// against a header or against the pattern of the tokens), kCorrupt (size that is no whole number of tokens or
/// contradicts the header), kUnsupported (llm.c evaluation files, a .npy that is no list of integers).
Result<std::unique_ptr<TokenSource>> open_token_file(const std::string& path, const std::string& dtype,
                                                     const OpenOptions& options = {});

/// Tokens [begin, end) of `base` as a source of its own; its fingerprint covers base and range. 0 <= begin <= end <=
/// base->token_count() is RT_CHECKed.
std::unique_ptr<TokenSource> slice_tokens(std::shared_ptr<const TokenSource> base, int64_t begin, int64_t end);

/// What the first `first_tokens` tokens of a source are, however they are stored: XXH3-64 over their count and 64
/// blocks of 2048 tokens as int32, evenly spaced, the first and the last included (up to 131,072 tokens: all of them),
/// and marks() where there are some.
/// Never 0. Two sources of which one begins with the other's n tokens have one content_hash(n). 1 <= first_tokens <=
/// token_count() is RT_CHECKed. Errors: those of TokenSource::read.
Result<uint64_t> content_hash(const TokenSource& source, int64_t first_tokens);

/// The sources one after the other as one stream; a sequence border at each joint. At least one source.
std::unique_ptr<TokenSource> concat_tokens(std::vector<std::shared_ptr<const TokenSource>> parts);

}  // namespace cairn::data
