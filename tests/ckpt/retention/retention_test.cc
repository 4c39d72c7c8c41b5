#include "ckpt/retention/retention.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <exception>
#include <thread>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/replace.h"
#include "ckpt/retention/space.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/core/random.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/ck";
const WriterId kWriter{"test", 1, 1, 9};

std::vector<TensorSpec> one_tensor() { return {{"a", "weight", DType::kF32, {30}, 1}}; }

void add_step(IoBackend& io, int64_t step) {
  REQUIRE(save(io, kDir, make_state(step, static_cast<uint64_t>(step), 1, one_tensor())).ok());
}

std::vector<int64_t> complete_steps(IoBackend& io) {
  std::vector<int64_t> steps;
  const Catalog catalog = list_checkpoints(io, kDir).value();
  for (const CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete) steps.push_back(info.step);
  }
  return steps;
}

void damage(MemoryBackend& disk, int64_t step) {
  disk.bytes_of(kDir / step_dir_name(step) / "manifest.json")[200] ^= std::byte{1};
}

}  // namespace

TEST_SUITE("ckpt/retention/catalog") {
  TEST_CASE("an empty or missing folder is an empty catalog") {
    MemoryBackend disk;
    CHECK(list_checkpoints(disk, kDir).value().checkpoints.empty());
    CHECK(newest_complete(disk, kDir).error().code == ErrorCode::kInvalidInput);
  }

  TEST_CASE("complete, damaged, unfinished and foreign entries are told apart") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20, 30, 40}) add_step(disk, step);
    damage(disk, 40);
    disk.bytes_of(kDir / "step-00000030" / shard_file_name(0, 1)).pop_back();
    REQUIRE(disk.make_dir(kDir / ".tmp-step-00000050.h.1.2.3").ok());
    REQUIRE(disk.make_dir(kDir / ".trash-step-00000005.h.1.2.3").ok());
    REQUIRE(disk.make_dir(kDir / "step-60").ok());
    REQUIRE(write_file(disk, kDir / "step-00000070", "a file").ok());
    const Catalog catalog = list_checkpoints(disk, kDir).value();
    REQUIRE(catalog.checkpoints.size() == 4);
    CHECK(complete_steps(disk) == std::vector<int64_t>{10, 20});
    CHECK(catalog.checkpoints[2].problem.find("the manifest has") != std::string::npos);
    CHECK(catalog.checkpoints[3].problem.find("manifest.json") != std::string::npos);
    CHECK(catalog.checkpoints[1].created_unix_ms == 1'700'000'000'020);
    CHECK(catalog.checkpoints[1].size_bytes > 1000);
    CHECK(catalog.leftovers.size() == 2);
    CHECK(catalog.unknown == std::vector<std::string>{"step-00000070", "step-60"});
    CHECK(newest_complete(disk, kDir).value().step == 20);
    damage(disk, 10);
    damage(disk, 20);
    const std::string message = newest_complete(disk, kDir).error().message;
    for (const char* step : {"step 10", "step 20", "step 30", "step 40"})
      CHECK_MESSAGE(message.find(step) != std::string::npos, message);
  }

  TEST_CASE("listing again decodes only what has changed, and sees every change") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20, 30}) add_step(disk, step);
    CatalogCache cache;
    const auto complete = [&] {
      std::vector<int64_t> steps;
      for (const CheckpointInfo& info : list_checkpoints(disk, kDir, &cache).value().checkpoints) {
        const CheckpointInfo fresh = look_at_checkpoint(disk, kDir, info.step);
        CHECK((fresh.size_bytes == info.size_bytes && fresh.created_unix_ms == info.created_unix_ms &&
               fresh.problem == info.problem && fresh.dir == info.dir && fresh.step == info.step));
        if (info.complete) steps.push_back(info.step);
      }
      return steps;
    };
    CHECK(complete() == std::vector<int64_t>{10, 20, 30});
    CHECK(cache.decoded() == 3);
    CHECK(complete() == std::vector<int64_t>{10, 20, 30});
    CHECK(cache.decoded() == 3);
    damage(disk, 20);  // same size, one bit
    CHECK(complete() == std::vector<int64_t>{10, 30});
    damage(disk, 20);
    const std::string file = shard_file_name(0, 1);
    disk.bytes_of(kDir / "step-00000030" / file).pop_back();
    CHECK(complete() == std::vector<int64_t>{10, 20});
    CHECK(cache.decoded() == 3);
    REQUIRE(remove_checkpoint(disk, kDir, 10, kWriter).ok());
    REQUIRE(save(disk, kDir, make_state(10, 77, 2, one_tensor())).ok());  // another one under the same name
    CHECK(complete() == std::vector<int64_t>{10, 20});
    CHECK(cache.decoded() == 4);
  }

  TEST_CASE("an unreadable checkpoint is not called damaged: nothing goes for it, and no older one is taken") {
    for (const int os_errno : {EIO, EMFILE, EACCES}) {
      for (int64_t n = 0;; ++n) {
        MemoryBackend disk;
        for (const int64_t step : {10, 20, 30, 40}) add_step(disk, step);
        FaultBackend reading(disk, FaultPlan::fail_call(n, os_errno));
        const Result<CheckpointInfo> newest = newest_complete(reading, kDir);
        CHECK((!newest.ok() || newest.value().step == 40));
        if (!newest.ok()) CHECK(newest.error().os_errno == os_errno);
        FaultBackend removing(disk, FaultPlan::fail_call(n, os_errno));
        const RetentionPolicy policy = retention_policy(parse_keep("last(1), every(20)").value(), 40);
        const Result<RetentionReport> done = apply_retention(removing, kDir, policy, kWriter);
        const std::vector<int64_t> left = complete_steps(disk);
        for (const int64_t step : {20, 40}) CHECK(std::count(left.begin(), left.end(), step) == 1);
        if (!removing.fired()) {
          CHECK(left == std::vector<int64_t>{20, 40});
          break;
        }
      }
    }
  }

  TEST_CASE("a checkpoint of a newer build is not called damaged") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20, 30}) add_step(disk, step);
    for (const int64_t step : {10, 30}) {
      std::vector<std::byte>& bytes = disk.bytes_of(kDir / step_dir_name(step) / "manifest.json");
      const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      bytes[text.find("\"version\":1") + 10] = std::byte{'2'};
    }
    REQUIRE(apply_retention(disk, kDir, {.keep_last = 1}, kWriter).value().removed.empty());
    CHECK(list_checkpoints(disk, kDir).value().checkpoints.size() == 3);
    const Error error = newest_complete(disk, kDir).error();
    CHECK(error.code == ErrorCode::kUnsupported);
    CHECK_MESSAGE(error.message.find("step 30") != std::string::npos, error.message);
  }

  TEST_CASE("a directory under another step's name is not complete") {
    MemoryBackend disk;
    add_step(disk, 10);
    REQUIRE(disk.rename(kDir / "step-00000010", kDir / "step-00000011").ok());
    CHECK(complete_steps(disk).empty());
  }
}

TEST_SUITE("ckpt/retention/policy") {
  TEST_CASE("each rule keeps what its name says, and rules add up") {
    // Saved every 10 steps and every 10 minutes, from midnight; one loss a step, a validation loss every 40 steps.
    std::vector<CheckpointInfo> all;
    for (int64_t k = 1; k <= 30; ++k) {
      CheckpointInfo info{.step = 10 * k, .complete = true, .created_unix_ms = 600'000 * k};
      info.metrics["loss"] = k == 7 ? 0.5 : k == 3 ? std::nan("") : 10.0 - 0.1 * static_cast<double>(k);
      if (k % 4 == 0) info.metrics["valid_loss"] = std::abs(static_cast<double>(k) - 11.5);
      all.push_back(info);
    }
    const auto stay = [&](const char* rules, int64_t run_steps = 300) {
      const RetentionPolicy policy = retention_policy(parse_keep(rules).value(), run_steps);
      const Result<std::vector<Fate>> fates = plan_retention(all, policy);
      REQUIRE_OK(fates);
      std::vector<int64_t> out;
      for (const Fate& fate : fates.value()) {
        if (fate.stays) out.push_back(fate.step);
      }
      return out;
    };
    using Steps = std::vector<int64_t>;
    CHECK(stay("last(1)") == Steps{300});
    CHECK(stay("last(3)") == Steps{280, 290, 300});
    CHECK(stay("every(100)") == Steps{100, 200, 300});
    CHECK(stay("every(75)") == Steps{80, 150, 230, 300});  // the first at or behind each multiple
    CHECK(stay("every(1h)") == Steps{10, 60, 120, 180, 240, 300});
    CHECK(stay("every(1d)") == Steps{10, 300});
    CHECK(stay("every(1e-300s)").size() == all.size());
    CHECK(stay("at(1, 95, 120, 9999)") == Steps{10, 100, 120, 300});
    CHECK(stay("best(loss, 1)") == Steps{70, 300});
    CHECK(stay("best(loss, 3)") == Steps{70, 290, 300});
    CHECK(stay("best(valid_loss)") == Steps{120, 300});
    CHECK(stay("best(valid_loss, 2)") == Steps{80, 120, 300});
    CHECK(stay("within(30min)") == Steps{270, 280, 290, 300});
    CHECK(stay("fractions(4)") == Steps{80, 150, 230, 300});
    CHECK(stay("fractions(4)", 1200) == Steps{300});  // the run is a quarter done
    CHECK(stay("last(2), every(100), best(loss, 1) + within(10min)") == Steps{70, 100, 200, 290, 300});
    // Applied after each save, as a run does it, the same ones stay as when applied once at the end. (Not so for best:
    // what was not among the best when it was removed cannot become one of them later, and nothing removed comes back.)
    for (const char* rules : {"last(2), every(100)", "every(75), at(42)", "every(1h), last(1)", "fractions(7)",
                              "best(loss, 2)", "best(valid_loss, 3)", "within(25min), every(90)"}) {
      const RetentionPolicy policy = retention_policy(parse_keep(rules).value(), 300);
      std::vector<CheckpointInfo> there;
      for (const CheckpointInfo& info : all) {
        there.push_back(info);
        const std::vector<Fate> fates = plan_retention(there, policy).value();
        std::vector<CheckpointInfo> left;
        for (size_t k = 0; k < there.size(); ++k) {
          if (fates[k].stays) left.push_back(there[k]);
        }
        there = left;
      }
      Steps left;
      for (const CheckpointInfo& info : there) left.push_back(info.step);
      CAPTURE(rules);
      CHECK(left == stay(rules));
    }
  }

  TEST_CASE("a clock that was wrong once does not take what is as young as a rule in time says") {
    constexpr int64_t kMinute = 60'000, kHour = 60 * kMinute;
    std::vector<CheckpointInfo> all;
    for (int64_t k = 1; k <= 30; ++k)
      all.push_back({.step = 10 * k, .complete = true, .created_unix_ms = 10 * k * kMinute});
    const auto stay = [&]() {
      std::vector<int64_t> out;
      for (const Fate& fate : plan_retention(all, retention_policy(parse_keep("within(30min)").value(), 0)).value()) {
        if (fate.stays) out.push_back(fate.step);
      }
      return out;
    };
    all[4].created_unix_ms += 8 * kHour;  // set back behind step 50
    CHECK(stay() == std::vector<int64_t>{50, 270, 280, 290, 300});
    all[4].created_unix_ms -= 16 * kHour;  // set forward
    CHECK(stay() == std::vector<int64_t>{270, 280, 290, 300});
  }

  TEST_CASE("a step that a kept checkpoint refers to stays, over any number of hops, damaged or not") {
    std::vector<CheckpointInfo> all;
    for (int64_t step = 1; step <= 8; ++step) all.push_back({.step = step, .complete = step != 2});
    all[7].references = {5};
    all[4].references = {2, 3};
    all[5].references = {4};  // of one that goes: goes with it
    const std::vector<Fate> fates = plan_retention(all, {}).value();
    std::vector<int64_t> left;
    for (const Fate& fate : fates) {
      if (fate.stays) left.push_back(fate.step);
    }
    CHECK(left == std::vector<int64_t>{2, 3, 5, 8});
    CHECK(fates[1].why == "a kept one refers to it");
    CHECK(referenced_steps(all, {6}) == std::set<int64_t>{4});
  }

  TEST_CASE("steps that a person names go, and no others; what must stay is named") {
    std::vector<CheckpointInfo> all;
    for (int64_t step = 1; step <= 6; ++step) all.push_back({.step = step, .complete = step != 2 && step != 5});
    all[4].unread = true;
    all[4].problem = "a newer build's";
    all[3].references = {1, 3};
    const auto refused = [&](const std::set<int64_t>& steps) { return plan_removal(all, steps).error().message; };
    CHECK(refused({2, 3}).find("step 3 stays, for step 4 refers to its files") == 0);
    CHECK(refused({5}) == "step 5 stays, for it cannot be read: a newer build's");
    CHECK(refused({4, 6}).find("step 6 stays, for it is the newest complete one") == 0);
    std::vector<int64_t> gone;
    for (const Fate& fate : plan_removal(all, {1, 2, 3, 4}).value()) {
      if (!fate.stays) gone.push_back(fate.step);
    }
    CHECK(gone == std::vector<int64_t>{1, 2, 3, 4});
    for (CheckpointInfo& info : all) info.complete = false;
    CHECK(refused({2}).find("no checkpoint is complete") == 0);
  }

  TEST_CASE("rules as text: what is read is what is written, and mistakes say what is accepted") {
    const char* text =
        "last(3), every(1000), every(1d), best(valid_loss, 2), at(100, 85000), within(2h), fractions(10)";
    std::string again;
    for (const Keep& rule : parse_keep(text).value()) again += (again.empty() ? "" : ", ") + to_text(rule);
    CHECK(again == text);
    CHECK(to_text(parse_keep(" every( 90min ) ").value()[0]) == "every(90min)");
    for (const char* wrong : {"",
                              "last",
                              "last()",
                              "last(0)",
                              "last(-1)",
                              "last(1.5)",
                              "last(3",
                              "last)3(",
                              "every(3x)",
                              "every(0h)",
                              "best(acc)",
                              "best(loss, 2, 3)",
                              "best()",
                              "at()",
                              "at(1,)",
                              "within(3)",
                              "fractions(0)",
                              "keep(3)",
                              "last(3) every(4)",
                              "last(3),",
                              "last(99999999999999999999)",
                              "every(nan h)",
                              "within(infs)"}) {
      CAPTURE(wrong);
      const Result<std::vector<Keep>> rules = parse_keep(wrong);
      REQUIRE_FALSE(rules.ok());
      CHECK(rules.error().code == ErrorCode::kInvalidInput);
    }
    CHECK(
        parse_keep("last(3), evry(4)").error().message.find("\"evry(4)\" is no rule of retention; there are last(n)") ==
        0);
    const std::vector<CheckpointInfo> one{{.step = 1, .complete = true}};
    for (const Keep& rule :
         {Keep{.kind = Keep::Kind::kEvery}, Keep{.kind = Keep::Kind::kWithin}, Keep{.kind = Keep::Kind::kBest},
          Keep{.kind = Keep::Kind::kAt}, Keep{.kind = Keep::Kind::kFractions, .count = 3}}) {
      CHECK(plan_retention(one, retention_policy({rule}, 0)).error().code == ErrorCode::kInvalidInput);
    }
  }

  TEST_CASE("how many lie there at once is what a run of that length leaves") {
    const auto at_once = [](std::vector<Every> save, const char* rules, int64_t steps) {
      CheckpointConfig config{.save = std::move(save)};
      if (*rules != 0) config.keep = parse_keep(rules).value();
      const KeptAtOnce out = kept_at_once(config, steps);
      return std::pair(out.at_least, out.at_most);
    };
    using Pair = std::pair<int64_t, int64_t>;
    const std::vector<Every> tens{{.steps = 10}};
    CHECK(at_once(tens, "", 100) == Pair{10, 10});
    CHECK(at_once(tens, "", 105) == Pair{11, 11});
    CHECK(at_once(tens, "last(3)", 1000) == Pair{5, 5});  // and the newest good one, and the candidate
    CHECK(at_once(tens, "last(3), every(100)", 1000) == Pair{14, 14});
    CHECK(at_once(tens, "last(3), best(loss, 2)", 1000) == Pair{5, 7});
    CHECK(at_once(tens, "last(3), every(1d)", 1000) == Pair{5, 100});
    CHECK(at_once({{.seconds = 600}}, "", 1000) == Pair{1, -1});
    CHECK(at_once({{.seconds = 600}}, "last(3)", 1000) == Pair{1, 5});
    CHECK(at_once({{.steps = 1}}, "last(2), fractions(10)", 1'000'000'000) == Pair{5, 5});
    CHECK(at_once({{.steps = 500}}, "last(1)", 1000) == Pair{2, 2});  // far apart: the one before is good
    CHECK(at_once(tens, "last(10)", 1000) == Pair{10, 12});           // they are among these
    const std::vector<int64_t> present{10, 20, 500};
    CHECK(kept_at_once({.save = tens}, 540, present).at_least == 7);
    CHECK(kept_at_once({.save = tens}, 500, present).at_least == 3);
  }
}

TEST_SUITE("ckpt/retention/space") {
  TEST_CASE("a disk too small for what will lie there is told before anything is written, in numbers") {
    constexpr int64_t kMiB = 1 << 20, kLarge = 1 << 30;
    const auto report_with_free = [](int64_t free_bytes, const fs::path& dir = kDir) {
      int64_t used = 0;
      for (const bool measured : {false, true}) {
        MemoryBackend disk(measured ? used + free_bytes : kLarge);
        for (const int64_t step : {10, 20}) add_step(disk, step);
        used = kLarge - disk.free_bytes(kDir).value();
        if (measured) return check_space(disk, dir, {.checkpoint_bytes = 100 * kMiB, .kept = {3, 3}}).value();
      }
      return SpaceReport{};
    };
    const int64_t present = report_with_free(kLarge).present_bytes;
    CHECK(present > 1000);
    CHECK(report_with_free(400 * kMiB).missing_bytes == 0);
    CHECK(report_with_free(400 * kMiB - present).missing_bytes == 0);  // what is there counts
    CHECK(report_with_free(400 * kMiB - present - 1).missing_bytes == 1);
    const SpaceReport report = report_with_free(100 * kMiB);
    CHECK(report.missing_bytes == 300 * kMiB - present);
    CHECK_MESSAGE(report.text.find("/ck: 3 kept + 1 being written, 100.0 MiB each, are 400.0 MiB; ") == 0, report.text);
    CHECK_MESSAGE(report.text.find(" are there and 100.0 MiB are free: 300.0 MiB are missing. ") != std::string::npos,
                  report.text);
    // What a dead save has left goes before the first one, and all spare files; trash may be put back.
    MemoryBackend disk(500 * kMiB);
    char host[256] = {};
    REQUIRE(::gethostname(host, sizeof(host) - 1) == 0);
    for (const std::string_view prefix : {kTmpPrefix, kTrashPrefix, kSparePrefix}) {
      for (const int64_t start : {int64_t{1}, this_writer().start}) {
        const int64_t step = prefix == kTrashPrefix ? 11 : 10;  // of one step they were a replacement cut off
        const fs::path left = kDir / work_dir_name(prefix, step, {host, ::getpid(), start, start == 1});
        REQUIRE(make_dirs(disk, left).ok());
        REQUIRE(write_file(disk, left / "shard", std::string(50 * kMiB, 'x')).ok());
      }
    }
    CHECK(check_space(disk, kDir, {.checkpoint_bytes = 100 * kMiB, .kept = {2, 2}}).value().free_bytes == 350 * kMiB);
    {  // what reserved nothing has nothing to give back
      const TempDir dir("sparse");
      PosixBackend io;
      const fs::path left = dir / work_dir_name(kTmpPrefix, 10, {host, ::getpid(), 1, 1});
      REQUIRE(make_dirs(io, left).ok());
      REQUIRE(write_file(io, left / "shard", "x").ok());
      REQUIRE(::truncate((left / "shard").c_str(), int64_t{1} << 40) == 0);
      const int64_t free = check_space(io, dir.path, {.checkpoint_bytes = 1, .kept = {1, 1}}).value().free_bytes;
      CHECK(free < io.free_bytes(dir.path).value() + kLarge);
    }
    // What is another host's may be of a save at work: named, not counted.
    const fs::path left = kDir / work_dir_name(kTmpPrefix, 12, {"another-host", 1, 1, 0});
    REQUIRE(disk.make_dir(left).ok());
    REQUIRE(write_file(disk, left / "shard", std::string(60 * kMiB, 'x')).ok());
    const SpaceReport shared = check_space(disk, kDir, {.checkpoint_bytes = 200 * kMiB, .kept = {2, 2}}).value();
    CHECK(shared.free_bytes == 290 * kMiB);
    CHECK_MESSAGE(shared.text.find("60.0 MiB lie in saves of other hosts: if those writers are gone, `cairn ckpt prune "
                                   "--leftovers --other-hosts --yes` frees them. ") != std::string::npos,
                  shared.text);
    CHECK(report.text.find("other hosts") == std::string::npos);
    const SpaceReport elsewhere = report_with_free(100 * kMiB, "/ck/not/there/yet");
    CHECK(elsewhere.free_bytes == 100 * kMiB);
    CHECK(elsewhere.missing_bytes == 300 * kMiB);
  }
}

TEST_SUITE("ckpt/retention/retention") {
  TEST_CASE("the last n complete ones stay, whatever is damaged, and steps that are asked for") {
    MemoryBackend disk;
    for (int64_t step = 10; step <= 70; step += 10) add_step(disk, step);
    damage(disk, 20);  // older than all that stay: goes
    damage(disk, 50);  // in between: stays, it does not count
    damage(disk, 70);  // newest of all, damaged: stays, is never the one that counts
    const RetentionReport report = apply_retention(disk, kDir, {2, {10}}, kWriter).value();
    CHECK(report.problems.empty());
    CHECK(report.removed == std::vector<int64_t>{20, 30});
    CHECK(complete_steps(disk) == std::vector<int64_t>{10, 40, 60});
    CHECK(list_checkpoints(disk, kDir).value().checkpoints.size() == 5);
    CHECK(apply_retention(disk, kDir, {0, {}}, kWriter).error().code == ErrorCode::kInvalidInput);
    CHECK(apply_retention(disk, kDir, {1, {}}, kWriter).value().removed == std::vector<int64_t>{10, 40, 50});
    CHECK(complete_steps(disk) == std::vector<int64_t>{60});
    damage(disk, 60);
    CHECK(apply_retention(disk, kDir, {1, {}}, kWriter).value().removed.empty());
  }

  TEST_CASE("a removal killed at any call, then power loss: the kept ones are whole, the others whole or not there") {
    MemoryBackend start;
    for (int64_t step = 10; step <= 40; step += 10) add_step(start, step);
    bool fired[] = {true, true};  // by rules, by name
    int64_t calls[] = {0, 0};
    for (int64_t k = 0; fired[0] || fired[1]; ++k) {
      const int64_t n = k / 2;
      const bool by_name = k % 2 == 1;
      if (!fired[by_name]) continue;
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n));
      const Result<RetentionReport> report =
          by_name ? remove_steps(io, kDir, {10, 20}, kWriter) : apply_retention(io, kDir, {2, {}}, kWriter);
      fired[by_name] = io.fired();
      calls[by_name] = n;
      CAPTURE(by_name);
      for (uint64_t seed = 0; seed < 16; ++seed) {
        const auto after = disk->clone();
        after->power_cycle(seed);
        CAPTURE(n);
        CAPTURE(seed);
        const Catalog catalog = list_checkpoints(*after, kDir).value();
        int64_t kept = 0;
        for (const CheckpointInfo& info : catalog.checkpoints) {
          REQUIRE_MESSAGE(info.complete, info.problem);
          REQUIRE(compare(*after, info.dir, make_state(info.step, static_cast<uint64_t>(info.step), 1, one_tensor())) ==
                  "");
          kept += info.step >= 30;
        }
        REQUIRE(kept == 2);
        // What is left is cleaned at the next start.
        const CleanReport cleaned = clean_leftovers(*after, kDir, [](const WriterId&) { return false; }).value();
        REQUIRE(cleaned.left.empty());
        REQUIRE(list_checkpoints(*after, kDir).value().leftovers.empty());
      }
    }
    CHECK((calls[0] > 10 && calls[1] > 10));
  }

  TEST_CASE("the steps that retention announces are those that it removes, whatever refers to them") {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      CAPTURE(seed);
      MemoryBackend disk;
      for (int64_t step = 10; step <= 60; step += 10) {
        add_step(disk, step);
        std::string note;  // also of steps that cannot be read, whose manifests would say it
        for (int64_t other = 10; other < step; other += 10) {
          if (mix64(seed * 10000 + static_cast<uint64_t>(step * 100 + other)) % 4 == 0)
            note += step_dir_name(other) + "\n";
        }
        if (!note.empty()) REQUIRE(write_file(disk, kDir / step_dir_name(step) / kReferencesName, note).ok());
      }
      if (seed % 2 == 0) {  // a newer build's
        std::vector<std::byte>& bytes = disk.bytes_of(kDir / step_dir_name(40) / "manifest.json");
        bytes[39] = std::byte{'2'};
      }
      if (seed % 3 == 0) {
        const fs::path work = kDir / work_dir_name(kTmpPrefix, 70, kWriter);
        REQUIRE(disk.make_dir(work).ok());
        REQUIRE(write_file(disk, work / kReferencesName, step_dir_name(20) + "\n").ok());
      }
      const RetentionPolicy policy{.keep_last = 1 + static_cast<int64_t>(seed % 2)};
      std::vector<Fate> fates = plan_retention(list_checkpoints(disk, kDir).value().checkpoints, policy).value();
      spare_referenced(disk, kDir, fates);
      std::vector<int64_t> said;
      for (const Fate& fate : fates) {
        if (!fate.stays) said.push_back(fate.step);
      }
      FaultBackend refusing(disk, FaultPlan::fail_call(1, EACCES));  // the first folder is listed, a note is not read
      std::vector<Fate> unknown = plan_retention(list_checkpoints(disk, kDir).value().checkpoints, policy).value();
      spare_referenced(refusing, kDir, unknown);
      CHECK(std::ranges::all_of(unknown, &Fate::stays));
      CHECK(apply_retention(disk, kDir, policy, kWriter).value().removed == said);
    }
  }

  TEST_CASE("a newer checkpoint whose name is not durable yet does not cost the older one") {
    // The save's last fsync failed, so a power loss may take the new name back; retention must not have removed the
    // old.
    MemoryBackend start;
    add_step(start, 10);
    FaultPlan plan = FaultPlan::fail_call(1, 5);
    plan.only = IoOp::kSyncDir;  // 0 is the new directory's, 1 its parent's
    FaultBackend io(start, plan);
    const Result<SaveReport> saved = save(io, kDir, make_state(20, 20, 1, one_tensor()));
    REQUIRE_FALSE(saved.ok());
    CHECK(saved.error().message.find("visible") != std::string::npos);
    CHECK(complete_steps(start) == std::vector<int64_t>{10, 20});
    bool fired = true;
    for (int64_t n = 0; fired; ++n) {
      const auto disk = start.clone();
      FaultBackend stopping(*disk, FaultPlan::stop_at_call(n));
      const auto report = apply_retention(stopping, kDir, {1, {}}, kWriter);
      fired = stopping.fired();
      for (uint64_t seed = 0; seed < 16; ++seed) {
        const auto after = disk->clone();
        after->power_cycle(seed);
        REQUIRE_FALSE(complete_steps(*after).empty());
      }
    }
  }

  TEST_CASE("whether two names can be exchanged is found out, and nothing stays of it") {
    MemoryBackend disk;
    add_step(disk, 10);
    CHECK(can_exchange(disk, kDir, kWriter).value());
    for (const auto& [os_errno, only] :
         {std::pair(EINVAL, IoOp::kExchange), {EIO, IoOp::kExchange}, {EIO, IoOp::kMakeDir}}) {
      for (const int64_t call : {0, 1}) {
        FaultBackend io(disk, {.action = FaultPlan::Action::kFail, .call = call, .os_errno = os_errno, .only = only});
        const Result<bool> can = can_exchange(io, kDir, kWriter);
        if (os_errno == EINVAL || !io.fired()) {
          CHECK(can.value() == !io.fired());
        } else {
          CHECK(can.error().os_errno == EIO);
        }
        CHECK(disk.list(kDir).value().size() == 1);
      }
    }
  }

  TEST_CASE("leftovers go only when their writer is gone") {
    MemoryBackend disk;
    add_step(disk, 10);
    const WriterId me = this_writer();
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    ::waitpid(child, nullptr, 0);
    WriterId dead = me, reused = me, elsewhere = me;
    dead.pid = child;
    reused.start += 1;
    elsewhere.host = "another-host";
    for (const WriterId& writer : {me, dead, reused, elsewhere}) {
      const fs::path dir = kDir / work_dir_name(kTmpPrefix, 20, writer);
      REQUIRE(disk.make_dir(dir).ok());
      REQUIRE(write_file(disk, dir / "half.h5", "x").ok());
    }
    REQUIRE(disk.make_dir(kDir / ".tmp-something").ok());
    const CleanReport report = clean_leftovers(disk, kDir).value();
    CHECK(report.removed.size() == 2);
    CHECK(report.left.size() == 3);
    CHECK(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, me)).ok());
    CHECK(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, elsewhere)).ok());
    CHECK_FALSE(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, dead)).ok());
    CHECK_FALSE(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, reused)).ok());
    for (const std::string& line : report.left) {
      const bool other = line.find("another-host") != std::string::npos;
      CHECK_MESSAGE((line.find("prune --leftovers --other-hosts --yes` removes this") != std::string::npos) == other,
                    line);
    }
    CHECK(complete_steps(disk) == std::vector<int64_t>{10});
    // Who says that the writers of other hosts are gone does not say it of this one's.
    const CleanReport rest = clean_leftovers(disk, kDir, [](const WriterId& writer) {
                               return is_of_this_host(writer) && may_be_alive(writer);
                             }).value();
    CHECK(rest.removed == std::vector<std::string>{work_dir_name(kTmpPrefix, 20, elsewhere)});
    CHECK(disk.stat(kDir / work_dir_name(kTmpPrefix, 20, me)).ok());
  }

  TEST_CASE("trash that only a dead save has asked for is not put back: it may be half gone") {
    for (const bool alive : {false, true}) {
      MemoryBackend disk;
      add_step(disk, 20);
      WriterId writer = this_writer();
      const fs::path trash = kDir / work_dir_name(kTrashPrefix, 10, {writer.host, writer.pid, 1, 1});
      const fs::path save =
          kDir / work_dir_name(kTmpPrefix, 30, {writer.host, writer.pid, alive ? writer.start : 1, 2});
      for (const fs::path& dir : {trash, save}) REQUIRE(disk.make_dir(dir).ok());
      REQUIRE(write_file(disk, trash / kManifestName, "x").ok());
      REQUIRE(write_file(disk, save / kReferencesName, step_dir_name(10) + "\n").ok());
      REQUIRE(clean_leftovers(disk, kDir).ok());
      CHECK(disk.stat(kDir / step_dir_name(10)).ok() == alive);
    }
  }

  TEST_CASE("a writer that goes while it is asked for is no error") {  // its file in /proc is there, and cannot be read
    WriterId writer = this_writer();
    for (int64_t round = 0; round < 1000; ++round) {
      const pid_t child = ::fork();
      if (child == 0) ::_exit(0);
      writer.pid = child;
      std::atomic<bool> gone{false};
      std::thread reaper([&] {
        ::usleep(static_cast<useconds_t>(round % 40 * 10));
        ::waitpid(child, nullptr, 0);
        ::usleep(100);
        gone = true;
      });
      bool told = true;
      while (!gone) {
        try {
          static_cast<void>(may_be_alive(writer));
        } catch (const std::exception&) {
          told = false;
        }
      }
      reaper.join();
      REQUIRE(told);
    }
  }

  TEST_CASE("a writer that is dead and not yet waited for is gone") {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const int64_t start = this_writer().start;
      ::_exit(::write(ends[1], &start, sizeof(start)) == sizeof(start) ? 0 : 1);
    }
    WriterId writer = this_writer();
    writer.pid = child;
    REQUIRE(::read(ends[0], &writer.start, sizeof(writer.start)) == sizeof(writer.start));
    siginfo_t info{};
    REQUIRE(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
    CHECK_FALSE(may_be_alive(writer));
    ::waitpid(child, nullptr, 0);
    ::close(ends[0]);
    ::close(ends[1]);
  }

  TEST_CASE("a save that was fenced cannot be committed, whoever is at it, and is never put back") {
    MemoryBackend disk;
    add_step(disk, 10);
    const WriterId stranger{"other-host", 7, 1, 1};
    const fs::path save = kDir / work_dir_name(kTmpPrefix, 20, stranger);
    REQUIRE_OK(disk.make_dir(save));
    REQUIRE_OK(write_file(disk, save / kManifestName, "x"));
    REQUIRE_OK(fence_saves(disk, kDir));
    CHECK_FALSE(disk.rename(save, kDir / step_dir_name(20)).ok());
    CHECK_FALSE(write_file(disk, save / kTableName, "late").ok());
    CHECK_OK(fence_saves(disk, kDir));  // nothing is left to fence
    REQUIRE_OK(clean_leftovers(disk, kDir));
    CHECK(list_names(disk, kDir).value().leftovers.empty());
    CHECK(disk.stat(kDir / step_dir_name(10)).ok());
    CHECK_OK(fence_saves(disk, kDir / "nothing here"));
  }

  TEST_CASE("what was cut off between its two renames is ended before saves are fenced") {
    MemoryBackend disk;
    add_step(disk, 10);
    const WriterId stranger{"other-host", 7, 1, 1};
    const fs::path dir = kDir / step_dir_name(10), made = kDir / work_dir_name(kTmpPrefix, 10, stranger);
    REQUIRE_OK(disk.rename(dir, made));
    add_step(disk, 10);
    REQUIRE_OK(disk.rename(dir, kDir / work_dir_name(kTrashPrefix, 10, stranger)));
    REQUIRE_OK(fence_saves(disk, kDir));
    CHECK(disk.stat(dir).ok());
    CHECK_FALSE(disk.stat(made).ok());
  }
}
