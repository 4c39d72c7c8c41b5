#include "runtime/cluster/guests.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/frame.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::cluster;

namespace {

/// The limit of files of this process while the object lives.
class FileLimit {
 public:
  explicit FileLimit(rlim_t soft) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    set(soft);
  }
  ~FileLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  void set(rlim_t soft) const {
    const rlimit wanted{soft, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &wanted) == 0);
  }

 private:
  rlimit before_{};
};

Connection connected(int64_t port) {
  Result<Connection> out = Connection::connect("127.0.0.1", port, steady_after(5));
  REQUIRE_OK(out);
  return std::move(out).value();
}

/// Guests with what they have said, and the first messages that came.
struct Desk {
  explicit Desk(double patience_s = 60)
      : guests(
            [] {
              Result<Listener> listener = Listener::open(0, 0);
              REQUIRE_OK(listener);
              return std::move(listener).value();
            }(),
            patience_s,
            [](const std::string& nonce) {
              return Message{hosts::Challenge{nonce, "t"}};
            },
            [this](std::string line) { said.push_back(std::move(line)); }) {}

  /// Serves until that holds; false: not in twenty seconds.
  bool until(const std::function<bool()>& holds) {
    for (const int64_t deadline_ns = steady_after(20); !holds();) {
      if (steady_ns() > deadline_ns) return false;
      std::vector<pollfd> ready;
      guests.watch(ready);
      ::poll(ready.data(), ready.size(), 10);
      guests.serve([this](const Guest& guest, const Message& message) {
        const auto* const join = std::get_if<hosts::Join>(&message.what);
        came.push_back(std::string(hosts::kind_of(message.what)) +
                       (join != nullptr && join->nonce == guest.nonce ? " proved" : ""));
      });
    }
    return true;
  }

  std::vector<std::string> said, came;
  Guests guests;
};

/// Answers the challenge: what a host of the run would do.
bool answer(Connection& from) {
  if (!from.fill().ok()) return false;
  const Result<std::optional<Message>> challenge = from.next();
  if (!challenge.ok() || !challenge.value()) return false;
  return from.send({hosts::Join{{}, std::get<hosts::Challenge>(challenge.value()->what).nonce, ""}}).ok();
}

}  // namespace

TEST_SUITE("runtime/cluster/guests") {
  TEST_CASE("idle strangers fill their pool only: a host of the run comes in, and the oldest stranger goes") {
    std::optional<FileLimit> small(64);
    CHECK(most_guests() == 16);
    Desk desk;
    small.reset();
    std::vector<Connection> strangers;
    for (int k = 0; k < 40; ++k) strangers.push_back(connected(desk.guests.port()));
    REQUIRE(desk.until([&] { return desk.guests.count() == 16; }));
    Connection friend_of_run = connected(desk.guests.port());
    bool answered = false;
    REQUIRE(desk.until([&] {
      answered = answered || answer(friend_of_run);
      return !desk.came.empty();
    }));
    CHECK(desk.came == std::vector<std::string>{"join proved"});
    CHECK(desk.guests.count() <= 16);
    // The first ones are gone, the last ones are still there.
    CHECK_FALSE([&] {
      while (strangers.front().fill().ok()) {
        if (!desk.until([] { return true; })) break;
      }
      return strangers.front().fill().ok();
    }());
    CHECK(strangers.back().fill().ok());
  }

  TEST_CASE("a limit of files that is reached ends nothing: guests are given up, and the rest comes in later") {
    Desk desk;
    std::vector<Connection> waiting;
    for (int k = 0; k < 6; ++k) waiting.push_back(connected(desk.guests.port()));
    {
      const int lowest = ::fcntl(0, F_DUPFD_CLOEXEC, 0);  // the lowest number that is free
      REQUIRE(lowest >= 0);
      ::close(lowest);
      const FileLimit full(static_cast<rlim_t>(lowest) + 2);  // for two of them
      REQUIRE(desk.until([&] { return !desk.said.empty(); }));
      CHECK(desk.said.front().find("Too many open files") != std::string::npos);
      CHECK(desk.guests.count() <= 2);
    }
    const auto lives = [&] { return std::ranges::count_if(waiting, [](Connection& one) { return one.fill().ok(); }); };
    REQUIRE(desk.until([&] { return desk.guests.count() == lives() && desk.guests.count() >= 4; }));
  }

  TEST_CASE("the oldest connection of the address that has the most gives its place") {
    CHECK(place_to_give({"a"}) == 0);
    CHECK(place_to_give({"a", "b", "b"}) == 1);
    CHECK(place_to_give({"b", "a", "c", "a", "b", "b"}) == 0);
  }

  TEST_CASE("a silent guest is given up at its deadline") {
    Desk desk(0.05);
    Connection stranger = connected(desk.guests.port());
    REQUIRE(desk.until([&] { return desk.guests.count() == 1; }));
    REQUIRE(desk.until([&] { return desk.guests.count() == 0; }));
  }

  TEST_CASE("lines about strangers are few and printable, whatever they send") {
    Desk desk;
    const std::string key = R"(a\u001b[2J\nstep 7 is saved)", text = fmt::format(R"({{"{0}":1,"{0}":2}})", key);
    for (int k = 0; k < 30; ++k) {
      Connection stranger = connected(desk.guests.port());
      REQUIRE(testing::send_bytes(stranger.fd(), testing::frame(text)));
      REQUIRE(desk.until([&] { return desk.guests.count() == 0 && !desk.said.empty(); }));
    }
    CHECK(desk.said.size() <= 10);
    for (const std::string& line : desk.said) {
      CHECK(std::ranges::all_of(line, [](char c) { return c >= ' ' && c <= '~'; }));
    }
  }
}
