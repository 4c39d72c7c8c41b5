#include "runtime/hub/digest.h"

#include <fmt/format.h>

#include <array>

#include "runtime/core/check.h"

namespace cairn::hub {

Digest::Digest(const EVP_MD* kind) : context_(EVP_MD_CTX_new()) {
  RT_CHECK(context_ && EVP_DigestInit_ex(context_.get(), kind, nullptr) == 1, "libcrypto has no {}",
           EVP_MD_get0_name(kind));
}

Digest Digest::sha256() { return Digest(EVP_sha256()); }

Digest Digest::git_blob(int64_t size_bytes) {
  Digest out(EVP_sha1());
  const std::string head = fmt::format("blob {}", size_bytes);
  out.add(std::as_bytes(std::span(head.c_str(), head.size() + 1)));  // with the zero behind it
  return out;
}

void Digest::add(std::span<const std::byte> bytes) {
  RT_CHECK(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1, "libcrypto cannot hash");
}

std::string Digest::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  RT_CHECK(EVP_DigestFinal_ex(context_.get(), digest.data(), &size) == 1, "libcrypto cannot hash");
  std::string out;
  for (unsigned k = 0; k < size; ++k) out += fmt::format("{:02x}", digest[k]);
  return out;
}

}  // namespace cairn::hub
