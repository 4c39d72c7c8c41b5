#pragma once
// The tokens of one file region as a TokenSource; what open_megatron and open_token_file share. Private to the folder.

#include "runtime/core/unique_handle.h"
#include "runtime/data/token_file.h"

namespace cairn::data {

class FileTokens : public TokenSource {
 public:
  struct Region {
    Fd fd;
    std::string path;
    int64_t offset_bytes = 0;  // of the first token
    int64_t count = 0;         // tokens
    DType dtype = DType::kU16;
    int64_t vocab = 0;
  };
  explicit FileTokens(Region region) : region_(std::move(region)) {}

  const std::string& name() const override { return region_.path; }
  int64_t token_count() const override { return region_.count; }
  Status read(int64_t start, int64_t count, int32_t* out) const override;
  Result<IdRange> id_range(int64_t start, int64_t count, int64_t limit) const override;
  uint64_t fingerprint() const override { return fingerprint_; }

  /// Hashes the sampled blocks (and `salt`, what else belongs to the identity). Once, at open.
  Status compute_fingerprint(uint64_t salt);

 protected:
  Region region_;
  uint64_t fingerprint_ = 0;
};

/// XXH3-64, seeded with `seed`, of up to 64 evenly spaced 4096-byte blocks of [offset, offset + size).
Result<uint64_t> hash_sampled_blocks(int fd, const std::string& path, int64_t offset, int64_t size, uint64_t seed);

/// XXH3-64 of a few integers, for identities.
uint64_t hash_words(std::initializer_list<uint64_t> words);

}  // namespace cairn::data
