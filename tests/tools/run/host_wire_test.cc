#include "tools/run/host_wire.h"

#include <doctest/doctest.h>

#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::tools;
using nlohmann::json;

namespace {

HostOrder some_order() {
  HostOrder order;
  order.choice = {.incarnation = 0xffffffffffffffffu,
                  .source = ckpt::arena::Source::kDisk,
                  .step = int64_t{1} << 53,
                  .slot = 2,
                  .slot_incarnation = 7,
                  .dir = "step-00000012",
                  .foreign = true};
  order.choice.match.emplace();
  order.starts = {0xfedcba9876543210u, 1};
  order.promised = {12, 9};
  order.epoch = 7;
  order.peers = {{"10.77.0.10", 24513}, {"h1", 0}};
  return order;
}

HostSegment some_segment() {
  return {.recipe = "{\"name\":\"\u00e4\"}",
          .past = "p",
          .init = "{}",
          .end_step = 40,
          .hosts = 3,
          .run_name = "n",
          .run_id = "i",
          .lineage = "l",
          .recipe_json = "{}",
          .recipe_hash = "h",
          .trace = "steps=1..2",
          .time_kernels = true};
}

/// Every value below `from` in turn made another one, or taken away.
template <typename Read>
void garble(const json& from, const Read& read) {
  const json flat = from.flatten();
  for (const auto& [pointer, value] : flat.items()) {
    const json::json_pointer at(pointer);
    for (const json& other : {json(), json("x"), json(-1), json(1.5), json::array(), json::object(), json(true)}) {
      json changed = from;
      changed[at] = other;
      read(changed);
    }
  }
  for (const auto& [key, value] : from.items()) {
    json less = from;
    less.erase(key);
    read(less);
  }
  for (const json& other : {json(), json("x"), json(3), json::array({1})}) read(other);
}

}  // namespace

TEST_SUITE("tools/run/host_wire") {
  TEST_CASE("what the leader orders reaches a host as it was, to the last bit of each number") {
    const auto order = order_from_json(json::parse(order_to_json(some_order()).dump()));
    REQUIRE_OK(order);
    const ckpt::RestoreChoice &got = order.value().choice, wanted = some_order().choice;
    CHECK(got.incarnation == wanted.incarnation);
    CHECK(got.source == wanted.source);
    CHECK(got.step == wanted.step);
    CHECK(got.slot == wanted.slot);
    CHECK(got.slot_incarnation == wanted.slot_incarnation);
    CHECK(got.dir == wanted.dir);
    CHECK(got.match.has_value());
    CHECK(got.foreign);
    CHECK(order.value().starts == some_order().starts);
    CHECK(order.value().promised == some_order().promised);
    CHECK(order.value().epoch == 7);
    CHECK(order.value().peers == some_order().peers);

    const Held held = held_from_json(json::parse(held_to_json({2, 24514, {{1, 8, 4}, {3, 8, 5}}}).dump()));
    CHECK(held.place == 2);
    CHECK(held.port == 24514);
    CHECK(held.whole == std::vector<ckpt::WholeSlot>{{1, 8, 4}, {3, 8, 5}});

    const ckpt::HostMemory memory{.incarnation = 9, .whole = {{0, 8, 4}, {2, 9, 5}}};
    const auto same = memory_from_json(json::parse(memory_to_json(memory).dump()));
    REQUIRE_OK(same);
    CHECK(same.value() == memory);

    const auto segment = segment_from_json(json::parse(segment_to_json(some_segment()).dump()));
    REQUIRE_OK(segment);
    CHECK(segment.value() == some_segment());

    agent::RankState rank{.rank = 5, .state = 'T'};
    rank.view.pid = 812;
    rank.view.step = 12;
    rank.view.phase = "optimizer";
    rank.view.description = "in dp[1,5]";
    rank.view.beside.inside = true;
    rank.view.beside.awaits = 1;
    rank.view.beside.text = "in dp[1,5].reduce";
    const std::vector<agent::RankState> states = states_from_json(json::parse(states_to_json({rank}).dump()));
    REQUIRE(states.size() == 1);
    CHECK(states[0].rank == 5);
    CHECK(states[0].state == 'T');
    CHECK(states[0].view.pid == 812);
    CHECK(states[0].view.step == 12);
    CHECK(states[0].view.phase == "optimizer");
    CHECK(states[0].view.description == "in dp[1,5]");
    CHECK_FALSE(states[0].view.inside);
    CHECK(states[0].view.beside.inside);
    CHECK(states[0].view.beside.awaits == 1);
    CHECK(states[0].view.beside.text == "in dp[1,5].reduce");
    const Published published{7, std::string("a\0b", 3), "\xff\x00"};
    CHECK(published_from_json(json::parse(published_to_json(published).dump())) == published);

    const agent::Failure failure{.rank = 3,
                                 .status = {.exit_code = 0, .signal = 9},
                                 .hang = true,
                                 .message = "m",
                                 .failure_class = agent::FailureClass::kOutOfMemory,
                                 .pid = 812,
                                 .seen_ns = int64_t{1} << 60,
                                 .last_lines = {"a", "b"}};
    const agent::Failure told = failure_from_json(failure_to_json(failure));
    CHECK(told.rank == 3);
    CHECK(told.status.signal == 9);
    CHECK(told.hang);
    CHECK(told.message == "m");
    CHECK(told.failure_class == agent::FailureClass::kOutOfMemory);
    CHECK(told.pid == 812);
    CHECK(told.seen_ns == int64_t{1} << 60);
    CHECK(told.last_lines == failure.last_lines);
    CHECK(failure_from_json({{"signal", 11}}).failure_class == agent::FailureClass::kCrash);  // by its status
    for (const ErrorCode code : {ErrorCode::kInvalidInput, ErrorCode::kNoSpace, ErrorCode::kGuard}) {
      const Error error = error_from_json({{"error", error_to_json({code, "why"})}});
      CHECK(error.code == code);
      CHECK(error.message == "why");
    }
  }

  TEST_CASE("messages that make no sense are errors, never a crash") {
    garble(held_to_json({2, 24514, {{1, 8, 4}}}), [](const json& from) {
      const Held held = held_from_json(from);
      CHECK(held.place >= -1);
      CHECK((held.port >= 0 && held.port < 65536));
    });
    garble(order_to_json(some_order()), [](const json& from) {
      const auto read = order_from_json(from);
      CHECK((!read.ok() || (read.value().choice.step >= 0 && read.value().choice.slot >= 0)));
    });
    garble(memory_to_json({.incarnation = 9, .whole = {{0, 8, 4}}}), [](const json& from) {
      const auto read = memory_from_json(from);
      for (const ckpt::WholeSlot& slot : read.ok() ? read.value().whole : std::vector<ckpt::WholeSlot>())
        CHECK((slot.slot >= 0 && slot.slot < ckpt::arena::kMaxSlots && slot.step >= 0));
    });
    garble(segment_to_json(some_segment()), [](const json& from) { static_cast<void>(segment_from_json(from).ok()); });
    garble(states_to_json({agent::RankState{.rank = 3}})[0],
           [](const json& from) { CHECK(states_from_json(json::array({from})).size() <= 1); });
    garble(published_to_json({1, "key", "value"}), [](const json& from) {
      const auto one = published_from_json(from);
      CHECK((!one || !one->key.empty()));
    });
    garble(failure_to_json({.rank = 3}), [](const json& from) { CHECK(failure_from_json(from).rank >= 0); });
    garble({{"error", error_to_json({ErrorCode::kIo, "why"})}},
           [](const json& from) { CHECK_FALSE(error_from_json(from).message.empty()); });
  }
}
