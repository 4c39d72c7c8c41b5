#include "ckpt/run_labels.h"

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/posix_backend.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/ckpt/snapshot/write_snapshot.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/ck";
const WatchRules kRules{.proof = 4, .ceiling = 9};
constexpr double kRuined = 100;

void add_step(IoBackend& io, const fs::path& dir, int64_t step) {
  REQUIRE_OK(save(io, dir, make_state(step, 1, 1, {{"a", "weight", DType::kF32, {30}, 1}})));
}

telemetry::StepMetrics metrics(int64_t step, double loss = 5) { return {.step = step, .loss = loss, .grad_norm = 1}; }

void note(RunLabels& labels, int64_t from, int64_t to, double loss = 5) {
  for (int64_t step = from; step <= to; ++step) labels.note(metrics(step, loss));
}

Label label_of(IoBackend& io, int64_t step) { return read_labels(io, kDir).value().at(step).label; }

}  // namespace

TEST_SUITE("ckpt/run_labels") {
  TEST_CASE("steps are judged in their order, whenever they come, and a gap is waited for until labels are settled") {
    MemoryBackend disk;
    add_step(disk, kDir, 10);
    RunLabels labels(kRules, 1000);
    note(labels, 12, 14);
    note(labels, 1, 10);
    labels.note(metrics(11, kRuined));
    REQUIRE_OK(labels.settle(disk, kDir));
    CHECK(label_of(disk, 10) == Label::kSuspect);
    add_step(disk, kDir, 16);
    RunLabels gap(kRules, 1000);
    note(gap, 1, 10);
    note(gap, 12, 20);
    REQUIRE_OK(gap.settle(disk, kDir));
    CHECK(label_of(disk, 16) == Label::kGood);
  }

  TEST_CASE("the step that may prove a save is the one that does, and no other") {
    MemoryBackend disk;
    add_step(disk, kDir, 10);
    RunLabels labels(kRules, 1000);
    note(labels, 1, 13);
    REQUIRE_OK(labels.settle(disk, kDir));
    CHECK(label_of(disk, 10) == Label::kNew);
    CHECK_FALSE(labels.may_prove(13));
    CHECK(labels.may_prove(14));
    note(labels, 14, 14);
    REQUIRE_OK(labels.settle(disk, kDir));
    CHECK(label_of(disk, 10) == Label::kGood);
    CHECK_FALSE(labels.may_prove(14));
  }

  TEST_CASE("a run that goes back forgets what it was told of steps behind, judged already or not") {
    MemoryBackend disk;
    add_step(disk, kDir, 10);
    RunLabels labels(kRules, 1000);
    note(labels, 1, 11);
    note(labels, 13, 13, kRuined);  // behind a gap
    labels.go_back(10);
    note(labels, 11, 12);
    REQUIRE_OK(labels.settle(disk, kDir));
    CHECK(label_of(disk, 10) == Label::kNew);
  }

  TEST_CASE("a trouble that is met again is raised again, and says so where people know of it") {
    const auto divergences = [](RunLabels& labels) {
      std::vector<std::pair<int64_t, bool>> out;
      for (const StepAlarm& alarm : labels.take_alarms())
        if (alarm.kind == StepAlarm::Kind::kDivergence) out.emplace_back(alarm.step, alarm.again);
      return out;
    };
    RunLabels labels(kRules, 1000);
    std::vector<telemetry::StepMetrics> before;
    for (int64_t step = 1; step <= 125; ++step) before.push_back(metrics(step, step > 120 ? kRuined : 5));
    labels.seed(before);
    CHECK(divergences(labels).empty());
    labels.go_back(119);  // killed, and resumed from there
    note(labels, 120, 120);
    note(labels, 121, 124, kRuined);
    CHECK(divergences(labels) == std::vector{std::pair(int64_t{124}, true)});
    labels.go_back(124);  // killed once more, in the trouble
    note(labels, 125, 126, kRuined);
    CHECK(divergences(labels).empty());
    labels.go_back(119);
    labels.leave_line(119);
    note(labels, 120, 120);
    note(labels, 121, 124, kRuined);
    CHECK(divergences(labels) == std::vector{std::pair(int64_t{124}, false)});
  }

  TEST_CASE("labels.json stays as it is where it is damaged or of a newer schema; a missing one is made") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20}) add_step(disk, kDir, step);
    RunLabels labels(kRules, 1000);
    note(labels, 1, 30);
    for (const std::string text :
         {"damaged", R"({"schema": 2, "steps": {}})", R"({"schema": 1, "steps": {"10": []}})"}) {
      CAPTURE(text);
      REQUIRE_OK(write_file(disk, kDir / kLabelsName, text));
      for (const Status& refused :
           {labels.settle(disk, kDir), put_label(disk, kDir, 10, Label::kBad, "x", "hand"),
            hold_steps(disk, kDir, {10}, "x"), take_labels(disk, kDir, {{10, {.saved_unix_ms = 10}}}),
            Status(labels_for_start(disk, kDir).error())}) {
        REQUIRE_FALSE(refused.ok());
        CHECK(refused.error().code == ErrorCode::kCorrupt);
        CHECK(refused.error().message.find("labels.json: ") != std::string::npos);
        CHECK(refused.error().message.find("mend it, or move it away") != std::string::npos);
      }
      CHECK_FALSE(apply_retention(disk, kDir, {1, {}}, this_writer()).ok());  // nothing says which steps are held
      CHECK(list_names(disk, kDir).value().steps.size() == 2);
      CHECK(read_file(disk, kDir / kLabelsName, 1000).value() == text);
      REQUIRE_OK(disk.remove_file(kDir / kLabelsName));
    }
    REQUIRE_OK(labels.settle(disk, kDir));
    CHECK(label_of(disk, 10) == Label::kGood);
  }

  TEST_CASE("labels of steps that cannot be read now are kept") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20}) add_step(disk, kDir, step);
    RunLabels labels(kRules, 1000);
    note(labels, 1, 30);
    REQUIRE_OK(labels.settle(disk, kDir));
    CHECK(label_of(disk, 10) == Label::kGood);
    const std::vector<std::byte> manifest = disk.bytes_of(kDir / step_dir_name(10) / kManifestName);
    disk.bytes_of(kDir / step_dir_name(10) / kManifestName)[200] ^= std::byte{1};
    REQUIRE_OK(put_label(disk, kDir, 20, Label::kSuspect, "loss", "watch"));  // so that there is something to write
    REQUIRE_OK(labels.settle(disk, kDir));
    CHECK(label_of(disk, 10) == Label::kGood);
    CHECK(label_of(disk, 20) == Label::kGood);
  }

  TEST_CASE("a step saved in the trouble that ruined a state is bad, except by proof or a person's word") {
    for (const bool above : {true, false}) {  // a loss above the ceiling says that the weights before it were ruined
      CAPTURE(above);
      MemoryBackend disk;
      for (const int64_t step : {295, 299, 300, 301, 302}) add_step(disk, kDir, step);
      RunLabels labels(kRules, 1000);
      note(labels, 1, 299);
      note(labels, 300, 302, above ? kRuined : 8);
      REQUIRE_OK(put_label(disk, kDir, 301, Label::kSuspect, "mine", "hand"));
      REQUIRE_OK(put_label(disk, kDir, 302, Label::kGood, "proved", "watch"));
      const Labels before = read_labels(disk, kDir).value();
      REQUIRE_OK(labels.condemn_from_onset(disk, kDir));
      CHECK(read_labels(disk, kDir).value() == before);  // no state was ruined: the batch did it
      labels.note_ruined();
      REQUIRE_OK(labels.condemn_from_onset(disk, kDir));
      const Labels after = read_labels(disk, kDir).value();
      CHECK_FALSE(after.contains(295));
      CHECK(after.contains(299) == above);
      if (above) CHECK(after.at(299).label == Label::kBad);
      CHECK(after.at(300).label == Label::kBad);
      CHECK(after.at(300).by == "guard");
      CHECK(after.at(300).why.ends_with("first sign was step 300"));
      CHECK(after.at(301).label == Label::kSuspect);
      CHECK(after.at(302).label == Label::kGood);
    }
  }

  TEST_CASE("a ruined step leaves memory, and its save is bad where this memory's ranks made it") {
    for (const int64_t persisted : {12, 13}) {
      CAPTURE(persisted);
      MemoryBackend disk;
      add_step(disk, kDir, 13);
      SlotLayout layout;
      layout.shards.push_back({0, 0, {}, 0, 64});
      layout.bytes = 4096;
      Result<Arena> made = Arena::create({.run_id = "ruined", .ranks = {layout}, .backing = ArenaBacking::kMemfd});
      REQUIRE_OK(made);
      Arena& arena = made.value();
      const std::vector<std::byte> state(64);
      const std::span<const std::byte> source(state);
      for (const int64_t step : {12, 13}) REQUIRE_OK(write_snapshot(arena, 0, step - 12, 1, step, "", {&source, 1}));
      arena.control().persisted_step = persisted;
      CHECK(drop_ruined(arena, disk, kDir).value() == 0);
      arena.control().ruined_step = 13;
      const Status gone = Error{ErrorCode::kIo, "another folder"};
      CHECK(drop_ruined(arena, disk, kDir, [&] { return gone; }).ok() == (persisted == 12));
      arena.control().ruined_step = 13;  // as it stays where the folder was not the one that is meant
      CHECK(drop_ruined(arena, disk, kDir).value() == 13);
      CHECK(arena.views()[0].step == 12);
      CHECK(arena.views()[1].step != 13);
      CHECK(arena.control().ruined_step == 0);
      CHECK(read_labels(disk, kDir).value().contains(13) == (persisted == 13));
      if (persisted == 13) CHECK(label_of(disk, 13) == Label::kBad);
    }
  }

  TEST_CASE("labels that are lost are what metrics.jsonl says, of each save by the steps on both of its sides") {
    const cairn::testing::TempDir folder;
    const fs::path dir = folder.path / "checkpoints";
    REQUIRE(fs::create_directories(dir));
    PosixBackend disk;
    for (const int64_t step : {10, 20, 60}) add_step(disk, dir, step);
    std::ofstream lines(folder.path / "metrics.jsonl");
    for (int64_t step = 1; step <= 60; ++step)
      lines << telemetry::to_json(metrics(step, step == 22 ? kRuined : 5)).dump() << "\n";
    lines.close();
    const Labels made = labels_from_metrics(disk, dir, kRules, 60);
    CHECK(made.at(10).label == Label::kGood);
    CHECK(made.at(20).label == Label::kSuspect);
    CHECK(made.at(60).label == Label::kGood);  // ends the run
    CHECK(labels_from_metrics(disk, dir, kRules).at(60).label == Label::kNew);
    Catalog catalog = list_checkpoints(disk, dir).value();
    CHECK_FALSE(label_from_metrics(disk, dir, catalog).empty());
    CHECK(catalog.checkpoints[0].label == Label::kGood);
    CHECK(catalog.checkpoints[2].label == Label::kNew);
    REQUIRE_OK(put_label(disk, dir, 60, Label::kBad, "nan", "guard"));
    catalog = list_checkpoints(disk, dir).value();
    CHECK(label_from_metrics(disk, dir, catalog).empty());  // there are labels
    CHECK(catalog.checkpoints[0].label == Label::kNew);
  }
}
