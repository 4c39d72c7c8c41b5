#include "runtime/http/server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <microhttpd.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/core/no_signals.h"

namespace cairn::http {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kBlock = 256 << 10;  // of an answer that is read
constexpr auto kLook = std::chrono::milliseconds(100);

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

/// The time it takes says nothing of how many bytes are right.
bool is_equal(std::string_view given, std::string_view wanted) {
  unsigned differs = given.size() == wanted.size() ? 0 : 1;
  for (size_t k = 0; k < given.size(); ++k)
    differs |= static_cast<unsigned char>(given[k]) ^ static_cast<unsigned char>(wanted[k % wanted.size()]);
  return differs == 0;
}

std::optional<int64_t> number(std::string_view text) {
  int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  const bool all = error == std::errc() && end == text.data() + text.size() && !text.empty() && text[0] != '-';
  return all ? std::optional(out) : std::nullopt;
}

struct Address {
  sockaddr_storage storage{};
  bool six = false;
};

Result<Address> socket_address(const std::string& text, int64_t port) {
  Address out;
  auto* const four = reinterpret_cast<sockaddr_in*>(&out.storage);
  auto* const six = reinterpret_cast<sockaddr_in6*>(&out.storage);
  if (::inet_pton(AF_INET, text.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(static_cast<uint16_t>(port));
  } else if (::inet_pton(AF_INET6, text.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(static_cast<uint16_t>(port));
    out.six = true;
  } else {
    return Error{ErrorCode::kInvalidInput, fmt::format("\"{}\" is no numeric address of IPv4 or IPv6", text)};
  }
  return out;
}

/// An answer that is read while it goes out.
struct Reading {
  Answer answer;
  int64_t first = 0;
  std::function<void(int64_t bytes)> went;  // before the next
};

ssize_t read_more(void* of, uint64_t at, char* into, size_t most) {
  const auto& reading = *static_cast<Reading*>(of);
  reading.went(static_cast<int64_t>(at));
  const Result<int64_t> got = reading.answer.read(reading.first + static_cast<int64_t>(at),
                                                  std::as_writable_bytes(std::span<char>(into, most)));
  if (!got.ok() || got.value() <= 0) return MHD_CONTENT_READER_END_WITH_ERROR;  // fewer bytes than were promised
  return static_cast<ssize_t>(got.value());
}

void end_reading(void* of) { delete static_cast<Reading*>(of); }

/// A request that is answered.
struct Request {
  Served served;
  Clock::time_point began;
};

std::string header_of(MHD_Connection* connection, const char* name) {
  const char* const value = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
  return value == nullptr ? "" : value;
}

std::string client_of(MHD_Connection* connection) {
  const auto* const info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
  if (info == nullptr) return "";
  const sockaddr* const address = info->client_addr;
  const void* const bytes = address->sa_family == AF_INET6
                                ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr)
                                : &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  char text[INET6_ADDRSTRLEN] = {};
  return ::inet_ntop(address->sa_family, bytes, text, sizeof(text)) == nullptr ? "" : text;
}

}  // namespace

bool is_loopback(std::string_view address) { return address.starts_with("127.") || address == "::1"; }

RangeKind parse_range(std::string_view header, int64_t size, ByteRange& out) {
  out = {0, size};
  if (!header.starts_with("bytes=")) return RangeKind::kAll;
  header.remove_prefix(6);
  const size_t dash = header.find('-');
  if (dash == header.npos || header.find(',') != header.npos) return RangeKind::kAll;
  const std::string_view from = header.substr(0, dash), to = header.substr(dash + 1);
  const std::optional<int64_t> first = number(from), last = number(to);
  if (from.empty() && last) {  // the last bytes
    if (*last == 0 || size == 0) return RangeKind::kNone;
    out.first = std::max<int64_t>(0, size - *last);
    return RangeKind::kPart;
  }
  if (!first || (!to.empty() && (!last || *last < *first))) return RangeKind::kAll;
  if (*first >= size) return RangeKind::kNone;
  out = {*first, last && *last < size ? *last + 1 : size};
  return RangeKind::kPart;
}

struct Server::Impl {
  ServerOptions options;
  Handler handler;
  MHD_Daemon* daemon = nullptr;

  std::mutex mutex;
  std::condition_variable changed;
  std::map<MHD_Connection*, std::pair<int, Clock::time_point>> until;  // its socket, and when it is broken
  bool ends = false;
  std::thread watch;

  ~Impl() {
    if (daemon != nullptr) MHD_stop_daemon(daemon);
    {
      const std::lock_guard lock(mutex);
      ends = true;
    }
    changed.notify_all();
    if (watch.joinable()) watch.join();
  }

  void grant(MHD_Connection* connection, double seconds) {
    const std::lock_guard lock(mutex);
    if (const auto at = until.find(connection); at != until.end()) at->second.second = after(seconds);
  }

  /// The library counts only the time between two bytes, which a client may stretch.
  void break_late() {
    std::unique_lock lock(mutex);
    while (!ends) {
      const auto now = Clock::now();
      for (const auto& [connection, one] : until) {
        if (now >= one.second) ::shutdown(one.first, SHUT_RDWR);
      }
      changed.wait_for(lock, kLook);
    }
  }

  MHD_Result send(MHD_Connection* connection, Answer answer, std::string_view range, Request& request);
  MHD_Result answer(MHD_Connection* connection, std::string_view method, const char* url, Request& request);
  Answer refused(MHD_Connection* connection, std::string_view method) const;

  static void on_connection(void* of, MHD_Connection* connection, void**, MHD_ConnectionNotificationCode code) {
    auto& impl = *static_cast<Impl*>(of);
    const std::lock_guard lock(impl.mutex);
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
      impl.until.erase(connection);
      return;
    }
    const auto* const info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    impl.until[connection] = {info->connect_fd, after(impl.options.request_s)};
  }

  static MHD_Result on_request(void* of, MHD_Connection* connection, const char* url, const char* method, const char*,
                               const char*, size_t*, void** kept) {
    auto request = std::make_unique<Request>();
    request->served = {.client = client_of(connection), .method = method, .path = url};
    request->began = Clock::now();
    *kept = request.get();
    return static_cast<Impl*>(of)->answer(connection, method, url, *request.release());
  }

  static void on_done(void* of, MHD_Connection* connection, void** kept, MHD_RequestTerminationCode code) {
    auto& impl = *static_cast<Impl*>(of);
    impl.grant(connection, impl.options.request_s);
    const std::unique_ptr<Request> request(static_cast<Request*>(std::exchange(*kept, nullptr)));
    if (!request || !impl.options.served) return;
    request->served.seconds = std::chrono::duration<double>(Clock::now() - request->began).count();
    request->served.whole = code == MHD_REQUEST_TERMINATED_COMPLETED_OK;
    impl.options.served(request->served);
  }
};

/// Status 0: it is not refused.
Answer Server::Impl::refused(MHD_Connection* connection, std::string_view method) const {
  if (!options.token.empty() && !is_equal(header_of(connection, "Authorization"), "Bearer " + options.token))
    return {.status = 401, .headers = {{"WWW-Authenticate", "Bearer"}}, .body = "a token is asked for\n"};
  if (method != "GET" && method != "HEAD")
    return {.status = 405, .headers = {{"Allow", "GET, HEAD"}}, .body = "GET and HEAD are answered\n"};
  const std::string length = header_of(connection, "Content-Length");
  if ((!length.empty() && length != "0") || !header_of(connection, "Transfer-Encoding").empty())
    return {.status = 413, .headers = {}, .body = "a request has no body here\n"};
  return {.status = 0, .headers = {}, .body = {}};
}

MHD_Result Server::Impl::answer(MHD_Connection* connection, std::string_view method, const char* url,
                                Request& request) {
  grant(connection, options.answer_s);
  const bool head = method == "HEAD";
  if (Answer no = refused(connection, method); no.status != 0) {
    no.headers["Connection"] = "close";  // what follows is not read
    return send(connection, std::move(no), {}, request);
  }
  Asked asked{.head = head, .path = url, .client = request.served.client, .query = {}};
  MHD_get_connection_values(
      connection, MHD_GET_ARGUMENT_KIND,
      [](void* into, MHD_ValueKind, const char* key, const char* value) {
        (*static_cast<std::map<std::string, std::string>*>(into))[key] = value == nullptr ? "" : value;
        return MHD_YES;
      },
      &asked.query);
  Answer answer = handler(asked);
  const std::string only_of = header_of(connection, "If-Range"), range = header_of(connection, "Range");
  const auto tag = answer.headers.find("ETag");
  const bool other = !only_of.empty() && (tag == answer.headers.end() || tag->second != only_of);
  return send(connection, std::move(answer), other || head ? std::string() : range, request);  // of GET only
}

MHD_Result Server::Impl::send(MHD_Connection* connection, Answer answer, std::string_view range, Request& request) {
  const int64_t size = answer.read ? answer.size : std::ssize(answer.body);
  ByteRange part{0, size};
  if (answer.status == 200) {
    answer.headers["Accept-Ranges"] = "bytes";
    switch (parse_range(range, size, part)) {
      case RangeKind::kAll:
        break;
      case RangeKind::kPart:
        answer.status = 206;
        answer.headers["Content-Range"] = fmt::format("bytes {}-{}/{}", part.first, part.end - 1, size);
        break;
      case RangeKind::kNone:
        answer = {
            .status = 416, .headers = {{"Content-Range", fmt::format("bytes */{}", size)}}, .body = "no such bytes\n"};
        part = {0, std::ssize(answer.body)};
    }
  }
  const int64_t first = part.first, bytes = part.end - part.first;
  const int status = answer.status;
  request.served.status = status;
  request.served.first = first;
  request.served.bytes = bytes;
  const auto went = [this, connection, began = request.began](int64_t sent) {
    if (options.slowest_bytes_per_s <= 0) return;
    const double passed_s = std::chrono::duration<double>(Clock::now() - began).count();
    grant(connection,
          options.answer_s - passed_s + static_cast<double>(sent) / static_cast<double>(options.slowest_bytes_per_s));
  };
  const std::map<std::string, std::string> headers = std::move(answer.headers);
  MHD_Response* const response =
      answer.read ? MHD_create_response_from_callback(static_cast<uint64_t>(bytes), kBlock, &read_more,
                                                      new Reading{std::move(answer), first, went}, &end_reading)
                  : MHD_create_response_from_buffer(static_cast<size_t>(bytes), answer.body.data() + first,
                                                    MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  for (const auto& [name, value] : headers) MHD_add_response_header(response, name.c_str(), value.c_str());
  // The library leaves the body of an answer to HEAD out.
  const MHD_Result queued = MHD_queue_response(connection, static_cast<unsigned>(status), response);
  MHD_destroy_response(response);
  return queued;
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;

Result<std::unique_ptr<Server>> Server::start(ServerOptions options, Handler handler) {
  RT_TRY_SET(const Address address, socket_address(options.address, options.port));
  if (options.token.empty() && !is_loopback(options.address)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} is reached from other machines: give a token", options.address)};
  }
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  impl->handler = std::move(handler);
  const ServerOptions& of = impl->options;
  const NoSignals none;
  errno = 0;
  impl->daemon = MHD_start_daemon(
      address.six ? MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_IPv6 : MHD_USE_EPOLL_INTERNAL_THREAD, 0, nullptr, nullptr,
      &Impl::on_request, impl.get(), MHD_OPTION_SOCK_ADDR, reinterpret_cast<const sockaddr*>(&address.storage),
      MHD_OPTION_THREAD_POOL_SIZE, static_cast<unsigned>(of.threads), MHD_OPTION_CONNECTION_LIMIT,
      static_cast<unsigned>(of.connections), MHD_OPTION_PER_IP_CONNECTION_LIMIT,
      static_cast<unsigned>(of.connections_an_address), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
      static_cast<size_t>(of.head_bytes), MHD_OPTION_CONNECTION_TIMEOUT,
      static_cast<unsigned>(std::max(of.request_s, of.answer_s) + 1), MHD_OPTION_NOTIFY_CONNECTION,
      &Impl::on_connection, impl.get(), MHD_OPTION_NOTIFY_COMPLETED, &Impl::on_done, impl.get(),
      MHD_OPTION_EXTERNAL_LOGGER, static_cast<MHD_LogCallback>([](void*, const char*, va_list) {}), nullptr,
      MHD_OPTION_END);
  if (impl->daemon == nullptr) {
    const int why = errno;
    const bool taken = why == EADDRINUSE || why == 0;
    return Error{taken ? ErrorCode::kUnavailable : ErrorCode::kInvalidInput,
                 fmt::format("{}:{}: cannot listen there: {}", of.address, of.port,
                             why == 0 ? "the address is taken" : std::strerror(why)),
                 why};
  }
  impl->watch = std::thread([own = impl.get()] { own->break_late(); });
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

int64_t Server::port() const {
  const auto* const info = MHD_get_daemon_info(impl_->daemon, MHD_DAEMON_INFO_BIND_PORT);
  return info == nullptr ? 0 : info->port;
}

}  // namespace cairn::http
