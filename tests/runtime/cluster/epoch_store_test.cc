// What an epoch says of memory that agents left which died. Stores: store_suite.h.
#include "runtime/cluster/epoch_store.h"

#include <doctest/doctest.h>

using namespace cairn::cluster;

TEST_SUITE("runtime/cluster/epoch_store") {
  TEST_CASE("a run goes on without memory of places that another machine has, or of another number of hosts") {
    Epoch epoch{.number = 2,
                .members = {{"h0", "1", "boot 0", 0}, {"h4", "5", "boot 4", 4}, {"h2", "3", "boot 2", 2}},
                .ranks_per_host = 2,
                .reason = "h1 was away"};
    CHECK(epoch.goes_on_without(2, 6, "boot 1"));        // h4 has it
    CHECK_FALSE(epoch.goes_on_without(2, 6, "boot 4"));  // that is this machine
    CHECK_FALSE(epoch.goes_on_without(0, 6, "boot 0"));
    CHECK(epoch.goes_on_without(0, 6, "boot 1"));
    CHECK(epoch.goes_on_without(0, 8, "boot 0"));  // of four hosts
    CHECK(epoch.goes_on_without(6, 8, "boot 3"));
    // A start may go on from any of it.
    epoch.reason = kStartsRun;
    CHECK_FALSE(epoch.goes_on_without(2, 6, "boot 1"));
    CHECK_FALSE(epoch.goes_on_without(0, 8, "boot 0"));
  }
}
