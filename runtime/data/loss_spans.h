#pragma once
// PREFIX.loss, beside the Megatron pair of instruction data: which tokens of each document count (docs/format.md).
// Little-endian:
//   8 bytes  "CAIRNLS1"
//   u32 x 2  for each span, [from, to) within its document; those of a document ascend and are disjoint
//   u64      for each document its first span, and one number more
//   u64 x 3  spans; documents and tokens of the pair
//   u64      XXH3-64 of all bytes before
// Others may read it beside the pair: a target that is no token of a span has no loss.

#include <xxhash.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/new_file.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "runtime/data/chat_rows.h"

namespace cairn::data {

std::string loss_path(const std::string& prefix);

/// Writes it under a temporary name, until publish(). Memory: 8 bytes a document.
class LossWriter {
 public:
  /// Errors: as a file system fails.
  static Result<LossWriter> create(const std::string& prefix);
  Status add_document(std::span<const LossSpan> spans);
  int64_t counted() const { return counted_; }  // tokens
  /// `tokens`: of the pair.
  Status publish(int64_t tokens);

 private:
  explicit LossWriter(NewFile file) : file_(std::move(file)), hash_(XXH3_createState()) {}
  struct FreeHash {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  Status write(std::string_view bytes);
  Status flush();
  NewFile file_;
  std::unique_ptr<XXH3_state_t, FreeHash> hash_;
  std::vector<LossSpan> buffer_;
  std::vector<uint64_t> firsts_;
  uint64_t spans_ = 0;
  int64_t counted_ = 0;
};

/// Reads it. Threads: any number.
class LossSpans {
 public:
  /// Reads the file once, to check it. Errors: kInvalidInput where there is none, naming the command that makes it, or
  /// it is of another pair; kCorrupt with the byte; kIo.
  static Result<LossSpans> open(const std::string& prefix, int64_t documents, int64_t tokens);

  /// The spans of documents [first, first + count), one after the other, and where each begins (count + 1 numbers).
  Status read(int64_t first, int64_t count, std::vector<LossSpan>* spans, std::vector<uint64_t>* begins) const;
  /// Identity of the content.
  uint64_t hash() const { return hash_; }

 private:
  std::string path_;
  std::shared_ptr<const Fd> fd_;
  int64_t documents_ = 0;
  uint64_t spans_ = 0, hash_ = 0;
};

}  // namespace cairn::data
