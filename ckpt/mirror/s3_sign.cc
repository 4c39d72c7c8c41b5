#include "ckpt/mirror/s3_sign.h"

#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <array>

#include "runtime/core/check.h"

namespace cairn::ckpt {
namespace {

std::vector<std::byte> digest(const EVP_MD* kind, std::span<const std::byte> bytes) {
  std::vector<std::byte> out(EVP_MAX_MD_SIZE);
  unsigned size = 0;
  RT_CHECK(
      EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(out.data()), &size, kind, nullptr) == 1,
      "libcrypto has no {}", EVP_MD_get0_name(kind));
  out.resize(size);
  return out;
}

std::vector<std::byte> hmac(std::span<const std::byte> key, std::string_view text) {
  std::vector<std::byte> out(EVP_MAX_MD_SIZE);
  unsigned size = 0;
  RT_CHECK(
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(text.data()),
           text.size(), reinterpret_cast<unsigned char*>(out.data()), &size) != nullptr,
      "libcrypto has no HMAC-SHA256");
  out.resize(size);
  return out;
}

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace

std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) out += fmt::format("{:02x}", static_cast<unsigned>(b));
  return out;
}

std::string sha256_hex(std::span<const std::byte> bytes) { return hex(digest(EVP_sha256(), bytes)); }

std::vector<std::byte> md5(std::span<const std::byte> bytes) { return digest(EVP_md5(), bytes); }

std::string base64(std::span<const std::byte> bytes) {
  std::string out((bytes.size() + 2) / 3 * 4 + 1, '\0');
  const int size =
      EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                      reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<int>(bytes.size()));
  out.resize(static_cast<size_t>(size));
  return out;
}

std::string uri_encode(std::string_view text, bool keep_slash) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
                       c == '.' || c == '_' || c == '~' || (c == '/' && keep_slash);
    if (plain) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

std::string canonical_query(const Pairs& query) {
  std::vector<std::pair<std::string, std::string>> encoded;
  for (const auto& [name, value] : query) encoded.emplace_back(uri_encode(name, false), uri_encode(value, false));
  std::sort(encoded.begin(), encoded.end());
  std::string out;
  for (const auto& [name, value] : encoded) out += (out.empty() ? "" : "&") + name + "=" + value;
  return out;
}

std::string authorization(const SignRequest& request, const S3Credentials& credentials) {
  Pairs headers = request.headers;
  std::sort(headers.begin(), headers.end());
  std::string canonical_headers, signed_names;
  for (const auto& [name, value] : headers) {
    canonical_headers += name + ":" + value + "\n";
    signed_names += (signed_names.empty() ? "" : ";") + name;
  }
  const std::string canonical =
      fmt::format("{}\n{}\n{}\n{}\n{}\n{}", request.method, request.path, canonical_query(request.query),
                  canonical_headers, signed_names, request.payload_sha256);
  const std::string day = request.amz_date.substr(0, 8);
  const std::string scope = fmt::format("{}/{}/s3/aws4_request", day, request.region);
  const std::string to_sign =
      fmt::format("AWS4-HMAC-SHA256\n{}\n{}\n{}", request.amz_date, scope, sha256_hex(bytes_of(canonical)));
  std::vector<std::byte> key = hmac(bytes_of("AWS4" + credentials.secret_key), day);
  for (const std::string_view part :
       {std::string_view(request.region), std::string_view("s3"), std::string_view("aws4_request")}) {
    key = hmac(key, part);
  }
  return fmt::format("AWS4-HMAC-SHA256 Credential={}/{}, SignedHeaders={}, Signature={}", credentials.access_key, scope,
                     signed_names, hex(hmac(key, to_sign)));
}

}  // namespace cairn::ckpt
