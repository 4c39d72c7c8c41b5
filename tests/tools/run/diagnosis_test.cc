// What hosts have cost a run, who is let in no more, and how the cause of an end is told to programs.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "tools/run/folder/excluded.h"
#include "tools/run/folder/failure_record.h"
#include "tools/run/folder/folder.h"
#include "tools/run/hosts/host_record.h"

using namespace cairn;
using namespace cairn::tools;
using agent::FailureClass;
using agent::Restart;
using cairn::testing::TempDir;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

agent::Failure failure_of(FailureClass which) { return {.rank = 5, .failure_class = which}; }

class Environment {
 public:
  Environment(const char* name, const fs::path& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Environment() { ::unsetenv(name_); }

 private:
  const char* name_;
};

}  // namespace

TEST_SUITE("tools/run/diagnosis") {
  TEST_CASE("a host whose ranks fail three times in ten minutes gives its place to a spare") {
    HostRecord record;
    const agent::Failure crash = failure_of(FailureClass::kCrash);
    CHECK(record.judge(2, crash, 0, 0, true) == Restart::kInPlace);
    CHECK(record.judge(1, crash, 0, 10, true) == Restart::kInPlace);  // another host
    CHECK(record.judge(2, crash, 7, 20, true) == Restart::kInPlace);
    CHECK(record.judge(2, crash, 9, 30, true) == Restart::kElsewhere);
    CHECK(record.reason() == "3 failures of its ranks in 10 min without progress, the last: a crash");
    record.progress();
    CHECK(record.judge(2, crash, 0, 40, true) == Restart::kInPlace);
    CHECK(record.judge(2, crash, 7, 50, true) == Restart::kInPlace);
    CHECK(record.judge(2, crash, 9, 700, true) == Restart::kInPlace);  // the first two are too long ago
  }

  TEST_CASE("no host leaves for a crash that comes back behind the same step, for it is the program's") {
    HostRecord record;
    const agent::Failure crash = failure_of(FailureClass::kCrash);
    for (int k = 0; k < 9; ++k) CHECK(record.judge(2, crash, 40 + k % 2, k, true) == Restart::kInPlace);
    CHECK(record.judge(2, crash, 44, 9, true) == Restart::kElsewhere);
    HostRecord hung;
    for (int k = 0; k < 2; ++k) CHECK(hung.judge(2, crash, 40, k, true) == Restart::kInPlace);
    CHECK(hung.judge(2, failure_of(FailureClass::kHang), 40, 9, true) == Restart::kElsewhere);  // another class
    HostRecord stuck;  // a link that hangs does so behind the same step, too
    for (int k = 0; k < 2; ++k)
      CHECK(stuck.judge(2, failure_of(FailureClass::kHang), 40, k, true) == Restart::kInPlace);
    CHECK(stuck.judge(2, failure_of(FailureClass::kHang), 40, 2, true) == Restart::kElsewhere);
  }

  TEST_CASE("without a spare ranks start again where they are, and symptoms count for no host") {
    HostRecord record;
    for (int k = 0; k < 5; ++k)
      CHECK(record.judge(2, failure_of(FailureClass::kKilled), 0, k, false) == Restart::kInPlace);
    for (int k = 0; k < 5; ++k)
      CHECK(record.judge(1, failure_of(FailureClass::kSymptom), 0, k, true) == Restart::kInPlace);
    CHECK(record.judge(1, failure_of(FailureClass::kCrash), 0, 9, true) == Restart::kInPlace);
  }

  TEST_CASE("classes have their remedies: lack of memory once in place, devices never, a full disk moves once") {
    HostRecord record;
    CHECK(record.judge(2, failure_of(FailureClass::kOutOfMemory), 0, 0, true) == Restart::kInPlace);
    CHECK(record.judge(3, failure_of(FailureClass::kOutOfMemory), 0, 1, true) == Restart::kInPlace);
    CHECK(record.judge(2, failure_of(FailureClass::kOutOfMemory), 0, 2, true) == Restart::kElsewhere);
    CHECK(record.reason() == "out of memory");
    CHECK(record.judge(3, failure_of(FailureClass::kOutOfMemory), 0, 3, false) == Restart::kInPlace);
    CHECK(record.judge(0, failure_of(FailureClass::kDevice), 0, 4, true) == Restart::kElsewhere);
    CHECK(record.judge(0, failure_of(FailureClass::kDevice), 0, 5, false) == Restart::kEnd);
    CHECK(record.judge(0, failure_of(FailureClass::kHostSetup), 0, 6, true) == Restart::kElsewhere);
    CHECK(record.judge(0, failure_of(FailureClass::kDisk), 0, 7, true) == Restart::kElsewhere);
    CHECK(record.judge(1, failure_of(FailureClass::kDisk), 0, 8, true) == Restart::kEnd);
    CHECK(record.judge(1, failure_of(FailureClass::kGuard), 0, 9, true) == Restart::kEnd);
    CHECK(record.judge(1, failure_of(FailureClass::kAskedToGo), 0, 10, true) == Restart::kLeave);
  }

  TEST_CASE("an excluded host is known by name and boot, and a damaged file is refused and kept") {
    const TempDir dir("excluded");
    fs::create_directories(dir.path / "cluster");
    CHECK(read_excluded(dir.path).value().empty());
    const Exclusion h2{.name = "h2",
                       .boot_id = "b1",
                       .index = 2,
                       .reason = "a device is broken",
                       .failure_class = FailureClass::kDevice,
                       .time = 12.5,
                       .epoch = 3};
    REQUIRE_OK(add_excluded(dir.path, h2));
    REQUIRE_OK(add_excluded(dir.path, {.name = "h3", .boot_id = "b", .reason = "r"}));
    REQUIRE(read_excluded(dir.path).value().size() == 2);
    CHECK(read_excluded(dir.path).value()[0] == h2);
    CHECK(why_excluded(read_excluded(dir.path).value(), "h2", "b1").find("a device is broken") != std::string::npos);
    CHECK(why_excluded(read_excluded(dir.path).value(), "h2", "b2").empty());  // it has booted since
    CHECK(why_excluded(read_excluded(dir.path).value(), "h1", "b1").empty());
    REQUIRE_OK(add_excluded(dir.path, {.name = "h2", .boot_id = "b2", .reason = "again"}));
    CHECK(read_excluded(dir.path).value().size() == 2);
    for (const std::string text : {"", "{", "[]", R"({"hosts": 1})", R"({"hosts": [{"name": 3, "boot_id": "b"}]})",
                                   R"({"hosts": [{"name": "h2"}]})", R"({"schema": 2, "hosts": []})"}) {
      CAPTURE(text);
      REQUIRE_OK(write_text_file(dir.path / "cluster" / "excluded.json", text));
      const auto refused = read_excluded(dir.path);
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().code == ErrorCode::kCorrupt);
      CHECK(refused.error().message.find("excluded.json: ") != std::string::npos);
      CHECK_FALSE(add_excluded(dir.path, h2).ok());
      CHECK(read_text_file(dir.path / "cluster" / "excluded.json").value() == text);
    }
  }

  TEST_CASE("a failure is written for programs, with what came after it") {
    const TempDir dir("failure");
    agent::Failure failure{.generation = 2,
                           .rank = 5,
                           .status = {.signal = 9},
                           .message = "rank 5 (pid 7) was killed",
                           .failure_class = FailureClass::kOutOfMemory,
                           .seen_ns = 1'000'000'000,
                           .host_name = "h2",
                           .last_lines = {"a", "b"}};
    failure.others = {
        {.rank = 1, .failure_class = FailureClass::kSymptom, .seen_ns = 1'002'500'000, .host_name = "h0"}};
    REQUIRE_OK(write_failure(dir.path, failure_record(failure, 1.5e9)));
    const json read = json::parse(read_text_file(dir.path / "failure.json").value());
    CHECK(read.at("host") == "h2");
    CHECK(read.at("rank") == 5);
    CHECK(read.at("class") == "out_of_memory");
    CHECK(read.at("fault") == "host");
    CHECK(read.at("exit") == 137);
    CHECK(read.at("last_lines") == json({"a", "b"}));
    CHECK(read.at("first_seen") == 1.5e9);
    REQUIRE(read.at("others").size() == 1);
    CHECK(read.at("others")[0].at("after_ms") == doctest::Approx(2.5));
    CHECK(read.at("others")[0].at("class") == "symptom");
    CHECK(read.at("earlier") == json::array());

    failure.rank = 6;
    for (size_t k = 0; k < kMostEarlier + 2; ++k)
      REQUIRE_OK(write_failure(dir.path, failure_record(failure, 2e9 + static_cast<double>(k))));
    const json all = json::parse(read_text_file(dir.path / "failure.json").value()).at("earlier");
    REQUIRE(all.size() == kMostEarlier);
    CHECK(all.front().at("first_seen") == 2e9 + 1);
    CHECK(all.back() == json({{"host", "h2"},
                              {"rank", 6},
                              {"class", "out_of_memory"},
                              {"first_seen", 2e9 + 100},
                              {"message", "rank 5 (pid 7) was killed"},
                              {"step", nullptr}}));
  }

  TEST_CASE("launchers find the reason of an end where they said that they look") {
    const TempDir dir("launcher");
    const Environment log("CAIRN_TERMINATION_LOG", dir.path / "termination-log");
    const Environment error("TORCHELASTIC_ERROR_FILE", dir.path / "error.json");
    json record{
        {"host", "h2"}, {"rank", 5}, {"class", "device"}, {"message", std::string(5000, 'x')}, {"first_seen", 17.9}};
    tell_launcher(record, 139);
    CHECK_FALSE(fs::exists(dir.path / "termination-log"));  // it is never made
    std::ofstream(dir.path / "termination-log") << "of before";
    tell_launcher(record, 139);
    const std::string text = read_text_file(dir.path / "termination-log").value();
    CHECK(text.starts_with("device on h2, rank 5: xxx"));
    CHECK(text.size() == 4096);
    const json file = json::parse(read_text_file(dir.path / "error.json").value());
    CHECK(file.at("message").at("errorCode") == 139);
    CHECK(file.at("message").at("extraInfo").at("timestamp") == "17");
    tell_launcher({{"message", "bad recipe"}}, 2);
    CHECK(read_text_file(dir.path / "termination-log").value() == "bad recipe");
  }
}
