#include "runtime/cluster/switchboard.h"

#include <doctest/doctest.h>
#include <poll.h>

#include <chrono>
#include <optional>
#include <thread>

#include "tests/support/frame.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::cluster;

namespace {

constexpr Beats kQuick{.every_s = 0.05, .dead_after_s = 0.6};

/// Both ends of a connection through the loopback device.
std::pair<Connection, Connection> ends() {
  auto opened = Listener::open(0, 0);
  REQUIRE_OK(opened);
  Listener listener = std::move(opened).value();
  auto one = Connection::connect("127.0.0.1", listener.port(), steady_ns() + 2'000'000'000);
  REQUIRE_OK(one);
  std::optional<Connection> other;
  while (!other) other = listener.accept().value();
  other->trust();
  one.value().trust();
  return {std::move(one).value(), *std::move(other)};
}

/// The next news, within five seconds.
std::optional<News> next(Switchboard& board, std::vector<News>& waiting) {
  for (int k = 0; waiting.empty() && k < 50; ++k) {
    pollfd ready{board.fd(), POLLIN, 0};
    ::poll(&ready, 1, 100);
    waiting = board.take();
  }
  if (waiting.empty()) return std::nullopt;
  News out = std::move(waiting.front());
  waiting.erase(waiting.begin());
  return out;
}

void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

}  // namespace

TEST_SUITE("runtime/cluster/switchboard") {
  TEST_CASE("messages pass both ways, and two that beat stay connected for as long as they live") {
    auto [a, b] = ends();
    Switchboard left(kQuick), right(kQuick);
    left.add(1, "h1", std::move(a));
    right.add(0, "h0", std::move(b));
    std::vector<News> of_left, of_right;
    for (int64_t k = 0; k < 100; ++k) left.send(1, {hosts::Look{}, k});
    right.send(0, {hosts::AskSave{std::string(100'000, 'x')}, 7});
    for (int64_t k = 0; k < 100; ++k) {
      const auto news = next(right, of_right);
      REQUIRE(news.has_value());
      CHECK(news->message.epoch == k);
    }
    CHECK(std::get<hosts::AskSave>(next(left, of_left)->message.what).by.size() == 100'000);
    sleep_s(3 * kQuick.dead_after_s);  // nobody takes news meanwhile: the loop may be slow
    for (Switchboard* board : {&left, &right}) {
      for (const News& news : board->take()) FAIL_CHECK(news.why << hosts::kind_of(news.message.what));
    }
  }

  TEST_CASE("a peer that closes is lost at once, after what it said") {
    auto [a, b] = ends();
    Switchboard board({.every_s = 0.25, .dead_after_s = 30});
    board.add(5, "h5", std::move(a));
    std::vector<News> waiting;
    Status said = b.send({hosts::Left{7}});
    CHECK(said.ok());
    { const Connection gone = std::move(b); }
    CHECK(std::get<hosts::Left>(next(board, waiting)->message.what).incarnation == 7);
    const auto lost = next(board, waiting);
    REQUIRE(lost.has_value());
    CHECK(lost->kind == News::Kind::kLost);
    CHECK(lost->peer == 5);
    CHECK(lost->silent_s < 5);
    board.send(5, {hosts::Look{}});  // nothing happens
    sleep_s(0.1);
    CHECK(board.take().empty());
  }

  TEST_CASE("a peer whose message makes no sense is lost, and its message named") {
    auto [a, b] = ends();
    Switchboard board(kQuick);
    board.add(1, "h1", std::move(a));
    REQUIRE(testing::send_bytes(b.fd(), testing::frame(R"({"kind":"left","epoch":0,"body":{}})")));
    std::vector<News> waiting;
    const auto lost = next(board, waiting);
    REQUIRE(lost.has_value());
    CHECK(lost->kind == News::Kind::kLost);
    CHECK(lost->why.ends_with("not a message of an agent of cairn: `left`: no field `incarnation`"));
  }

  TEST_CASE(
      "a peer that is silent is lost after dead_after, one that beats is not, and one that lost its leader knows") {
    auto [a, b] = ends();
    auto [c, d] = ends();
    Switchboard board(kQuick), other(kQuick);
    board.add(1, "h1", std::move(a));  // b says nothing: a host that stands still
    board.add(2, "h2", std::move(c));
    other.add(0, "h0", std::move(d));
    std::vector<News> waiting;
    const auto lost = next(board, waiting);
    REQUIRE(lost.has_value());
    CHECK(lost->peer == 1);
    CHECK(lost->why == fmt::format("h1: silent for {:.1f} s", lost->silent_s));
    CHECK(lost->silent_s >= kQuick.dead_after_s);
    CHECK(lost->silent_s < kQuick.dead_after_s + 1);
    CHECK(board.take().empty());
    CHECK(other.take().empty());
  }

  TEST_CASE("a dropped peer gets what was sent to it, and no news comes of it") {
    auto [a, b] = ends();
    std::vector<News> waiting;
    {
      Switchboard board(kQuick);
      board.add(1, "h1", std::move(a));
      board.send(1, {hosts::End{.text = std::string(3'000'000, 'x')}});
      board.drop(1);
      Switchboard other(kQuick);
      other.add(0, "h0", std::move(b));
      std::optional<News> news = next(other, waiting);
      REQUIRE(news.has_value());
      CHECK(std::holds_alternative<hosts::End>(news->message.what));
      news = next(other, waiting);
      REQUIRE(news.has_value());
      CHECK(news->kind == News::Kind::kLost);
      CHECK(board.take().empty());
    }
  }
}
