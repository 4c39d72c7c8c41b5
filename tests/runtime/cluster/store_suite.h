#pragma once
// What every EpochStore does, as cases that a test file runs against its own: folder_store_test.cc, etcd_test.cc.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "runtime/cluster/connection.h"
#include "runtime/cluster/epoch_store.h"
#include "runtime/cluster/lease.h"
#include "tests/support/ok.h"

namespace cairn::cluster {

inline Epoch epoch_of(int64_t number, int64_t leader) {
  return {.number = number,
          .leader = leader,
          .port = 24512,
          .incarnation = fmt::format("{}", leader),
          .members = {{"a", "1", "b", 0}, {"b", "2", "b", 1}, {"c", "3", "b", 2}, {"d", "4", "b", 3}},
          .ranks_per_host = 2,
          .recipe_hash = "r",
          .build = "b",
          .reason = "start"};
}

/// Opens the store anew each time, as each host does.
using OpenStore = std::function<std::shared_ptr<EpochStore>()>;

/// Four hosts race for each epoch of [first, end); `in_the_middle` is called on the way.
inline void race_for_epochs(const OpenStore& open, int64_t first, int64_t end,
                            const std::function<void()>& in_the_middle = {}) {
  std::vector<std::shared_ptr<EpochStore>> hosts;
  for (int k = 0; k < 4; ++k) hosts.push_back(open());
  for (int64_t number = first; number < end; ++number) {
    std::vector<std::future<Result<bool>>> claims;
    for (int64_t k = 0; k < 4; ++k) {
      claims.push_back(std::async(std::launch::async, [&, k] { return hosts[k]->claim(epoch_of(number, k)); }));
    }
    if (in_the_middle && number == (first + end) / 2) in_the_middle();
    int64_t winner = -1, made = 0;
    for (int64_t k = 0; k < 4; ++k) {
      const Result<bool> claimed = claims[k].get();
      REQUIRE_OK(claimed);
      if (!claimed.value()) continue;
      winner = k;
      ++made;
    }
    CHECK(made == 1);
    for (const auto& host : hosts) {
      const auto newest = host->newest();
      REQUIRE_OK(newest);
      CHECK(newest.value() == epoch_of(number, winner));
    }
  }
}

inline void check_claims(const OpenStore& open, int64_t epochs) {
  const std::shared_ptr<EpochStore> store = open();
  const auto nothing = store->newest();
  REQUIRE_OK(nothing);
  CHECK_FALSE(nothing.value().has_value());
  race_for_epochs(open, 1, epochs + 1);
  // Epochs that are taken stay as they are, also for who comes late.
  for (const int64_t number : {epochs, int64_t{1}}) {
    const Result<bool> late = store->claim(epoch_of(number, 99 % 4));
    REQUIRE_OK(late);
    Epoch other = epoch_of(number, 0);
    other.incarnation = "of nobody";
    const Result<bool> made = store->claim(other);
    REQUIRE_OK(made);
    CHECK_FALSE(made.value());
  }
  CHECK(store->newest().value()->number == epochs);
}

inline void check_lease(const OpenStore& open) {
  CHECK(open()->shown().value().empty());
  LeaseWatch before(open());
  CHECK_FALSE(before.has_changed());  // there is none yet
  std::optional<Lease> lease(open());
  const auto changes_within = [](LeaseWatch& watch, double seconds) {
    for (const int64_t end = steady_after(seconds); steady_ns() < end;) {
      watch.still_s();
      if (watch.has_changed()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  };
  CHECK(changes_within(before, 20));
  LeaseWatch held(open());
  CHECK(changes_within(held, 20));
  lease->hold(false);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // a write that had begun
  LeaseWatch left(open());
  CHECK_FALSE(changes_within(left, 3 * kLeaseEveryS));
  CHECK(left.still_s() >= 3 * kLeaseEveryS);
  lease->hold(true);
  CHECK(changes_within(left, 20));
  lease.reset();
  LeaseWatch gone(open());
  CHECK_FALSE(changes_within(gone, 3 * kLeaseEveryS));
}

}  // namespace cairn::cluster
