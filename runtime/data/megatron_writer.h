#pragma once
// Writes a Megatron pair, <prefix>.bin and <prefix>.idx (format: megatron_format.h), one document a sequence.
//
// An interrupted run leaves no half pair that could be taken for a whole one:
//   1. tokens go to <prefix>.bin.tmp, lengths to <prefix>.idx.tmp, both locked against a second writer;
//   2. finish(): offsets, document index and header are added, both files fsynced;
//   3. an old <prefix>.idx is unlinked, the directory fsynced: without an .idx there is no set;
//   4. .bin is renamed into place, then .idx, then the directory fsynced. The .idx is the commit record.
// Before step 3 an old pair stands untouched; the temporary files of a killed run are taken over by the next one.
// Memory: O(1), whatever the number of documents.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::data {

class MegatronWriter {
 public:
  struct Options {
    bool overwrite = false;  // of an existing pair; false: an error before anything is written
  };

  /// `dtype` kU16 or kI32. Errors: kInvalidInput when the pair exists and may not be overwritten, the folder does not
  /// exist, or another process writes the same prefix.
  static Result<MegatronWriter> create(const std::string& prefix, DType dtype, const Options& options);

  /// kU16 for vocabularies below 65500, else kI32: what Megatron's own tools choose.
  static DType dtype_for_vocab(int64_t vocab);

  MegatronWriter(MegatronWriter&&) = default;
  MegatronWriter& operator=(MegatronWriter&&) = delete;
  MegatronWriter(const MegatronWriter&) = delete;
  MegatronWriter& operator=(const MegatronWriter&) = delete;
  /// Removes the temporary files of a pair that was not finished.
  ~MegatronWriter();

  /// Appends tokens to the open document. Errors: kInvalidInput for a token that the dtype cannot hold or a document
  /// beyond 2^31 - 1 tokens (the format's lengths are int32); kNoSpace, kIo.
  Status add(std::span<const int32_t> tokens);

  /// Ends the open document; one without tokens is not written. Returns whether it was.
  Result<bool> end_document();

  /// Commits. `beside` runs where there is no set, between steps 3 and 4, and puts files that go with it in place; what
  /// went with an old one (<prefix>.loss, .channel, .made.json, .origin) is removed before. Errors: kInvalidInput
  /// without any document; those of `beside`; else as a file system fails.
  Status finish(const std::function<Status()>& beside = {});

  int64_t documents() const { return documents_; }
  int64_t tokens() const { return tokens_; }

 private:
  MegatronWriter() = default;
  Status flush_tokens();
  Status flush_lengths();
  Status write_index_tail();

  std::string prefix_;
  DType dtype_ = DType::kU16;
  Fd bin_, idx_;
  std::vector<unsigned char> token_buffer_;
  std::vector<int32_t> length_buffer_;
  int64_t bin_bytes_ = 0;    // written so far, without the buffer
  int64_t idx_lengths_ = 0;  // lengths written so far, without the buffer
  int64_t open_tokens_ = 0;  // of the open document
  int64_t documents_ = 0, tokens_ = 0;
};

}  // namespace cairn::data
