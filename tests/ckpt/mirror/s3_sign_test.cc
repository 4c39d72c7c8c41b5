// Against the examples that Amazon publishes with the description of the signature.
#include "ckpt/mirror/s3_sign.h"

#include <doctest/doctest.h>

using namespace cairn::ckpt;

namespace {

const S3Credentials kExample{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string signature_of(SignRequest request) {
  request.headers.emplace_back("host", "examplebucket.s3.amazonaws.com");
  request.headers.emplace_back("x-amz-date", "20130524T000000Z");
  request.headers.emplace_back("x-amz-content-sha256", request.payload_sha256);
  request.region = "us-east-1";
  request.amz_date = "20130524T000000Z";
  const std::string text = authorization(request, kExample);
  CHECK(text.find("Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request") != std::string::npos);
  return text.substr(text.find("Signature=") + 10);
}

}  // namespace

TEST_SUITE("ckpt/mirror/s3_sign") {
  TEST_CASE("signatures are those of the published examples") {
    CHECK(signature_of({.method = "GET",
                        .path = "/test.txt",
                        .headers = {{"range", "bytes=0-9"}},
                        .payload_sha256 = sha256_hex({})}) ==
          "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
    CHECK(signature_of({.method = "GET",
                        .path = "/",
                        .query = {{"prefix", "J"}, {"max-keys", "2"}},
                        .payload_sha256 = sha256_hex({})}) ==
          "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
    CHECK(
        signature_of({.method = "GET", .path = "/", .query = {{"lifecycle", ""}}, .payload_sha256 = sha256_hex({})}) ==
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
    CHECK(signature_of(
              {.method = "PUT",
               .path = uri_encode("/test$file.text", true),
               .headers = {{"date", "Fri, 24 May 2013 00:00:00 GMT"}, {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
               .payload_sha256 = sha256_hex(bytes_of("Welcome to Amazon S3."))}) ==
          "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
  }

  TEST_CASE("digests and encodings are the standard ones") {
    CHECK(sha256_hex({}) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex(md5(bytes_of("abc"))) == "900150983cd24fb0d6963f7d28e17f72");
    CHECK(base64(md5(bytes_of("abc"))) == "kAFQmDzST7DWlj99KOF/cg==");
    CHECK(base64({}).empty());
    CHECK(uri_encode("a/b c~-_.+&=\xc3\xa9", true) == "a/b%20c~-_.%2B%26%3D%C3%A9");
    CHECK(uri_encode("a/b", false) == "a%2Fb");
    CHECK(canonical_query({{"uploads", ""}, {"prefix", "a/b"}}) == "prefix=a%2Fb&uploads=");
  }
}
