// Answers that an etcd, or a proxy before it, may give. The server here is a thread that says one thing to each call.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/etcd_store.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::cluster;

namespace {

using Answers = std::map<std::string, std::string>;  // body by call

class Server {
 public:
  explicit Server(Answers answers, int status = 200) : answers_(std::move(answers)), status_(status) {
    fd_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    REQUIRE(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(::listen(fd_.get(), 16) == 0);
    REQUIRE(::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  ~Server() {
    ends_ = true;
    thread_.join();
  }
  std::string endpoint() const { return fmt::format("127.0.0.1:{}", port_); }

  std::atomic<int> calls = 0;

 private:
  /// One request a connection.
  void run() {
    while (!ends_) {
      pollfd ready{fd_.get(), POLLIN, 0};
      if (::poll(&ready, 1, 10) != 1) continue;
      const Fd peer(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      std::string request;
      char bytes[4096];
      for (;;) {
        const size_t head = request.find("\r\n\r\n"), length = request.find("Content-Length: ");
        if (head != std::string::npos && length < head &&
            request.size() >= head + 4 + std::stoul(request.substr(length + 16)))
          break;
        const ssize_t n = ::recv(peer.get(), bytes, sizeof(bytes), 0);
        if (n <= 0) break;
        request.append(bytes, static_cast<size_t>(n));
      }
      const size_t begin = request.find("/v3/");
      if (begin == std::string::npos) continue;
      const std::string call = request.substr(begin + 4, request.find(' ', begin) - begin - 4);
      const auto found = answers_.find(call);
      const std::string body = found == answers_.end() ? R"({"header":{}})" : found->second;
      const std::string answer = fmt::format("HTTP/1.1 {} OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
                                             status_, body.size(), body);
      ++calls;
      [[maybe_unused]] const ssize_t sent = ::send(peer.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    }
  }

  const Answers answers_;
  const int status_;
  Fd fd_;
  int port_ = 0;
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

Epoch first_epoch() {
  return {.number = 1, .port = 1, .incarnation = "i", .members = {{"h0", "127.0.0.1", "b"}}, .ranks_per_host = 1};
}

}  // namespace

TEST_SUITE("runtime/cluster/etcd answers") {
  TEST_CASE("JSON that is no object is no answer of an etcd: the next member is asked") {
    for (const std::string body : {"[]", "null", "\"ok\"", "7", "true", "<html>busy</html>", ""}) {
      CAPTURE(body);
      Server proxy(Answers{{"kv/txn", body}, {"kv/range", body}}),
          etcd(Answers{{"kv/txn", R"({"header":{},"succeeded":true})"}});
      const auto store = EtcdStore::open({.endpoints = {proxy.endpoint(), etcd.endpoint()}}, "run");
      REQUIRE_OK(store);
      const Result<bool> claimed = store.value()->claim(first_epoch());
      REQUIRE_OK(claimed);
      CHECK(claimed.value());
      CHECK(proxy.calls > 0);
    }
  }

  TEST_CASE("a member that asks for patience is not the one that answers, and one that refuses is") {
    const std::string words = R"({"error":"busy \u009b2J \u001b[2J"})";
    for (const int status : {408, 429, 503}) {
      CAPTURE(status);
      Server busy(Answers{{"kv/range", words}}, status), etcd(Answers{});
      const auto store = EtcdStore::open({.endpoints = {busy.endpoint(), etcd.endpoint()}}, "run");
      REQUIRE_OK(store);
      const auto newest = store.value()->newest();
      REQUIRE_OK(newest);
      CHECK_FALSE(newest.value());
      CHECK(busy.calls > 0);
    }
    Server refuses(Answers{{"kv/range", words}}, 403);
    const auto store = EtcdStore::open({.endpoints = {refuses.endpoint()}}, "run");
    REQUIRE_OK(store);
    const auto newest = store.value()->newest();
    REQUIRE_FALSE(newest.ok());
    CHECK(newest.error().code == ErrorCode::kInvalidInput);
    const std::string& message = newest.error().message;
    CHECK_MESSAGE(message.find("HTTP 403: busy") != std::string::npos, message);
    CHECK(std::ranges::all_of(message, [](char c) { return c >= ' ' && c <= '~'; }));
  }

  TEST_CASE("answers whose fields are of other types are no etcd's: errors that say so, and never a throw") {
    for (const std::string body :
         {R"({"kvs":[7]})", R"({"kvs":[{"value":[]}]})", R"({"kvs":{"a":1}})", R"({"kvs":[{"value":"e30="}]})",
          R"({"kvs":[{"value":"e30=","mod_revision":7}]})", R"({"kvs":[{"value":"?","mod_revision":"7"}]})",
          R"({"succeeded":"yes"})", R"({"result":[],"ID":7,"succeeded":1})", R"({"ID":"x","succeeded":[]})"}) {
      CAPTURE(body);
      Server etcd(Answers{{"kv/txn", body}, {"kv/range", body}, {"lease/grant", body}, {"lease/keepalive", body}});
      const auto store = EtcdStore::open({.endpoints = {etcd.endpoint()}}, "run");
      REQUIRE_OK(store);
      const auto check_strange = [](const auto& result) {
        REQUIRE_FALSE(result.ok());
        CHECK(result.error().code == ErrorCode::kUnavailable);
        CHECK(result.error().message.find("which no etcd answers") != std::string::npos);
      };
      if (body.find("kvs") != std::string::npos) check_strange(store.value()->newest());
      check_strange(store.value()->claim(first_epoch()));
      check_strange(store.value()->show("sign"));
    }
  }
}
