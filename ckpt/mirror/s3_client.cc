#include "ckpt/mirror/s3_client.h"

#include <curl/curl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>
#include <utility>

#include "ckpt/mirror/s3_xml.h"
#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {
namespace {

constexpr size_t kMaxAnswerBytes = 16 << 20;  // of an answer that is kept; a page of a listing has about 1 MiB
constexpr double kSlowestBytesPerS = 1 << 10;
constexpr int kTries = 4;            // of one request
constexpr double kFirstWaitS = 0.1;  // between them; each next one is four times as long

struct CurlTraits {
  using Handle = CURL*;
  static constexpr CURL* kInvalid = nullptr;
  static void close(CURL* handle) { curl_easy_cleanup(handle); }
};
struct SlistTraits {
  using Handle = curl_slist*;
  static constexpr curl_slist* kInvalid = nullptr;
  static void close(curl_slist* list) { curl_slist_free_all(list); }
};

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

/// What a server said, fit for a terminal.
std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 300)) out += static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? ' ' : c;
  return text.size() > 300 ? out + "..." : out;
}

struct Exchange {  // what the callbacks of one try share
  CURL* handle = nullptr;
  std::span<const std::byte> body;
  size_t sent = 0;
  S3Response response;
  const ByteSink* sink = nullptr;
  const Traffic* traffic = nullptr;
  bool sink_used = false;
  bool too_long = false;
  Status sink_status;
};

// Callbacks are called from C: nothing may be thrown through them.
size_t on_upload(char* target, size_t size, size_t count, void* context) {
  auto& exchange = *static_cast<Exchange*>(context);
  const size_t bytes = std::min(size * count, exchange.body.size() - exchange.sent);
  std::memcpy(target, exchange.body.data() + exchange.sent, bytes);
  exchange.sent += bytes;
  return bytes;
}

int on_seek(void* context, curl_off_t offset, int origin) {
  auto& exchange = *static_cast<Exchange*>(context);
  if (origin != SEEK_SET || offset < 0 || static_cast<size_t>(offset) > exchange.body.size()) {
    return CURL_SEEKFUNC_FAIL;
  }
  exchange.sent = static_cast<size_t>(offset);
  return CURL_SEEKFUNC_OK;
}

size_t on_body(char* data, size_t size, size_t count, void* context) {
  auto& exchange = *static_cast<Exchange*>(context);
  const size_t bytes = size * count;
  try {
    long status = 0;
    curl_easy_getinfo(exchange.handle, CURLINFO_RESPONSE_CODE, &status);
    if (exchange.sink != nullptr && status >= 200 && status < 300) {
      exchange.sink_used = true;
      exchange.sink_status = (*exchange.sink)(std::as_bytes(std::span(data, bytes)));
      return exchange.sink_status.ok() ? bytes : 0;
    }
    if (exchange.response.body.size() + bytes > kMaxAnswerBytes) {
      exchange.too_long = true;
      return 0;
    }
    exchange.response.body.append(data, bytes);
    return bytes;
  } catch (const std::exception& error) {
    exchange.sink_status = Error{ErrorCode::kInternal, error.what()};
    return 0;
  }
}

size_t on_header(char* data, size_t size, size_t count, void* context) {
  auto& exchange = *static_cast<Exchange*>(context);
  const size_t bytes = size * count;
  try {
    const std::string_view line(data, bytes);
    if (line.substr(0, 5) == "HTTP/") exchange.response.headers.clear();
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || exchange.response.headers.size() > 200) return bytes;
    std::string name(line.substr(0, colon));
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    exchange.response.headers[name] = trimmed(line.substr(colon + 1));
    return bytes;
  } catch (const std::exception&) {
    return 0;
  }
}

int on_progress(void* context, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return static_cast<Exchange*>(context)->traffic->cancelled() ? 1 : 0;
}

bool worth_another_try(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
    case CURLE_WEIRD_SERVER_REPLY:
    case CURLE_HTTP2:
    case CURLE_PARTIAL_FILE:
    case CURLE_UPLOAD_FAILED:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_HTTP2_STREAM:
    case CURLE_SEND_FAIL_REWIND:
      return true;
    default:
      return false;
  }
}

/// What to do about a certificate that is not believed; empty when the failure is another one.
std::string certificate_advice(CURLcode code, CURL* curl, const std::string& ca_file) {
  const std::string believed = ca_file.empty() ? "the system's authorities" : ca_file;
  if (code == CURLE_SSL_CACERT_BADFILE || code == CURLE_SSL_ISSUER_ERROR)
    return fmt::format("{} is no PEM file of certificates: name one as ca_file, --ca-file or AWS_CA_BUNDLE", believed);
  if (code == CURLE_SSL_CERTPROBLEM || code == CURLE_SSL_CIPHER) return "the store asks for what this program has not";
  if (code != CURLE_PEER_FAILED_VERIFICATION) return "";
  long verdict = 0;  // of OpenSSL: X509_V_ERR_*
  curl_easy_getinfo(curl, CURLINFO_SSL_VERIFYRESULT, &verdict);
  constexpr long kUnspecified = 1, kNotYetValid = 9, kExpired = 10;
  if (verdict == kExpired) return "the store needs a new certificate; or this machine's clock is wrong";
  if (verdict == kNotYetValid) return "the clock of this machine or of the store's is wrong";
  if (verdict <= kUnspecified) return "the certificate is another host's: is the endpoint's name right?";
  return fmt::format(
      "the certificate is not signed by any of {}: name the PEM file of the authority that signed it, as "
      "ca_file, --ca-file or AWS_CA_BUNDLE",
      believed);
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
  UniqueHandle<CurlTraits> handle;

  struct Outcome {
    Result<S3Response> result;
    bool again = false;
  };
  Outcome once(const S3Request& request, const Traffic& traffic, bool missing_ok, const ByteSink* sink);
  Outcome judge(const std::string& what, Exchange& exchange, bool missing_ok, bool end_ok);
};

Result<std::unique_ptr<S3Client>> S3Client::make(const PlaceOptions& options, const std::string& bucket) {
  static std::once_flag initialised;
  std::call_once(initialised, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
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
  impl->handle.reset(curl_easy_init());
  if (!impl->handle) return Error{ErrorCode::kInternal, "libcurl does not start"};
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
  UniqueHandle<SlistTraits> headers;
  const auto add = [&](const std::string& line) {
    if (curl_slist* longer = curl_slist_append(headers.get(), line.c_str()); longer != nullptr) {
      headers.release();
      headers.reset(longer);
    }
  };
  for (const auto& [name, value] : sign.headers) add(name + ": " + value);
  add("Authorization: " + authorization(sign, credentials));
  add("Expect:");
  add("Content-Type: application/octet-stream");

  CURL* curl = handle.get();
  curl_easy_reset(curl);  // options only: the connection stays
  Exchange exchange{.handle = curl, .body = request.body, .sink = sink, .traffic = &traffic};
  char reason[CURL_ERROR_SIZE] = "";
  curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl, CURLOPT_PATH_AS_IS, 1L);
  curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
  if (!ca_file.empty()) curl_easy_setopt(curl, CURLOPT_CAINFO, ca_file.c_str());
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, reason);
  curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers.get());
  curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, on_header);
  curl_easy_setopt(curl, CURLOPT_HEADERDATA, &exchange);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_body);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &exchange);
  curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, on_progress);
  curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &exchange);
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(1000 * std::min(30.0, options.timeout_s)));
  // Nothing for timeout_s, or a drop now and then without end.
  const double slowest = traffic.max_bytes_per_s > 0
                             ? std::min(kSlowestBytesPerS, static_cast<double>(traffic.max_bytes_per_s) / 2)
                             : kSlowestBytesPerS;
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, std::max(1L, static_cast<long>(slowest)));
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, std::max(1L, static_cast<long>(options.timeout_s)));
  if (traffic.max_bytes_per_s > 0) {
    curl_easy_setopt(curl, CURLOPT_MAX_SEND_SPEED_LARGE, static_cast<curl_off_t>(traffic.max_bytes_per_s));
    curl_easy_setopt(curl, CURLOPT_MAX_RECV_SPEED_LARGE, static_cast<curl_off_t>(traffic.max_bytes_per_s));
  }
  if (request.method == "HEAD") {
    curl_easy_setopt(curl, CURLOPT_NOBODY, 1L);
  } else if (request.method == "PUT" || request.method == "POST") {
    curl_easy_setopt(curl, CURLOPT_UPLOAD, 1L);
    curl_easy_setopt(curl, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    curl_easy_setopt(curl, CURLOPT_READFUNCTION, on_upload);
    curl_easy_setopt(curl, CURLOPT_READDATA, &exchange);
    curl_easy_setopt(curl, CURLOPT_SEEKFUNCTION, on_seek);
    curl_easy_setopt(curl, CURLOPT_SEEKDATA, &exchange);
    curl_easy_setopt(curl, CURLOPT_UPLOAD_BUFFERSIZE, 512L << 10);
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  } else if (request.method != "GET") {
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
  const CURLcode code = curl_easy_perform(curl);
  if (traffic.cancelled()) return {Error{ErrorCode::kStopped, what + ": the copy was told to stop"}};
  if (!exchange.sink_status.ok()) return {std::move(exchange.sink_status).error()};
  if (exchange.too_long) {
    return {
        Error{ErrorCode::kUnavailable, fmt::format("{}: the answer is longer than {} bytes", what, kMaxAnswerBytes)}};
  }
  long status = 0;
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
  exchange.response.status = static_cast<int>(status);
  // A store may answer with an error and close before it has read the whole body: its words say more.
  if (code != CURLE_OK && !(status >= 400 && !exchange.response.body.empty())) {
    const std::string text = printable(reason[0] != 0 ? reason : curl_easy_strerror(code));
    if (const std::string advice = certificate_advice(code, curl, ca_file); !advice.empty())
      return {Error{ErrorCode::kInvalidInput, fmt::format("{}: {} ({})", what, text, advice)}};
    const ErrorCode kind = code == CURLE_OPERATION_TIMEDOUT ? ErrorCode::kTimeout
                           : code == CURLE_URL_MALFORMAT    ? ErrorCode::kInvalidInput  // a port that is no number
                                                            : ErrorCode::kUnavailable;
    return {Error{kind, fmt::format("{}: {}", what, text)}, worth_another_try(code) && !exchange.sink_used};
  }
  return judge(what, exchange, missing_ok, request.end_ok);
}

S3Client::Impl::Outcome S3Client::Impl::judge(const std::string& what, Exchange& exchange, bool missing_ok,
                                              bool end_ok) {
  const int status = exchange.response.status;
  std::string code, message;
  if (!exchange.response.body.empty()) {
    const Result<XmlNode> xml = parse_xml(exchange.response.body);
    if (xml.ok() && xml.value().name == "Error") {  // also inside an answer of 200, to the end of an upload in parts
      code = printable(xml.value().get("Code"));
      message = printable(xml.value().get("Message"));
    }
  }
  if (status >= 200 && status < 300 && code.empty()) return {std::move(exchange.response)};
  if (status == 404 && missing_ok && code != "NoSuchBucket") return {std::move(exchange.response)};
  if (status == 416 && end_ok) return {std::move(exchange.response)};
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
