#include "runtime/cluster/token.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include "runtime/core/new_file.h"
#include "runtime/core/unique_handle.h"

namespace cairn::cluster {
namespace {

constexpr size_t kBytes = 32;

std::string hex(const unsigned char* bytes, size_t count) {
  std::string out;
  for (size_t k = 0; k < count; ++k) out += fmt::format("{:02x}", bytes[k]);
  return out;
}

std::string hmac(std::string_view key, std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> out;
  unsigned size = 0;
  RT_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                reinterpret_cast<const unsigned char*>(text.data()), text.size(), out.data(), &size) != nullptr,
           "libcrypto has no HMAC-SHA256");
  return hex(out.data(), size);
}

}  // namespace

std::string random_hex() {
  std::array<unsigned char, kBytes> bytes;
  size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t n = ::getrandom(bytes.data() + at, bytes.size() - at, 0);
    RT_CHECK(n > 0 || errno == EINTR, "getrandom: errno {}", errno);
    if (n > 0) at += static_cast<size_t>(n);
  }
  return hex(bytes.data(), bytes.size());
}

Result<std::optional<std::string>> read_token(const std::filesystem::path& directory) {
  const std::string path = (directory / "token").string();
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd && errno == ENOENT) return std::optional<std::string>();
  if (!fd) return os_error(errno, path);
  struct stat found;
  if (::fstat(fd.get(), &found) != 0) return os_error(errno, path);
  if (!S_ISREG(found.st_mode) || found.st_uid != ::geteuid()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: not a file of user {}; it is the secret of this run's agents", path, ::geteuid())};
  }
  if ((found.st_mode & 077) != 0) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: mode {:o}, others than its owner can use it: chmod 600, or remove it and start again",
                             path, found.st_mode & 0777)};
  }
  std::array<char, 2 * kBytes + 1> bytes;
  const ssize_t size = ::read(fd.get(), bytes.data(), bytes.size());
  if (size < 0) return os_error(errno, path);
  const std::string_view text(bytes.data(), static_cast<size_t>(size));
  if (text.size() != 2 * kBytes || text.find_first_not_of("0123456789abcdef") != text.npos) {
    return Error{
        ErrorCode::kCorrupt,
        fmt::format("{}: {} bytes, expected {} hexadecimal digits: remove it and start again", path, size, 2 * kBytes)};
  }
  return std::optional(std::string(text));
}

Result<std::string> make_token(const std::filesystem::path& directory) {
  RT_TRY_SET(std::optional<std::string> found, read_token(directory));
  if (found) return *std::move(found);
  RT_TRY_SET(NewFile file, NewFile::beside(directory / "token", 0600));
  RT_TRY(file.write(random_hex()));
  RT_TRY(file.publish_if_free(Durable::kYes));
  RT_TRY_SET(found, read_token(directory));  // another agent's, where two came at once
  if (!found)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("{}: was removed while this run starts", (directory / "token").string())};
  return *std::move(found);
}

std::string token_name(std::string_view token) { return hmac(token, "name").substr(0, 16); }

std::string prove(std::string_view token, std::string_view purpose, std::string_view nonce, std::string_view text) {
  return hmac(token, fmt::format("{}\n{}\n{}", purpose, nonce, text));
}

bool is_proof(std::string_view given, std::string_view token, std::string_view purpose, std::string_view nonce,
              std::string_view text) {
  const std::string wanted = prove(token, purpose, nonce, text);
  return given.size() == wanted.size() && CRYPTO_memcmp(given.data(), wanted.data(), wanted.size()) == 0;
}

}  // namespace cairn::cluster
