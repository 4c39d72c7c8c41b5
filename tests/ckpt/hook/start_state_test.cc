#include "ckpt/start_state.h"

#include <doctest/doctest.h>

#include <cerrno>

#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

TestState state_at(int64_t step, uint64_t seed) {
  TestState state = make_state(step, seed);
  put_position({.step = step, .samples = step * 8, .tokens = step * 64, .loss = 2, .seed = seed, .sampler = "drawn"},
               state.skeleton);
  return state;
}

/// Steps 10 and 12, and another save of step 12 whose writer died between the two renames that replace it.
void cut_off(MemoryBackend& disk) {
  REQUIRE_OK(save(disk, "/ck", state_at(10, 1)));
  REQUIRE_OK(save(disk, "/ck", state_at(12, 1)));
  FaultBackend plain(
      disk, {.action = FaultPlan::Action::kFail, .from_then_on = true, .os_errno = EINVAL, .only = IoOp::kExchange});
  FaultBackend away(plain,
                    {.action = FaultPlan::Action::kFail, .call = 1, .from_then_on = true, .only = IoOp::kRename});
  REQUIRE_FALSE(save(away, "/ck", state_at(12, 2)).ok());
  REQUIRE(list_names(disk, "/ck").value().cut_off.size() == 1);
}

}  // namespace

TEST_SUITE("ckpt/start_state") {
  TEST_CASE("the newest whole step is what a start goes on from; what it passes over is told") {
    MemoryBackend disk;
    CHECK_FALSE(look_at_start(disk, {.checkpoints_dir = "/ck"}).value().any());
    REQUIRE_OK(save(disk, "/ck", state_at(10, 1)));
    REQUIRE_OK(save(disk, "/ck", state_at(12, 2)));
    CHECK(look_at_start(disk, {.checkpoints_dir = "/ck"}).value().step() == 12);
    REQUIRE_OK(put_label(disk, "/ck", 12, Label::kBad, "nan", "guard"));
    const StartState older = look_at_start(disk, {.checkpoints_dir = "/ck"}).value();
    CHECK(older.step() == 10);
    CHECK(older.passed_over == std::vector<std::string>{"/ck/step-00000012: it is bad: nan"});
    std::byte& first = disk.bytes_of(std::filesystem::path("/ck") / kLabelsName)[0];
    first = std::byte{'x'};  // which step is bad is not known
    CHECK(look_at_start(disk, {.checkpoints_dir = "/ck"}).error().code == ErrorCode::kCorrupt);
    first = std::byte{'{'};
    REQUIRE_OK(put_label(disk, "/ck", 10, Label::kBad, "nan", "guard"));
    const Result<StartState> all_bad = look_at_start(disk, {.checkpoints_dir = "/ck"});
    REQUIRE_FALSE(all_bad.ok());
    CHECK(all_bad.error().code == ErrorCode::kInvalidInput);
    CHECK(all_bad.error().message.find("--from-step N") != std::string::npos);
    REQUIRE(disk.remove_file("/ck/" + std::string(kLabelsName)).ok());
    REQUIRE(disk.remove_file("/ck/step-00000012/" + std::string(kManifestName)).ok());
    CHECK(look_at_start(disk, {.checkpoints_dir = "/ck"}).value().step() == 10);
    REQUIRE(disk.remove_file("/ck/step-00000010/" + std::string(kManifestName)).ok());
    const Result<StartState> none = look_at_start(disk, {.checkpoints_dir = "/ck"});
    REQUIRE_FALSE(none.ok());
    CHECK(none.error().code == ErrorCode::kCorrupt);
  }

  TEST_CASE("a step whose position cannot be read is passed over") {
    MemoryBackend disk;
    REQUIRE_OK(save(disk, "/ck", state_at(10, 1)));
    TestState strange = state_at(12, 2);
    strange.skeleton.state = R"({"sampler": 7})";
    REQUIRE_OK(save(disk, "/ck", strange));
    const Result<StartState> found = look_at_start(disk, {.checkpoints_dir = "/ck"});
    REQUIRE_OK(found);
    CHECK(found.value().step() == 10);
    CHECK(found.value().passed_over.size() == 1);
  }

  TEST_CASE("a position that no run can have come to is none, whoever wrote it") {
    const int64_t most = int64_t{1} << 53;
    const trainer::TrainPosition far{.step = 12, .samples = most, .tokens = most, .loss = 2, .sampler = "drawn"};
    CHECK(decode_position(encode_position(far)).ok());
    for (int64_t trainer::TrainPosition::*count : {&trainer::TrainPosition::samples, &trainer::TrainPosition::tokens}) {
      for (const int64_t value : {most + 1, INT64_MAX}) {
        trainer::TrainPosition crafted = far;
        crafted.*count = value;
        CHECK_FALSE(decode_position(encode_position(crafted)).ok());
        TestState state = make_state(12, 1);
        put_position(crafted, state.skeleton);
        CHECK_FALSE(position_of(state.skeleton).ok());
      }
    }
    trainer::TrainPosition crafted = far;
    crafted.past.points = {{1, INT64_MAX, INT64_MAX}};
    CHECK_FALSE(decode_position(encode_position(crafted)).ok());
  }

  TEST_CASE("an imported optimizer that was ahead of its steps keeps its count: the past holds a number below zero") {
    trainer::TrainPosition position{.step = 3, .past = {.moments_from = -1}};
    const Result<trainer::TrainPosition> read = decode_position(encode_position(position));
    REQUIRE_OK(read);
    CHECK(read.value().past == position.past);
    CHECK(decode_past(encode_past(position.past)).value() == position.past);
    position.past.moments_from = -(int64_t{1} << 53) - 1;
    CHECK_FALSE(decode_position(encode_position(position)).ok());
  }

  TEST_CASE("a step that the start is about to put back in its place is looked at where it lies") {
    MemoryBackend disk;
    cut_off(disk);
    const auto before = disk.list("/ck").value().size();
    const Result<StartState> made = look_at_start(disk, {.checkpoints_dir = "/ck", .verify = true});
    REQUIRE_OK(made);
    CHECK(made.value().step() == 12);
    CHECK(made.value().position.seed == 2);
    CHECK(disk.list("/ck").value().size() == before);

    const std::string name = list_names(disk, "/ck").value().cut_off.at(0).made;
    REQUIRE(disk.remove_file(fs::path("/ck") / name / kManifestName).ok());  // then the old one goes back
    const Result<StartState> old = look_at_start(disk, {.checkpoints_dir = "/ck"});
    REQUIRE_OK(old);
    CHECK(old.value().step() == 12);
    CHECK(old.value().position.seed == 1);
  }
}
