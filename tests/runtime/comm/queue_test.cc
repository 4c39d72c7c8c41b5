#include "runtime/comm/queue.h"

#include <doctest/doctest.h>

#include <vector>

using namespace cairn;
using namespace cairn::comm;

TEST_SUITE("runtime/comm/queue") {
  TEST_CASE("jobs run in the order they came in, with a thread and without") {
    for (const bool threaded : {true, false}) {
      std::vector<int> ran;
      Queue queue(threaded);
      std::vector<Queue::Ticket> tickets;
      for (int k = 0; k < 100; ++k) {
        tickets.push_back(queue.submit([&ran, k] {
          ran.push_back(k);
          return Status{};
        }));
      }
      CHECK(queue.wait(0).ok());
      REQUIRE(queue.wait(tickets[49]).ok());
      if (!threaded) CHECK(ran.size() == 100);
      REQUIRE(queue.wait_all().ok());
      CHECK_FALSE(queue.busy());
      REQUIRE(ran.size() == 100);
      for (int k = 0; k < 100; ++k) CHECK(ran[k] == k);
    }
  }

  TEST_CASE("after an error no later job runs, and whoever waits gets the first") {
    for (const bool threaded : {true, false}) {
      int ran = 0;
      Queue queue(threaded);
      const Queue::Ticket good = queue.submit([&] { return ++ran, Status{}; });
      CHECK(queue.wait(good).ok());
      queue.submit([] { return Status(Error{ErrorCode::kPeerLost, "the first"}); });
      queue.submit([&] { return ++ran, Status(Error{ErrorCode::kInternal, "the second"}); });
      const Status status = queue.wait_all();
      REQUIRE_FALSE(status.ok());
      CHECK(status.error().message == "the first");
      CHECK(ran == 1);
      CHECK_FALSE(queue.busy());
    }
  }
}
