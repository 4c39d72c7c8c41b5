#pragma once
// An HTTP server for answers whose size is known: health and metrics of an agent, files of a run. GET and HEAD, ranges
// of bytes (If-Range too, by an answer's ETag), a bearer token (libmicrohttpd, HTTP/1.1 without TLS).
//
// A client costs no more than the limits say: connections in all and of one address, bytes of a request's head, seconds
// for a request and for its answer. Bodies of requests are not read: a request with one is refused.
//
// Threads: the handler is called on the server's, several at once. They take no signal.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::http {

struct Asked {
  bool head = false;   // HEAD; else GET
  std::string path;    // decoded, from the first "/" up to "?"
  std::string client;  // its numeric address
  std::map<std::string, std::string> query;
};

struct Answer {
  int status = 200;
  std::map<std::string, std::string> headers;
  std::string body;  // unless `read` gives it
  /// Bytes of the body from `offset` on, as many as `into` takes, or as remain. Errors: the connection is closed.
  std::function<Result<int64_t>(int64_t offset, std::span<std::byte> into)> read = {};
  int64_t size = 0;  // of what `read` gives
};

using Handler = std::function<Answer(const Asked&)>;

/// How one request ended. It has no header and no query, which may hold secrets.
struct Served {
  std::string client, method, path;
  int status = 0;
  int64_t first = 0, bytes = 0;  // of the body: where it began, and how many were to be sent
  double seconds = 0;            // from the complete request on
  bool whole = true;             // else the connection broke off before
};

struct ServerOptions {
  std::string address = "127.0.0.1";  // numeric, IPv4 or IPv6
  int64_t port = 0;                   // 0: any free one
  std::string token;                  // asked for as "Authorization: Bearer TOKEN"; empty: nothing is asked for
  int64_t connections = 64, connections_an_address = 16;
  int64_t head_bytes = 16 << 10;    // of a request
  double request_s = 10;            // from the connection, or the answer before, to a complete request
  double answer_s = 60;             // from then until the answer is out
  int64_t slowest_bytes_per_s = 0;  // an answer that is read may take as much longer as its bytes take at this speed
  int64_t threads = 2;
  /// Called once an answer is out, or broken off, on the server's threads.
  std::function<void(const Served&)> served = {};
};

class Server {
 public:
  /// Errors: kInvalidInput: the address is none, or not of this machine; an address that others reach, and no token;
  /// kUnavailable: the port is taken.
  static Result<std::unique_ptr<Server>> start(ServerOptions options, Handler handler);
  /// Breaks connections, and waits for handlers that are at work.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int64_t port() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A range of bytes: [first, end).
struct ByteRange {
  int64_t first = 0, end = 0;
};
enum class RangeKind : uint8_t { kAll, kPart, kNone };  // kNone: 416
/// Reads a "Range" header for `size` bytes. Several ranges, or another unit, count as no header (RFC 9110, 14.2).
RangeKind parse_range(std::string_view header, int64_t size, ByteRange& out);

/// Whether only this machine reaches a numeric address.
bool is_loopback(std::string_view address);

}  // namespace cairn::http
