// The HTTP server, asked by clients that mean well and by others.
#include "runtime/http/server.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/core/unique_handle.h"

using namespace cairn;
using namespace cairn::http;

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kPatienceMs = 20'000;

double seconds_since(Clock::time_point then) { return std::chrono::duration<double>(Clock::now() - then).count(); }

/// A connection to the server from an address of this machine.
class Client {
 public:
  explicit Client(int64_t port, const char* from = "127.0.0.1")
      : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    ::inet_pton(AF_INET, from, &own.sin_addr);
    REQUIRE(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof(own)) == 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    ::inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    REQUIRE(::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0);
  }
  bool send(std::string_view text) const { return ::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL) >= 0; }
  /// All that comes until the server closes the connection; "" and at once where it was reset.
  std::string rest() const {
    std::string out;
    for (;;) {
      pollfd ready{fd_.get(), POLLIN, 0};
      REQUIRE(::poll(&ready, 1, kPatienceMs) == 1);
      char bytes[4096];
      const ssize_t got = ::recv(fd_.get(), bytes, sizeof(bytes), 0);
      if (got <= 0) return out;
      out.append(bytes, static_cast<size_t>(got));
    }
  }
  /// How many bytes came; 0: none will.
  int64_t read_some() const {
    pollfd ready{fd_.get(), POLLIN, 0};
    REQUIRE(::poll(&ready, 1, kPatienceMs) == 1);
    static char bytes[64 << 10];
    return ::recv(fd_.get(), bytes, sizeof(bytes), 0);
  }
  bool closes_within(int ms) const {
    pollfd ready{fd_.get(), POLLIN, 0};
    char byte = 0;
    return ::poll(&ready, 1, ms) == 1 && ::recv(fd_.get(), &byte, 1, 0) <= 0;
  }

 private:
  Fd fd_;
};

struct Fixture {
  std::atomic<int64_t> asked = 0, bytes_read = 0, answers = 0;  // `answers`: large ones that are kept

  std::unique_ptr<Server> start(ServerOptions options = {}) {
    Result<std::unique_ptr<Server>> made = Server::start(std::move(options), [this](const Asked& one) -> Answer {
      ++asked;
      if (one.path == "/text")
        return {.status = 200, .headers = {{"Content-Type", "text/plain"}}, .body = "0123456789"};
      if (one.path == "/tagged") return {.status = 200, .headers = {{"ETag", "\"t1\""}}, .body = one.client};
      if (one.path == "/query") return {.status = 200, .headers = {}, .body = one.query.at("a")};
      if (one.path != "/large" && one.path != "/broken")
        return {.status = 404, .headers = {}, .body = "no " + one.path + "\n"};
      const bool broken = one.path == "/broken";
      ++answers;
      const std::shared_ptr<void> kept(nullptr, [this](void*) { --answers; });
      return {.status = 200,
              .headers = {},
              .body = {},
              .read = [this, broken, kept](int64_t offset, std::span<std::byte> into) -> Result<int64_t> {
                if (broken && offset > 0) return Error{ErrorCode::kIo, "a disk"};
                for (size_t k = 0; k < into.size(); ++k)
                  into[k] = static_cast<std::byte>('a' + (offset + static_cast<int64_t>(k)) % 26);
                bytes_read += std::ssize(into);
                return std::ssize(into);
              },
              .size = int64_t{256} << 20};
    });
    REQUIRE(made.ok());
    return std::move(made).value();
  }
  static std::string ask(const Server& server, const std::string& head, const char* from = "127.0.0.1") {
    const Client client(server.port(), from);
    client.send(head + "Host: x\r\nConnection: close\r\n\r\n");
    return client.rest();
  }
  static std::string get(const Server& server, const std::string& path, const char* from = "127.0.0.1") {
    return ask(server, "GET " + path + " HTTP/1.1\r\n", from);
  }
};

std::string body_of(const std::string& answer) {
  const size_t at = answer.find("\r\n\r\n");
  return at == answer.npos ? "" : answer.substr(at + 4);
}

}  // namespace

TEST_SUITE("runtime/http/server") {
  TEST_CASE_FIXTURE(Fixture, "GET and HEAD are answered, with ranges of bytes") {
    const auto server = start();
    const std::string all = get(*server, "/text");
    CHECK(all.starts_with("HTTP/1.1 200"));
    CHECK(all.find("Content-Type: text/plain") != all.npos);
    CHECK(body_of(all) == "0123456789");
    CHECK(body_of(get(*server, "/query?a=1%202&b")) == "1 2");
    CHECK(get(*server, "/none").starts_with("HTTP/1.1 404"));

    const std::string head = ask(*server, "HEAD /text HTTP/1.1\r\n");
    CHECK(head.find("Content-Length: 10") != head.npos);
    CHECK(body_of(head).empty());
    const std::string ranged = ask(*server, "HEAD /text HTTP/1.1\r\nRange: bytes=2-4\r\n");  // ranges are of GET
    CHECK(ranged.starts_with("HTTP/1.1 200"));
    CHECK(ranged.find("Content-Length: 10") != ranged.npos);

    const std::string part = ask(*server, "GET /text HTTP/1.1\r\nRange: bytes=2-4\r\n");
    CHECK(part.starts_with("HTTP/1.1 206"));
    CHECK(part.find("Content-Range: bytes 2-4/10") != part.npos);
    CHECK(body_of(part) == "234");
    CHECK(body_of(ask(*server, "GET /large HTTP/1.1\r\nRange: bytes=27-29\r\n")) == "bcd");
    CHECK(ask(*server, "GET /text HTTP/1.1\r\nRange: bytes=10-\r\n").starts_with("HTTP/1.1 416"));
  }

  TEST_CASE("a range is one of bytes, else there is none") {
    const auto parse = [](std::string_view header, int64_t size = 10) {
      ByteRange range;
      const RangeKind kind = parse_range(header, size, range);
      return kind == RangeKind::kNone
                 ? std::string("none")
                 : fmt::format("{}{}-{}", kind == RangeKind::kPart ? "part " : "", range.first, range.end);
    };
    CHECK(parse("bytes=0-") == "part 0-10");
    CHECK(parse("bytes=3-3") == "part 3-4");
    CHECK(parse("bytes=3-99") == "part 3-10");
    CHECK(parse("bytes=3-9223372036854775807") == "part 3-10");
    CHECK(parse("bytes=-3") == "part 7-10");
    CHECK(parse("bytes=-30") == "part 0-10");
    CHECK(parse("bytes=-0") == "none");
    CHECK(parse("bytes=10-") == "none");
    CHECK(parse("bytes=0-", 0) == "none");
    for (const char* text : {"", "lines=0-1", "bytes=", "bytes=-", "bytes=4-3", "bytes=1-2,4-5", "bytes=a-b",
                             "bytes=0--1", "bytes=99999999999999999999-"})
      CHECK_MESSAGE(parse(text) == "0-10", text);
  }

  TEST_CASE_FIXTURE(Fixture, "without the token nothing is answered, and no handler is called") {
    const auto server = start({.token = "secret"});
    CHECK(get(*server, "/text").starts_with("HTTP/1.1 401"));
    for (const char* wrong : {"Bearer secreT", "Bearer secre", "Bearer secret2", "secret", "Basic secret"})
      CHECK(
          ask(*server, fmt::format("GET /text HTTP/1.1\r\nAuthorization: {}\r\n", wrong)).starts_with("HTTP/1.1 401"));
    CHECK(asked == 0);
    CHECK(body_of(ask(*server, "GET /text HTTP/1.1\r\nAuthorization: Bearer secret\r\n")) == "0123456789");
  }

  TEST_CASE_FIXTURE(Fixture, "other methods and requests with a body are refused unread") {
    const auto server = start();
    CHECK(ask(*server, "DELETE /text HTTP/1.1\r\n").starts_with("HTTP/1.1 405"));
    CHECK(ask(*server, "GET /text HTTP/1.1\r\nContent-Length: 99999999999\r\n").starts_with("HTTP/1.1 413"));
    CHECK(ask(*server, "GET /text HTTP/1.1\r\nTransfer-Encoding: chunked\r\n").starts_with("HTTP/1.1 413"));
    CHECK(asked == 0);
  }

  TEST_CASE_FIXTURE(Fixture, "an address that others reach needs a token, and a port is taken once") {
    const auto fails = [](ServerOptions options) {
      const auto made = Server::start(std::move(options), {});
      REQUIRE_FALSE(made.ok());
      return made.error();
    };
    CHECK(fails({.address = "0.0.0.0"}).message == "0.0.0.0 is reached from other machines: give a token");
    CHECK(fails({.address = "localhost"}).message == "\"localhost\" is no numeric address of IPv4 or IPv6");
    CHECK(fails({.address = "192.0.2.1", .token = "t"}).code == ErrorCode::kInvalidInput);
    const auto server = start();
    CHECK(fails({.port = server->port()}).code == ErrorCode::kUnavailable);
  }

  TEST_CASE_FIXTURE(Fixture, "half a request, or one that comes byte by byte, ends with its time") {
    const auto server = start({.request_s = 0.4});
    const Client half(server->port()), drip(server->port());
    const auto began = Clock::now();
    half.send("GET /text HT");
    const std::string slow = "GET /text HTTP/1.1\r\nX: " + std::string(100'000, 'x');
    CHECK(body_of(get(*server, "/text")) == "0123456789");  // meanwhile
    size_t sent = 0;
    while (seconds_since(began) < 10 && !drip.closes_within(20) && drip.send(slow.substr(sent, 1))) ++sent;
    CHECK(half.rest().empty());
    CHECK(seconds_since(began) >= 0.35);
    CHECK(seconds_since(began) < 5);
    CHECK(sent < 400);
    CHECK(asked == 1);
  }

  TEST_CASE_FIXTURE(Fixture, "a head of a megabyte is refused, and the server answers on") {
    const auto server = start();
    const Client client(server->port());
    client.send("GET /text HTTP/1.1\r\n");
    const std::string line = "X-A: " + std::string(1000, 'x') + "\r\n";
    for (int k = 0; k < 1000; ++k) {
      if (!client.send(line)) break;
    }
    const std::string answer = client.rest();
    CHECK((answer.empty() || answer.starts_with("HTTP/1.1 431")));
    CHECK(get(*server, std::string("/") + std::string(100'000, 'x')).find("200 OK") == std::string::npos);
    CHECK(asked == 0);
    CHECK(body_of(get(*server, "/text")) == "0123456789");
  }

  TEST_CASE_FIXTURE(Fixture, "a thousand connections of one address leave room for those of another") {
    const auto server = start({.connections = 32, .connections_an_address = 16});
    std::vector<std::unique_ptr<Client>> idle;
    idle.reserve(1000);
    for (int k = 0; k < 1000; ++k) idle.push_back(std::make_unique<Client>(server->port()));
    CHECK(body_of(get(*server, "/text", "127.0.0.2")) == "0123456789");
    int64_t closed = 0;
    for (const auto& one : idle) closed += one->closes_within(0);
    CHECK(closed >= 1000 - 16);
    idle.clear();
    std::string answer;
    for (int k = 0; k < 100 && answer.empty(); ++k) answer = get(*server, "/text");  // once their ends are seen
    CHECK(body_of(answer) == "0123456789");
  }

  TEST_CASE_FIXTURE(Fixture, "who reads nothing of a large answer costs a block of it, and is left after its time") {
    const auto server = start({.answer_s = 0.5});
    const Client slow(server->port());
    const auto began = Clock::now();
    slow.send("GET /large HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(body_of(get(*server, "/text")) == "0123456789");
    while (bytes_read == 0 || (answers > 0 && seconds_since(began) < 10)) std::this_thread::yield();
    CHECK(answers == 0);
    CHECK(seconds_since(began) >= 0.45);
    CHECK(seconds_since(began) < 5);
    CHECK(bytes_read < int64_t{32} << 20);  // what the sockets of both ends hold
  }

  TEST_CASE_FIXTURE(Fixture, "a client that reads has the time that its bytes take, and one that stops is left") {
    const auto server = start({.answer_s = 0.2, .slowest_bytes_per_s = 4 << 20});
    const Client client(server->port());
    client.send("GET /large HTTP/1.1\r\nHost: x\r\n\r\n");
    const auto began = Clock::now();
    int64_t got = 0;
    while (seconds_since(began) < 0.6) {  // three times as long as it has without
      const int64_t more = client.read_some();
      REQUIRE(more > 0);
      got += more;
      // Twice the least speed and no faster: bytes that went out sooner would buy more time.
      while (static_cast<double>(got) > seconds_since(began) * (8 << 20) + (1 << 20)) std::this_thread::yield();
    }
    CHECK(answers == 1);
    while (answers > 0 && seconds_since(began) < 20) std::this_thread::yield();
    CHECK(answers == 0);
  }

  TEST_CASE_FIXTURE(Fixture, "a range of another content than the client has is none") {
    const auto server = start();
    const auto of = [&](const char* tag) {
      return ask(*server, fmt::format("GET /tagged HTTP/1.1\r\nRange: bytes=0-3\r\nIf-Range: \"{}\"\r\n", tag));
    };
    CHECK(of("t1").starts_with("HTTP/1.1 206"));
    CHECK(body_of(of("t1")) == "127.");
    CHECK(of("t2").starts_with("HTTP/1.1 200"));
    CHECK(body_of(of("t2")) == "127.0.0.1");
  }

  TEST_CASE_FIXTURE(Fixture, "the server reports each answer once it is out, or broken off, without its query") {
    std::mutex mutex;
    std::vector<Served> told;
    {
      const auto server = start({.token = "secret", .served = [&](const Served& one) {
                                   const std::lock_guard lock(mutex);
                                   told.push_back(one);
                                 }});
      get(*server, "/text?a=secret");
      const std::string token = "Authorization: Bearer secret\r\n";
      ask(*server, "GET /text HTTP/1.1\r\nRange: bytes=2-4\r\n" + token, "127.0.0.3");
      ask(*server, "GET /broken HTTP/1.1\r\n" + token);
    }
    REQUIRE(told.size() == 3);
    CHECK(told[0].status == 401);
    CHECK(told[0].path == "/text");
    CHECK(told[1].client == "127.0.0.3");
    CHECK(told[1].status == 206);
    CHECK(told[1].first == 2);
    CHECK(told[1].bytes == 3);
    CHECK(told[1].whole);
    CHECK(told[2].method == "GET");
    CHECK(!told[2].whole);
  }

  TEST_CASE_FIXTURE(Fixture, "an answer that cannot be read on breaks off, and is not taken for complete") {
    const auto server = start();
    const std::string answer = get(*server, "/broken");
    CHECK(answer.starts_with("HTTP/1.1 200"));
    CHECK(std::ssize(answer) < int64_t{1} << 20);
  }
}
