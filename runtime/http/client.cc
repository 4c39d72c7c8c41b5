#include "runtime/http/client.h"

#include <curl/curl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>

#include "runtime/core/unique_handle.h"

namespace cairn::http {
namespace {

constexpr size_t kMaxAnswerBytes = 16 << 20;  // of an answer that is kept

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

std::string trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.remove_suffix(1);
  return std::string(text);
}

struct Exchange {  // what the callbacks of one try share
  CURL* handle = nullptr;
  std::span<const std::byte> body;
  size_t sent = 0;
  Response response;
  const Sink* sink = nullptr;
  const Head* head = nullptr;
  const Limits* limits = nullptr;
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
      if (!exchange.sink_used && exchange.head != nullptr) {
        exchange.response.status = static_cast<int>(status);
        exchange.sink_status = (*exchange.head)(exchange.response);
        if (!exchange.sink_status.ok()) return 0;
      }
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
    const auto [at, first] = exchange.response.headers.try_emplace(name, trimmed(line.substr(colon + 1)));
    if (!first) at->second += ", " + trimmed(line.substr(colon + 1));  // RFC 9110, 5.3
    return bytes;
  } catch (const std::exception&) {
    return 0;
  }
}

int on_progress(void* context, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  const std::function<bool()>& cancelled = static_cast<Exchange*>(context)->limits->cancelled;
  return cancelled && cancelled() ? 1 : 0;
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
std::string certificate_advice(CURLcode code, CURL* curl, const Tls& tls) {
  const std::string believed = tls.ca_file.empty() ? "the system's authorities" : tls.ca_file;
  if (code == CURLE_SSL_CACERT_BADFILE || code == CURLE_SSL_ISSUER_ERROR)
    return fmt::format("{} is no PEM file of certificates: name one as {}", believed, tls.ca_names);
  if (code == CURLE_SSL_CERTPROBLEM) {
    return tls.cert_file.empty()
               ? "the server asks for a certificate, and none is given"
               : fmt::format("{} and {} are no certificate in PEM and its key", tls.cert_file, tls.key_file);
  }
  if (code == CURLE_SSL_CIPHER) return "the server asks for what this program has not";
  if (code != CURLE_PEER_FAILED_VERIFICATION) return "";
  long verdict = 0;  // of OpenSSL: X509_V_ERR_*
  curl_easy_getinfo(curl, CURLINFO_SSL_VERIFYRESULT, &verdict);
  constexpr long kUnspecified = 1, kNotYetValid = 9, kExpired = 10;
  if (verdict == kExpired) return "the store needs a new certificate; or this machine's clock is wrong";
  if (verdict == kNotYetValid) return "the clock of this machine or of the store's is wrong";
  if (verdict <= kUnspecified) return "the certificate is another host's: is the endpoint's name right?";
  return fmt::format(
      "the certificate is not signed by any of {}: name the PEM file of the authority that signed it, as {}", believed,
      tls.ca_names);
}

}  // namespace

/// A terminal may take bytes above ASCII for commands, such as 0x9b.
std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 300)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte >= 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, byte < 0x20 ? ' ' : c);
  }
  return text.size() > 300 ? out + "..." : out;
}

struct Client::Impl {
  Tls tls;
  UniqueHandle<CurlTraits> handle;
};

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

Result<std::unique_ptr<Client>> Client::make(Tls tls) {
  static std::once_flag initialised;
  std::call_once(initialised, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  for (const auto& [what, file] : {std::pair("certificates", &tls.ca_file), std::pair("certificate", &tls.cert_file),
                                   std::pair("key", &tls.key_file)}) {
    if (file->empty() || std::ifstream(*file)) continue;
    return Error{ErrorCode::kInvalidInput, fmt::format("{} {}: {}", what, *file, std::strerror(errno))};
  }
  if (tls.cert_file.empty() != tls.key_file.empty()) {
    return Error{ErrorCode::kInvalidInput, "a certificate and its key are given together, or neither"};
  }
  auto impl = std::make_unique<Impl>();
  impl->tls = std::move(tls);
  impl->handle.reset(curl_easy_init());
  if (!impl->handle) return Error{ErrorCode::kInternal, "libcurl does not start"};
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

Outcome Client::send(const std::string& what, const Request& request, const Limits& limits, const Sink* sink,
                     const Head* head) {
  UniqueHandle<SlistTraits> headers;
  const auto add = [&](const std::string& line) {
    if (curl_slist* longer = curl_slist_append(headers.get(), line.c_str()); longer != nullptr) {
      headers.release();
      headers.reset(longer);
    }
  };
  for (const std::string& line : request.headers) add(line);
  add("Expect:");

  CURL* curl = impl_->handle.get();
  const Tls& tls = impl_->tls;
  curl_easy_reset(curl);  // options only: the connection stays
  Exchange exchange{.handle = curl, .body = request.body, .sink = sink, .head = head, .limits = &limits};
  char reason[CURL_ERROR_SIZE] = "";
  curl_easy_setopt(curl, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(curl, CURLOPT_PATH_AS_IS, 1L);
  curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
  if (!tls.ca_file.empty()) curl_easy_setopt(curl, CURLOPT_CAINFO, tls.ca_file.c_str());
  if (!tls.cert_file.empty()) {
    curl_easy_setopt(curl, CURLOPT_SSLCERT, tls.cert_file.c_str());
    curl_easy_setopt(curl, CURLOPT_SSLKEY, tls.key_file.c_str());
  }
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
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, std::max(1L, static_cast<long>(1000 * limits.connect_s)));
  if (limits.total_s > 0)
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, std::max(1L, static_cast<long>(1000 * limits.total_s)));
  // Nothing for silent_s, or a drop now and then without end.
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, std::max(1L, static_cast<long>(limits.slowest_bytes_per_s)));
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, std::max(1L, static_cast<long>(limits.silent_s)));
  if (limits.most_bytes_per_s > 0) {
    curl_easy_setopt(curl, CURLOPT_MAX_SEND_SPEED_LARGE, static_cast<curl_off_t>(limits.most_bytes_per_s));
    curl_easy_setopt(curl, CURLOPT_MAX_RECV_SPEED_LARGE, static_cast<curl_off_t>(limits.most_bytes_per_s));
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
    // On a connection that was used before, curl sends again what got no answer, and the server may have taken it.
    if (request.method == "POST") curl_easy_setopt(curl, CURLOPT_FRESH_CONNECT, 1L);
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  } else if (request.method != "GET") {
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
  const CURLcode code = curl_easy_perform(curl);
  if (limits.cancelled && limits.cancelled()) return {Error{ErrorCode::kStopped, what + ": told to stop"}};
  if (!exchange.sink_status.ok()) return {std::move(exchange.sink_status).error()};
  if (exchange.too_long) {
    return {
        Error{ErrorCode::kUnavailable, fmt::format("{}: the answer is longer than {} bytes", what, kMaxAnswerBytes)}};
  }
  long status = 0;
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
  exchange.response.status = static_cast<int>(status);
  // A server may answer with an error and close before it has read the whole body: its words say more.
  if (code == CURLE_OK || (status >= 400 && !exchange.response.body.empty())) return {std::move(exchange.response)};
  const std::string text = printable(reason[0] != 0 ? reason : curl_easy_strerror(code));
  if (const std::string advice = certificate_advice(code, curl, tls); !advice.empty())
    return {Error{ErrorCode::kInvalidInput, fmt::format("{}: {} ({})", what, text, advice)}};
  // TLS 1.3: the server's no to a client comes with the first bytes that are read, as an alert.
  if (text.find("alert") != std::string::npos && text.find("certificate") != std::string::npos) {
    return {Error{ErrorCode::kInvalidInput,
                  fmt::format("{}: {} ({})", what, text,
                              tls.cert_file.empty() ? "the server asks for a certificate, and none is given"
                                                    : fmt::format("the server does not believe {}", tls.cert_file))}};
  }
  const ErrorCode kind = code == CURLE_OPERATION_TIMEDOUT ? ErrorCode::kTimeout
                         : code == CURLE_URL_MALFORMAT    ? ErrorCode::kInvalidInput  // a port that is no number
                                                          : ErrorCode::kUnavailable;
  return {Error{kind, fmt::format("{}: {}", what, text)}, worth_another_try(code) && !exchange.sink_used};
}

}  // namespace cairn::http
