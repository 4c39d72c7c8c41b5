// Checkpoints of torch.distributed.checkpoint, written, are read back by dist_state.h as they were. torch itself:
// tests/fixtures/check_dcp_exports.py.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>

#include "ckpt/position.h"
#include "converters/dist_export.h"
#include "converters/torch_writer.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/training_states.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

Result<DistExportReport> exported(const fs::path& from, const fs::path& to, const DistExportOptions& options = {}) {
  ckpt::PosixBackend io;
  return export_dist(io, from, to, options, decode);
}

/// A checkpoint with the state of one of tests/golden/dcp.
fs::path checkpoint_of(const std::string& name, const fs::path& to, const MeshConfig& mesh = {.dp = 1}) {
  const auto report = imported(golden("dcp") / name, to, {.mesh = mesh, .config = golden("dcp") / name});
  REQUIRE_OK(report);
  return report.value().dir;
}

}  // namespace

TEST_SUITE("converters/dist_export") {
  TEST_CASE("a state that goes out and comes in again is the same, whatever the layout, the chunks and the files") {
    for (const std::string name : {"app-bf16", "flat-f32-tied", "nested-mixed-tp", "titan-f32"}) {
      for (const auto& [mesh, options] :
           {std::pair(MeshConfig{.dp = 1}, DistExportOptions{}),
            {MeshConfig{.tp = 2, .pp = 2, .dp = 1}, DistExportOptions{.chunk_bytes = 200, .file_bytes = 30000}}}) {
        CAPTURE(name);
        TempDir temp;
        const fs::path from = checkpoint_of(name, temp / "run", mesh);
        const auto report = exported(from, temp / "out", options);
        REQUIRE_OK(report);
        CHECK(report.value().moments);
        CHECK(report.value().step == 3);
        CHECK(report.value().adam_step == 3);
        CHECK((report.value().files > 1) == (options.file_bytes == 30000));
        const auto state = looked(temp / "out");
        REQUIRE_OK(state);
        CHECK(state.value().problems.empty());
        const auto again = imported(temp / "out", temp / "again");
        REQUIRE_OK(again);
        CHECK(state_in(again.value().dir) == state_in(from));
        const trainer::TrainPosition was = position_in(from), is = position_in(again.value().dir);
        CHECK(is.step == was.step);
        CHECK(is.tokens == was.tokens);
        CHECK(is.past.moments_from == was.past.moments_from);
        CHECK(is.lr == was.lr);
        CHECK(again.value().recipe.optimizer.beta2 == 0.95);
        CHECK(again.value().recipe.optimizer.weight_decay == 0.1);
      }
    }
  }

  TEST_CASE("an export of only the weights has no optimizer, and one of a state without moments says so") {
    TempDir temp;
    const fs::path from = checkpoint_of("titan-f32", temp / "run");
    REQUIRE_OK(exported(from, temp / "out", {.weights_only = true}));
    CHECK(looked(temp / "out").value().optimizer.empty());
    ckpt::PosixBackend io;
    const auto plain = import_hf(io, temp / "out", temp / "plain", {}, encode);
    REQUIRE_OK(plain);
    const auto report = exported(plain.value().dir, temp / "again");
    REQUIRE_OK(report);
    CHECK_FALSE(report.value().moments);
    REQUIRE(report.value().warnings.size() == 1);
    CHECK(has(report.value().warnings[0], "no optimizer state"));
  }

  TEST_CASE("an export replaces the files of one that was cut off, and no others") {
    TempDir temp;
    const fs::path from = checkpoint_of("titan-f32", temp / "run");
    std::atomic<bool> stop = false;
    const auto stopped =
        exported(from, temp / "out", {.cancel = &stop, .progress = [&](int64_t, int64_t) { stop = true; }});
    REQUIRE_FALSE(stopped.ok());
    CHECK(stopped.error().code == ErrorCode::kStopped);
    CHECK(fs::is_empty(temp / "out"));
    spit(temp / "out/.cairn-export", "");  // of one that was killed
    spit(temp / "out/__0_0.distcp", "half");
    spit(temp / "out/.metadata.tmp", "half");
    spit(temp / "out/config.json", "half");
    REQUIRE_OK(exported(from, temp / "out"));
    CHECK_FALSE(fs::exists(temp / "out/.metadata.tmp"));
    CHECK_FALSE(fs::exists(temp / "out/.cairn-export"));
    CHECK(imported(temp / "out", temp / "again").ok());
    const auto twice = exported(from, temp / "out");
    REQUIRE_FALSE(twice.ok());
    CHECK(has(twice.error().message, "has a checkpoint of torch already"));
    fs::create_directories(temp / "other");
    spit(temp / "other/notes.txt", "mine");
    const auto other = exported(from, temp / "other");
    REQUIRE_FALSE(other.ok());
    CHECK(has(other.error().message, "is not empty (it has notes.txt)"));
    CHECK(fs::exists(temp / "other/notes.txt"));
    fs::create_directories(temp / "model");
    spit(temp / "model/config.json", "{}");  // somebody's own, beside no part of an export
    CHECK(has(exported(from, temp / "model").error().message, "is not empty (it has config.json)"));
    CHECK(slurp(temp / "model/config.json") == "{}");
    for (const std::string name : {"__8_0.distcp", "__0_0.distcp", ".metadata.tmp"}) {  // of another program's save
      CAPTURE(name);
      spit(temp / "model" / name, "theirs");
      CHECK(has(exported(from, temp / "model").error().message, "is not empty (it has "));
      CHECK(slurp(temp / "model" / name) == "theirs");
      CHECK(slurp(temp / "model/config.json") == "{}");
      fs::remove(temp / "model" / name);
    }
    spit(temp / "model/.cairn-export", "");
    spit(temp / "model/__8_0.distcp", "theirs");
    CHECK(has(exported(from, temp / "model").error().message, "is not empty (it has __8_0.distcp)"));
    CHECK(slurp(temp / "model/config.json") == "{}");
  }

  TEST_CASE("an export that fails after its checkpoint has its name removes nothing of it") {
    struct FailingSync : ckpt::PosixBackend {
      fs::path fails;
      Status sync_dir(const fs::path& path) override {
        if (path == fails && fs::exists(path / ".metadata")) return Error{ErrorCode::kIo, "the disk is away"};
        return ckpt::PosixBackend::sync_dir(path);
      }
    } io;
    TempDir temp;
    const fs::path from = checkpoint_of("titan-f32", temp / "run");
    io.fails = temp / "out";
    const auto failed = export_dist(io, from, temp / "out", {}, decode);
    REQUIRE_FALSE(failed.ok());
    CHECK_MESSAGE(has(failed.error().message, "the checkpoint is whole and stays"), failed.error().message);
    const auto again = imported(temp / "out", temp / "again");
    REQUIRE_OK(again);
    CHECK(state_in(again.value().dir) == state_in(from));
  }

  TEST_CASE("a parent folder that cannot be synced is a warning") {
    struct FailingSync : ckpt::PosixBackend {
      fs::path fails;
      Status sync_dir(const fs::path& path) override {
        return path == fails ? Error{ErrorCode::kIo, "not readable"} : ckpt::PosixBackend::sync_dir(path);
      }
    } io;
    TempDir temp;
    const fs::path from = checkpoint_of("titan-f32", temp / "run");
    io.fails = fs::absolute(temp / "out").parent_path();
    const auto done = export_dist(io, from, temp / "out", {}, decode);
    REQUIRE_OK(done);
    REQUIRE(done.value().warnings.size() == 1);
    CHECK(has(done.value().warnings[0], "may not outlast a power cut: not readable"));
  }

  TEST_CASE("the recipe's groups are in the settings of each tensor, the last that names it") {
    TempDir temp;
    const fs::path from = checkpoint_of("titan-f32", temp / "run");
    const auto with = [&](std::vector<ParameterGroup> groups, const fs::path& to) {
      ckpt::PosixBackend io;
      return export_dist(io, from, to, {}, [groups](std::string_view json) -> Result<Recipe> {
        RT_TRY_SET(Recipe recipe, decode(json));
        recipe.optimizer.groups = groups;
        return recipe;
      });
    };
    REQUIRE_OK(with(
        {{.tensors = "*", .lr = 9}, {.tensors = "*", .lr = 0.5, .weight_decay = 0.25}, {.tensors = "*norm*", .lr = 0}},
        temp / "out"));
    const auto again = imported(temp / "out", temp / "again");
    REQUIRE_OK(again);
    CHECK(again.value().recipe.optimizer.peak_lr == position_in(from).lr * 0.5);
    CHECK(again.value().recipe.optimizer.weight_decay == 0.25);
    CHECK(has(fmt::format("{}", fmt::join(again.value().warnings, "\n")), "have 2 learning rates"));
  }
}
