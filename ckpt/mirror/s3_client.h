#pragma once
// Requests to an S3-compatible store: signed, over one kept connection (runtime/http), tried again when that can help,
// and with errors a person can act on. Path-style addresses (ENDPOINT/BUCKET/KEY), which every store understands.
//
// Credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN; else the section AWS_PROFILE (default:
// "default") of AWS_SHARED_CREDENTIALS_FILE (default: ~/.aws/credentials). They never appear in a message or a log.
//
// https: TLS 1.2 or newer, and the certificate is always verified, against PlaceOptions::ca_file, else AWS_CA_BUNDLE,
// else what the system trusts. One that fails is an error for a person, not tried again.

#include <memory>
#include <span>
#include <string>

#include "ckpt/mirror/place.h"
#include "ckpt/mirror/s3_sign.h"
#include "runtime/core/result.h"
#include "runtime/http/client.h"

namespace cairn::ckpt {

struct S3Request {
  std::string method;
  std::string key;  // "": the bucket
  Pairs query;
  Pairs headers;  // sent and signed; lower-case names
  std::span<const std::byte> body;
  bool end_ok = false;  // 416 is a result: the range asked for begins at the object's end
};

using S3Response = http::Response;

class S3Client {
 public:
  static Result<std::unique_ptr<S3Client>> make(const PlaceOptions& options, const std::string& bucket);
  ~S3Client();

  /// Sends, and tries again after connection failures, timeouts and answers that ask for it (429, 5xx, a body that was
  /// damaged on the way). Answers of 200 to 299 are results, and 404 when `missing_ok`. With `sink`, the body of a
  /// good answer goes there as it comes; once it has been given bytes, nothing is tried again.
  /// Errors: kInvalidInput (refused: credentials, bucket, region; a certificate that fails), kUnavailable, kTimeout (no
  /// answer after all tries), kNoSpace (quota), kStopped (cancelled), or the sink's. All name method, address, status
  /// and the store's own words.
  Result<S3Response> call(const S3Request& request, const Traffic& traffic, bool missing_ok = false,
                          const ByteSink* sink = nullptr);

 private:
  struct Impl;
  explicit S3Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::ckpt
