#pragma once
// HTTP requests over one kept connection (libcurl): how S3-compatible stores and etcd are asked. It says what an answer
// is and why there is none; what a status means, and whether to ask again, its callers know.
//
// https: TLS 1.2 or newer, and the certificate is always verified. Threads: one at a time for each client.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::http {

struct Tls {
  std::string ca_file;               // PEM of authorities; empty: what the system trusts
  std::string cert_file, key_file;   // PEM: who this client is; empty: nobody asks
  std::string ca_names = "ca_file";  // what a person sets to name another ca_file, for messages
};

struct Request {
  std::string method, url;
  std::vector<std::string> headers;  // "name: value"; Content-Type too
  std::span<const std::byte> body;   // of PUT and POST
};

struct Response {
  int status = 0;
  std::map<std::string, std::string> headers;  // lower-case names; of a repeated one "first, second"
  std::string body;                            // unless a sink took it
};

struct Limits {
  double connect_s = 30;
  double total_s = 0;    // of the whole exchange; 0: as long as bytes come
  double silent_s = 60;  // so long with fewer bytes than this ends it
  int64_t slowest_bytes_per_s = 1 << 10;
  int64_t most_bytes_per_s = 0;     // either direction; 0: as fast as it goes
  std::function<bool()> cancelled;  // asked all the while; may be empty
};

using Sink = std::function<Status(std::span<const std::byte>)>;
/// Called with status and headers of an answer of 200 to 299 before the first byte goes to the sink.
using Head = std::function<Status(const Response&)>;

/// What came of a request. Not ok: there is no answer, `again` says whether another try may help.
struct Outcome {
  Result<Response> answer;
  bool again = false;
};

class Client {
 public:
  /// Errors: kInvalidInput: a file of `tls` that cannot be read, or a certificate without its key.
  static Result<std::unique_ptr<Client>> make(Tls tls);
  ~Client();

  /// `what` begins each message. The body of an answer of 200 to 299 goes to `sink` as it comes, where there is one.
  /// Errors: kInvalidInput: a certificate that fails, a URL that is none; kTimeout; kUnavailable; kStopped: cancelled;
  /// those of the sink and of `head`.
  Outcome send(const std::string& what, const Request& request, const Limits& limits, const Sink* sink = nullptr,
               const Head* head = nullptr);

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// What a server said, short and fit for a terminal.
std::string printable(std::string_view text);

}  // namespace cairn::http
