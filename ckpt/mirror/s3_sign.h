#pragma once
// Digests and AWS Signature Version 4 for S3, as its public description has it ("Authenticating Requests:
// AWS Signature Version 4"). Pure. We sign ourselves because libcurl's own signing differs between its versions in how
// it treats query strings; libcurl moves the bytes.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cairn::ckpt {

std::string sha256_hex(std::span<const std::byte> bytes);
std::string hex(std::span<const std::byte> bytes);
std::vector<std::byte> md5(std::span<const std::byte> bytes);
std::string base64(std::span<const std::byte> bytes);

/// Percent-encodes all but unreserved characters; '/' too unless `keep_slash`.
std::string uri_encode(std::string_view text, bool keep_slash);

struct S3Credentials {
  std::string access_key, secret_key, session_token;
};

using Pairs = std::vector<std::pair<std::string, std::string>>;

struct SignRequest {
  std::string method;
  std::string path;  // encoded, begins with '/'
  Pairs query;       // not encoded
  Pairs headers;     // to be signed, lower-case names; host, x-amz-date and x-amz-content-sha256 among them
  std::string payload_sha256;
  std::string region;
  std::string amz_date;  // 20130524T000000Z
};

/// "a=1&b=": sorted and encoded; what is signed and what goes into the URL.
std::string canonical_query(const Pairs& query);

/// The value of the Authorization header.
std::string authorization(const SignRequest& request, const S3Credentials& credentials);

}  // namespace cairn::ckpt
