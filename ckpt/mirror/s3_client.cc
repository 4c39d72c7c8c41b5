#include "ckpt/mirror/s3_client.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "ckpt/mirror/s3_xml.h"
#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {
namespace {

using http::printable;

constexpr double kSlowestBytesPerS = 1 << 10;
constexpr int kTries = 4;            // of one request
constexpr double kFirstWaitS = 0.1;  // between them; each next one is four times as long

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.remove_suffix(1);
  return std::string(text);
}

Result<S3Credentials> find_credentials() {
  S3Credentials out{environment("AWS_ACCESS_KEY_ID"), environment("AWS_SECRET_ACCESS_KEY"),
                    environment("AWS_SESSION_TOKEN")};
  if (!out.access_key.empty() && !out.secret_key.empty()) return out;
  std::string file = environment("AWS_SHARED_CREDENTIALS_FILE");
  if (file.empty()) file = environment("HOME") + "/.aws/credentials";
  std::string profile = environment("AWS_PROFILE");
  if (profile.empty()) profile = "default";
  std::ifstream in(file);
  out = {};
  bool ours = false;
  for (std::string line; in && std::getline(in, line);) {
    line = trimmed(line);
    if (line.empty() || line[0] == '#' || line[0] == ';') continue;
    if (line.front() == '[' && line.back() == ']') {
      ours = trimmed(std::string_view(line).substr(1, line.size() - 2)) == profile;
      continue;
    }
    const size_t equals = line.find('=');
    if (!ours || equals == std::string::npos) continue;
    const std::string name = trimmed(std::string_view(line).substr(0, equals));
    const std::string value = trimmed(std::string_view(line).substr(equals + 1));
    if (name == "aws_access_key_id") out.access_key = value;
    if (name == "aws_secret_access_key") out.secret_key = value;
    if (name == "aws_session_token") out.session_token = value;
  }
  if (!out.access_key.empty() && !out.secret_key.empty()) return out;
  return Error{ErrorCode::kInvalidInput,
               fmt::format("no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or put "
                           "aws_access_key_id and aws_secret_access_key under [{}] in {}",
                           profile, file)};
}

std::string now_amz() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y%m%dT%H%M%SZ", &utc);
  return text;
}

}  // namespace

struct S3Client::Impl {
  PlaceOptions options;
  std::string bucket, endpoint, host, region, ca_file;
  S3Credentials credentials;
  std::unique_ptr<http::Client> client;

  struct Outcome {
    Result<S3Response> result;
    bool again = false;
  };
  Outcome once(const S3Request& request, const Traffic& traffic, bool missing_ok, const ByteSink* sink);
  Outcome judge(const std::string& what, S3Response response, bool missing_ok, bool end_ok);
};

Result<std::unique_ptr<S3Client>> S3Client::make(const PlaceOptions& options, const std::string& bucket) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->bucket = bucket;
  impl->region = options.region;
  for (const char* name : {"AWS_REGION", "AWS_DEFAULT_REGION"}) {
    if (impl->region.empty()) impl->region = environment(name);
  }
  if (impl->region.empty()) impl->region = "us-east-1";
  impl->endpoint = options.endpoint;
  for (const char* name : {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}) {
    if (impl->endpoint.empty()) impl->endpoint = environment(name);
  }
  if (impl->endpoint.empty()) impl->endpoint = fmt::format("https://s3.{}.amazonaws.com", impl->region);
  while (impl->endpoint.ends_with('/')) impl->endpoint.pop_back();
  const size_t scheme = impl->endpoint.find("://");
  const std::string_view kind = std::string_view(impl->endpoint).substr(0, std::min(scheme, impl->endpoint.size()));
  impl->host = scheme == std::string::npos ? "" : impl->endpoint.substr(scheme + 3);
  if ((kind != "http" && kind != "https") || impl->host.empty() ||
      impl->host.find_first_of("/?#@ \t\r\n") != std::string::npos) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("S3 endpoint \"{}\": expected http://HOST:PORT or https://HOST", impl->endpoint)};
  }
  impl->ca_file = options.ca_file.empty() ? environment("AWS_CA_BUNDLE") : options.ca_file;
  if (kind == "https" && !impl->ca_file.empty() && !std::ifstream(impl->ca_file)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("certificates {} ({}): {}", impl->ca_file,
                             options.ca_file.empty() ? "AWS_CA_BUNDLE" : "ca_file", std::strerror(errno))};
  }
  RT_TRY_SET(impl->credentials, find_credentials());
  // They go into headers, and a line break at the end of a variable is easily come by.
  for (const auto& [what, text] :
       {std::pair("the region", &impl->region), std::pair("AWS_ACCESS_KEY_ID", &impl->credentials.access_key),
        std::pair("AWS_SECRET_ACCESS_KEY", &impl->credentials.secret_key),
        std::pair("AWS_SESSION_TOKEN", &impl->credentials.session_token)}) {
    if (std::ranges::all_of(*text, [](unsigned char c) { return c > 0x20 && c < 0x7F; })) continue;
    return Error{ErrorCode::kInvalidInput, fmt::format("S3: {} holds a space, a line break or what is no ASCII", what)};
  }
  RT_TRY_SET(impl->client, http::Client::make({.ca_file = kind == "https" ? impl->ca_file : std::string(),
                                               .cert_file = {},
                                               .key_file = {},
                                               .ca_names = "ca_file, --ca-file or AWS_CA_BUNDLE"}));
  return std::unique_ptr<S3Client>(new S3Client(std::move(impl)));
}

S3Client::S3Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
S3Client::~S3Client() = default;

S3Client::Impl::Outcome S3Client::Impl::once(const S3Request& request, const Traffic& traffic, bool missing_ok,
                                             const ByteSink* sink) {
  const std::string path =
      "/" + uri_encode(bucket, false) + (request.key.empty() ? "" : "/" + uri_encode(request.key, true));
  const std::string query = canonical_query(request.query);
  const std::string url = endpoint + path + (query.empty() ? "" : "?" + query);
  const std::string what = fmt::format("{} s3://{}/{}{} at {}", request.method, bucket, request.key,
                                       query.empty() ? "" : "?" + query, endpoint);

  SignRequest sign{.method = request.method,
                   .path = path,
                   .query = request.query,
                   .headers = request.headers,
                   .payload_sha256 = sha256_hex(request.body),
                   .region = region,
                   .amz_date = now_amz()};
  sign.headers.emplace_back("host", host);
  sign.headers.emplace_back("x-amz-date", sign.amz_date);
  sign.headers.emplace_back("x-amz-content-sha256", sign.payload_sha256);
  if (!credentials.session_token.empty()) sign.headers.emplace_back("x-amz-security-token", credentials.session_token);
  http::Request out{.method = request.method, .url = url, .headers = {}, .body = request.body};
  for (const auto& [name, value] : sign.headers) out.headers.push_back(name + ": " + value);
  out.headers.push_back("Authorization: " + authorization(sign, credentials));
  out.headers.emplace_back("Content-Type: application/octet-stream");
  const double slowest = traffic.max_bytes_per_s > 0
                             ? std::min(kSlowestBytesPerS, static_cast<double>(traffic.max_bytes_per_s) / 2)
                             : kSlowestBytesPerS;
  http::Outcome outcome = client->send(what, out,
                                       {.connect_s = std::min(30.0, options.timeout_s),
                                        .silent_s = options.timeout_s,
                                        .slowest_bytes_per_s = static_cast<int64_t>(slowest),
                                        .most_bytes_per_s = traffic.max_bytes_per_s,
                                        .cancelled = [&traffic] { return traffic.cancelled(); }},
                                       sink);
  if (traffic.cancelled()) return {Error{ErrorCode::kStopped, what + ": the copy was told to stop"}};
  if (!outcome.answer.ok()) return {std::move(outcome.answer).error(), outcome.again};
  return judge(what, std::move(outcome.answer).value(), missing_ok, request.end_ok);
}

S3Client::Impl::Outcome S3Client::Impl::judge(const std::string& what, S3Response response, bool missing_ok,
                                              bool end_ok) {
  const int status = response.status;
  std::string code, message;
  if (!response.body.empty()) {
    const Result<XmlNode> xml = parse_xml(response.body);
    if (xml.ok() && xml.value().name == "Error") {  // also inside an answer of 200, to the end of an upload in parts
      code = printable(xml.value().get("Code"));
      message = printable(xml.value().get("Message"));
    }
  }
  if (status >= 200 && status < 300 && code.empty()) return {std::move(response)};
  if (status == 404 && missing_ok && code != "NoSuchBucket") return {std::move(response)};
  if (status == 416 && end_ok) return {std::move(response)};
  std::string text = fmt::format("{}: HTTP {}", what, status);
  if (!code.empty()) text += fmt::format(" {}: {}", code, message);
  const bool damaged_on_the_way =
      code == "BadDigest" || code == "XAmzContentSHA256Mismatch" || code == "IncompleteBody";
  if (status == 429 || status >= 500 || code == "RequestTimeout" || code == "InternalError" || code == "SlowDown" ||
      damaged_on_the_way) {
    return {Error{status == 507 ? ErrorCode::kNoSpace : ErrorCode::kUnavailable, text}, status != 507 && status != 501};
  }
  if (code == "QuotaExceeded" || status == 413) return {Error{ErrorCode::kNoSpace, text}};
  if (code == "RequestTimeTooSkewed") text += " (the clock of this machine is wrong)";
  if (status == 401 || code == "InvalidAccessKeyId" || code == "SignatureDoesNotMatch") {
    text += " (look at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or ~/.aws/credentials, and at the region)";
  }
  if (status >= 300 && status < 400) text += " (the endpoint or the region is not this bucket's)";
  if (code == "NoSuchBucket") text += " (make it first)";
  if (status < 100) return {Error{ErrorCode::kUnavailable, text + ": no HTTP answer"}, true};
  const bool missing = status == 404 && code != "NoSuchBucket";
  return {Error{missing ? ErrorCode::kIo : ErrorCode::kInvalidInput, text, missing ? ENOENT : 0}};
}

Result<S3Response> S3Client::call(const S3Request& request, const Traffic& traffic, bool missing_ok,
                                  const ByteSink* sink) {
  double wait_s = kFirstWaitS;
  for (int left = kTries;;) {
    Impl::Outcome outcome = impl_->once(request, traffic, missing_ok, sink);
    if (outcome.result.ok() || !outcome.again || --left == 0) return std::move(outcome.result);
    // In pieces, so that a cancel is heard.
    for (double waited = 0; waited < wait_s; waited += 0.05) {
      if (traffic.cancelled()) return Error{ErrorCode::kStopped, "the copy was told to stop"};
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    wait_s *= 4;
  }
}

}  // namespace cairn::ckpt
