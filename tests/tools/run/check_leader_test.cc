// The rounds of a check of hosts, with hosts that answer as told: what each is asked, what its partner gets, and that
// hosts which say nothing, end or are lost hold nobody up.
#include <doctest/doctest.h>

#include <map>
#include <set>

#include "tools/run/check/check_leader.h"

using namespace cairn;
using namespace cairn::tools;
using hosts::Measure;
using hosts::Measured;
using nlohmann::json;

namespace {

/// Hosts 10, 11, ... of the caller's numbers.
class Hosts {
 public:
  explicit Hosts(int64_t count, double limit_s = 20, bool gpus = false) {
    std::vector<CheckedHost> hosts;
    for (int64_t k = 0; k < count; ++k)
      hosts.push_back({10 + k, "h" + std::to_string(k), "10.0.0." + std::to_string(k)});
    leader_ = std::make_unique<CheckLeader>(
        hosts, CheckOptions{.folder = "/shared", .gpus = gpus, .limit_s = limit_s, .grace_s = 0.05},
        [this](int64_t index, const hosts::Message& message) {
          said_.push_back({index, message});
        });
  }
  struct Said {
    int64_t index = 0;
    hosts::Message message;
    /// Null: it is no order.
    const Measure* order() const { return std::get_if<Measure>(&message); }
  };
  std::vector<Said> take() { return std::exchange(said_, {}); }
  CheckLeader& leader() { return *leader_; }

  /// As a host does that is well; `change` may make it another one, or nothing.
  using Change = std::function<bool(int64_t index, Measured&)>;
  void answer(const Said& said, const Change& change = nullptr) {
    const Measure* const order = said.order();
    if (order == nullptr) return;
    const auto tell = [&](auto what) {
      Measured body{order->round, std::move(what)};
      if (!change || change(said.index, body)) leader_->take(said.index, body);
    };
    if (order->alone) tell(Measured::Alone{10, 5, 100, "d"});
    if (order->gpus) tell(Measured::Gpus{{{{"index", 0}, {"pci", "0000:01:00.0"}}}, json::array()});
    if (order->partner) tell(Measured::Pair{*order->partner, 1, 90, 200, 0, 0});
    if (!order->reach) return;
    for (const int64_t host : *order->reach) tell(Measured::Reach{host, ""});
    tell(Measured::Reached{});
  }

 private:
  std::vector<Said> said_;
  std::unique_ptr<CheckLeader> leader_;
};

/// To its end; how many rounds have been ordered.
CheckReport run(Hosts& hosts, const Hosts::Change& change = nullptr) {
  while (!hosts.leader().tick()) {
    for (const Hosts::Said& said : hosts.take()) hosts.answer(said, change);
  }
  return hosts.leader().report();
}

}  // namespace

TEST_SUITE("tools/run/check_leader") {
  TEST_CASE("a check of hosts that are well orders each alone, then pairs, and finds nothing") {
    Hosts hosts(4);
    std::vector<Hosts::Said> first = hosts.take();
    REQUIRE(first.size() == 4);
    for (const Hosts::Said& said : first) {
      REQUIRE(said.order() != nullptr);
      CHECK(said.order()->alone == true);
      CHECK(said.order()->reach->size() == 3);
      CHECK(said.order()->folder == "/shared");
      hosts.answer(said);
    }
    CHECK(!hosts.leader().tick());
    std::map<int64_t, int64_t> partners;
    std::set<int64_t> ended;
    for (const Hosts::Said& said : hosts.take()) {
      if (std::holds_alternative<hosts::EndMeasure>(said.message)) ended.insert(said.index);
      if (said.order() != nullptr) partners[said.index] = said.order()->partner.value();
      hosts.answer(said);
    }
    CHECK(ended == std::set<int64_t>{10, 11, 12, 13});  // whoever was to be reached is told that it is over
    CHECK(partners == std::map<int64_t, int64_t>{{10, 1}, {11, 0}, {12, 3}, {13, 2}});
    CHECK(hosts.leader().tick());
    const CheckReport report = hosts.leader().report();
    CHECK(report.findings.empty());
    CHECK(report.rounds == 2);
    CHECK(report.figures.size() == 4);
    CHECK(to_json(report)["figures"][2]["host"] == "h2");
  }

  TEST_CASE("GPUs are asked for where they are wanted alone, told as they are, and a host whose GPUs hang is broken") {
    Hosts without(3);
    CHECK(run(without, [](int64_t, Measured& body) {
            CHECK_FALSE(std::holds_alternative<Measured::Gpus>(body.what));
            return true;
          }).findings.empty());
    Hosts well(3, 20, true);
    const CheckReport report = run(well);
    CHECK(report.findings.empty());
    CHECK(to_json(report)["figures"][1]["gpus"][0]["pci"] == "0000:01:00.0");
    Hosts ill(3, 20, true);
    const json told = to_json(run(ill, [](int64_t index, Measured& body) {
      if (auto* const all = std::get_if<Measured::Gpus>(&body.what)) {
        if (index == 11) all->gpus[0]["ecc_uncorrected"] = 1;
        if (index == 12) all->gpus[0]["not_measured"] = "it is in use";
      }
      return true;
    }));
    REQUIRE(told["findings"].size() == 1);
    CHECK(told["findings"][0]["kind"] == "gpu");
    CHECK(told["findings"][0]["host"] == "h1");
    CHECK(told["findings"][0]["gpu"] == json{{"index", 0}, {"uuid", ""}, {"pci", "0000:01:00.0"}});
    CHECK(told["findings"][0]["found"] == "1 uncorrected memory errors since the driver was loaded");
    CHECK(told["notes"] == json::array({"h2: GPU 0 (0000:01:00.0): not measured: it is in use"}));
    Hosts hangs(3, 0.02, true);
    const CheckReport late = run(
        hangs, [](int64_t index, Measured& body) { return index != 11 || !std::get_if<Measured::Gpus>(&body.what); });
    REQUIRE(late.findings.size() == 1);
    CHECK(finding_text(late.findings[0]).starts_with("h1 is broken: its GPUs: it has told nothing in "));
  }

  TEST_CASE("what a host publishes goes to its partner, or to all where each is to reach each") {
    Hosts hosts(4);
    uint64_t round = 0;
    for (const Hosts::Said& said : hosts.take()) round = static_cast<uint64_t>(said.order()->round);
    const auto receivers = [&](int64_t of) {
      hosts.leader().take(of, hosts::PutMeasured{round, "key", std::string("\0\xff", 2)});
      std::set<int64_t> out;
      for (const Hosts::Said& said : hosts.take()) out.insert(said.index);
      return out;
    };
    CHECK(receivers(11) == std::set<int64_t>{10, 12, 13});
    CHECK(receivers(99).empty());
    Hosts pairs(4);
    for (const Hosts::Said& said : pairs.take()) pairs.answer(said);
    CHECK(!pairs.leader().tick());
    for (const Hosts::Said& said : pairs.take()) {
      if (said.order() != nullptr) round = static_cast<uint64_t>(said.order()->round);
    }
    pairs.leader().take(11, hosts::PutMeasured{round, "key", "value"});
    pairs.leader().take(11, hosts::PutMeasured{round - 1, "key", "of another round"});
    std::vector<Hosts::Said> said = pairs.take();
    REQUIRE(said.size() == 1);
    CHECK(said[0].index == 10);
  }

  TEST_CASE("a host that says nothing is broken, and holds up nobody longer than the limit") {
    Hosts hosts(4, 0.05);
    const CheckReport report = run(hosts, [](int64_t index, Measured&) { return index != 12; });
    REQUIRE(report.findings.size() == 1);
    CHECK(report.findings[0].kind == CheckFinding::Kind::kHost);
    CHECK(report.findings[0].index == 12);
    CHECK(finding_text(report.findings[0]) == "h2 is broken: it has told nothing in 0 s");
  }

  TEST_CASE("a host that is lost, and one whose measuring crashes, are broken at once") {
    Hosts hosts(6);
    hosts.leader().lost(12, "closed the connection");
    std::vector<Hosts::Said> first = hosts.take();
    const auto crash = [&](const Hosts::Said& said) {
      const Measured::Ended ended{"was killed by signal 4 (Illegal instruction)"};
      hosts.leader().take(15, Measured{said.order()->round, ended});
    };
    const CheckReport report = [&] {
      for (const Hosts::Said& said : first) {
        if (said.index == 15) {
          crash(said);
        } else {
          hosts.answer(said);
        }
      }
      while (!hosts.leader().tick()) {
        for (const Hosts::Said& said : hosts.take()) {
          if (said.order() == nullptr) continue;
          if (said.index == 15) {
            crash(said);
          } else if (said.index != 12) {
            hosts.answer(said);
          }
        }
      }
      return hosts.leader().report();
    }();
    REQUIRE(report.findings.size() == 2);
    CHECK(report.findings[0].index == 12);
    CHECK(report.findings[0].why == "it was lost: closed the connection");
    CHECK(report.findings[1].index == 15);
    CHECK(report.findings[1].why == "was killed by signal 4 (Illegal instruction)");
  }

  TEST_CASE("a pair is as slow as the slower of its members says, and a cut in one direction is a cut") {
    Hosts hosts(4);
    const CheckReport report = run(hosts, [](int64_t index, Measured& body) {
      auto* const reach = std::get_if<Measured::Reach>(&body.what);
      if (index == 11 && reach != nullptr && reach->host == 2) reach->failed = "no route";
      return true;
    });
    // Measured again, the pair is well.
    CHECK(report.findings.empty());
    CHECK(report.rounds == 3);
    Hosts slow(4);
    const CheckReport of_slow = run(slow, [](int64_t index, Measured& body) {
      auto* const pair = std::get_if<Measured::Pair>(&body.what);
      if (index == 13 && pair != nullptr) pair->gb_s = 0.01;
      return true;
    });
    REQUIRE(of_slow.findings.size() == 1);
    CHECK(of_slow.findings[0].kind == CheckFinding::Kind::kSlowHost);
    CHECK(of_slow.findings[0].index == 13);
  }

  TEST_CASE(
      "a check ignores results of another round, of a host outside the check, and of work that it did not order") {
    Hosts hosts(2, 0.05);
    for (const Hosts::Said& said : hosts.take()) {
      hosts.leader().take(said.index, Measured{said.order()->round - 1, Measured::Ended{"of another round"}});
      hosts.leader().take(77, Measured{said.order()->round, Measured::Ended{"of no host"}});
      // This round has no partners, and asks for no GPUs.
      hosts.leader().take(said.index, Measured{said.order()->round, Measured::Pair{.partner = 1, .failed = "w"}});
      hosts.leader().take(said.index, Measured{said.order()->round, Measured::Gpus{json::array(), json()}});
      hosts.answer(said);
    }
    CHECK(!hosts.leader().take(10, hosts::Begin{}));
    CHECK(run(hosts).findings.empty());
  }
}
