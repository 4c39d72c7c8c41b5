#pragma once
// The hash of a file that comes in pieces, as a Hub lists it.

#include <openssl/evp.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "runtime/core/unique_handle.h"

namespace cairn::hub {

class Digest {
 public:
  /// The SHA-256 of the content.
  static Digest sha256();
  /// The SHA-1 that git gives a blob of `size_bytes`.
  static Digest git_blob(int64_t size_bytes);

  void add(std::span<const std::byte> bytes);
  std::string hex();  // lower case; nothing is added after it

 private:
  struct Traits {
    using Handle = EVP_MD_CTX*;
    static constexpr EVP_MD_CTX* kInvalid = nullptr;
    static void close(EVP_MD_CTX* context) { EVP_MD_CTX_free(context); }
  };
  explicit Digest(const EVP_MD* kind);
  UniqueHandle<Traits> context_;
};

}  // namespace cairn::hub
