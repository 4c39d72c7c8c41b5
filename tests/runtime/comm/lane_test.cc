#include "runtime/comm/lane.h"

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace cairn;
using namespace cairn::comm;

namespace {

/// A stream whose work comes later: it writes down what is marked and followed.
class LaterStream final : public Stream {
 public:
  struct Place final : Event {
    std::string name;
  };
  LaterStream(std::string name, std::vector<std::string>& log) : name_(std::move(name)), log_(log) {}
  Device device() const override { return {}; }
  std::unique_ptr<Stream> beside() const override { return std::make_unique<LaterStream>("lane", log_); }
  std::shared_ptr<const Event> mark() override {
    auto place = std::make_shared<Place>();
    place->name = name_ + std::to_string(++marks_);
    return place;
  }
  void follow(const std::shared_ptr<const Event>& event) override {
    log_.push_back(name_ + " behind " + static_cast<const Place&>(*event).name);
  }

 private:
  Status wait() override { return {}; }
  DevicePtr<const void> give_bytes(std::span<const std::byte>, DevicePtr<void>) override { return nullptr; }

  const std::string name_;
  std::vector<std::string>& log_;
  int marks_ = 0;
};

}  // namespace

TEST_SUITE("runtime/comm/lane") {
  TEST_CASE("jobs run in the order they came in, with a thread and without") {
    for (const bool threaded : {true, false}) {
      std::vector<int> ran;
      const std::unique_ptr<Stream> compute = make_cpu_stream();
      Lane lane(*compute, threaded);
      std::vector<Lane::Ticket> tickets;
      for (int k = 0; k < 100; ++k) {
        tickets.push_back(lane.submit([&ran, k] {
          ran.push_back(k);
          return Status{};
        }));
      }
      CHECK(lane.wait(0).ok());
      REQUIRE(lane.wait(tickets[49]).ok());
      if (!threaded) CHECK(ran.size() == 100);
      REQUIRE(lane.wait_all().ok());
      CHECK_FALSE(lane.busy());
      REQUIRE(ran.size() == 100);
      for (int k = 0; k < 100; ++k) CHECK(ran[k] == k);
    }
  }

  TEST_CASE("after an error no later job runs, and whoever waits gets the first") {
    for (const bool threaded : {true, false}) {
      int ran = 0;
      const std::unique_ptr<Stream> compute = make_cpu_stream();
      Lane lane(*compute, threaded);
      const Lane::Ticket good = lane.submit([&] { return ++ran, Status{}; });
      CHECK(lane.wait(good).ok());
      lane.submit([] { return Status(Error{ErrorCode::kPeerLost, "the first"}); });
      lane.submit([&] { return ++ran, Status(Error{ErrorCode::kInternal, "the second"}); });
      const Status status = lane.wait_all();
      REQUIRE_FALSE(status.ok());
      CHECK(status.error().message == "the first");
      CHECK(ran == 1);
      CHECK_FALSE(lane.busy());
    }
  }

  TEST_CASE("on streams whose work comes later a job stands between what was asked for before it and behind the wait") {
    for (const bool threaded : {true, false}) {
      std::vector<std::string> log;
      LaterStream compute("compute", log);
      Lane lane(compute, threaded);
      const auto job = [&log](const char* what) { return [&log, what] { return log.emplace_back(what), Status{}; }; };
      lane.submit(job("gather"));
      const Lane::Ticket second = lane.submit(job("reduce"));
      REQUIRE(lane.wait(second).ok());
      CHECK(log == std::vector<std::string>{"lane behind compute1", "gather", "lane behind compute2", "reduce",
                                            "compute behind lane2"});
    }
  }

  TEST_CASE("who waits for a job comes behind it, not behind what was submitted later, and behind none twice") {
    std::vector<std::string> log;
    LaterStream compute("compute", log);
    Lane lane(compute, false);
    std::vector<Lane::Ticket> tickets;
    for (int k = 0; k < 4; ++k) tickets.push_back(lane.submit([] { return Status{}; }));
    log.clear();
    REQUIRE(lane.wait(tickets[1]).ok());
    REQUIRE(lane.wait(tickets[0]).ok());
    REQUIRE(lane.wait(tickets[2]).ok());
    REQUIRE(lane.wait_all().ok());
    REQUIRE(lane.wait_all().ok());
    CHECK(log == std::vector<std::string>{"compute behind lane2", "compute behind lane3", "compute behind lane4"});
  }
}
