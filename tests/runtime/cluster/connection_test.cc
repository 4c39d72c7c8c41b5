// Frames: which are refused, when, and how many bytes of a peer are held meanwhile.
#include "runtime/cluster/connection.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <string>
#include <utility>

#include "tests/support/frame.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::cluster;
using cairn::testing::frame;
using cairn::testing::send_bytes;

namespace {

/// A connection and the socket of its peer.
struct Ends {
  Ends() {
    int both[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) == 0);
    own.emplace(Fd(both[0]));
    peer = Fd(both[1]);
  }
  /// Reads the bytes that were sent so far.
  Result<std::optional<Message>> next() {
    REQUIRE_OK(own->fill());
    return own->next();
  }
  std::optional<Connection> own;
  Fd peer;
};

std::string why(const Result<std::optional<Message>>& read) {
  if (read.ok()) return read.value() ? "taken" : "waits";
  CHECK(read.error().code == ErrorCode::kCorrupt);
  const std::string& text = read.error().message;
  return text.substr(text.find("cairn: ") + 7);
}

/// The first four bytes of a frame.
std::string length(size_t bytes) {
  std::string out;
  for (size_t k = 0; k < 4; ++k) out += static_cast<char>(bytes >> (8 * k) & 0xff);
  return out;
}

}  // namespace

TEST_SUITE("runtime/cluster/connection") {
  TEST_CASE("a length beyond the peer's bound is refused once its four bytes have come, a stranger's from 16 KiB on") {
    for (const auto& [bytes, told] : {std::pair<size_t, std::string>{0, "a length of 0 bytes"},
                                      {kMostUntrusted, "waits"},
                                      {kMostUntrusted + 1, "a length of 16385 bytes"},
                                      {kMostBytes, "a length of 16777216 bytes"}}) {
      Ends stranger;
      REQUIRE(send_bytes(stranger.peer.get(), length(bytes)));
      CHECK(why(stranger.next()) == told);
    }
    for (const auto& [bytes, told] : {std::pair<size_t, std::string>{kMostBytes, "waits"},
                                      {kMostBytes + 1, "a length of 16777217 bytes"},
                                      {0xffffffff, "a length of 4294967295 bytes"}}) {
      Ends proved;
      proved.own->trust();
      REQUIRE(send_bytes(proved.peer.get(), length(bytes)));
      CHECK(why(proved.next()) == told);
    }
  }

  TEST_CASE("a connection holds no more of a stranger's bytes than its longest message and one read") {
    Ends stranger;
    const int wide = 1 << 20;
    REQUIRE(::setsockopt(stranger.peer.get(), SOL_SOCKET, SO_SNDBUF, &wide, sizeof(wide)) == 0);
    const std::string much(300'000, 'x');
    const ssize_t sent = ::send(stranger.peer.get(), much.data(), much.size(), MSG_DONTWAIT);
    constexpr ssize_t kHeld = kMostUntrusted + 4 + (1 << 16);
    REQUIRE(sent > 2 * kHeld);
    for (int k = 0; k < 3; ++k) REQUIRE_OK(stranger.own->fill());
    int left = 0;
    REQUIRE(::ioctl(stranger.own->fd(), FIONREAD, &left) == 0);
    CHECK(left >= sent - kHeld);
  }

  TEST_CASE("a frame has a kind, an epoch and a body that the codec takes, and nothing else") {
    const std::string shape = "kind, epoch and body are expected, and nothing else";
    for (const auto& [text, told] :
         {std::pair<std::string, std::string>{R"({"body":{"ask":3},"epoch":7,"kind":"halt"})", "taken"},
          {"[]", shape},
          {R"({"body":{"ask":3},"kind":"halt"})", shape},
          {R"({"body":{"ask":3},"epoch":-1,"kind":"halt"})", shape},
          {R"({"body":{"ask":3},"epoch":7,"kind":3})", shape},
          {R"({"body":null,"epoch":7,"kind":"rest"})", shape},
          {R"({"body":{"ask":3},"epoch":7,"kind":"halt","zz":1})", shape},
          {R"({"body":{},"epoch":7,"kind":"hold"})", "an unknown kind, `hold`"},
          {R"({"body":{},"epoch":7,"kind":"halt"})", "`halt`: no field `ask`"}}) {
      CAPTURE(text);
      Ends ends;
      REQUIRE(send_bytes(ends.peer.get(), frame(text)));
      CHECK(why(ends.next()) == told);
    }
  }

  TEST_CASE("a connection sends the bytes that agents exchange") {
    Ends ends;
    REQUIRE_OK(ends.own->send({hosts::Halt{3}, 7}));
    REQUIRE_OK(ends.own->send({hosts::Beat{}}));
    const std::string wanted =
        frame(R"({"body":{"ask":3},"epoch":7,"kind":"halt"})") + frame(R"({"body":{},"epoch":0,"kind":"beat"})");
    std::string came(wanted.size() + 1, 0);
    came.resize(static_cast<size_t>(::recv(ends.peer.get(), came.data(), came.size(), 0)));
    CHECK(came == wanted);
  }
}
