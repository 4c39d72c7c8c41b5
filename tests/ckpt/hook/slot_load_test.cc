// A part of a checkpoint into the memory of all ranks: what is taken is read once, whichever rank needs which columns
// of it. What lies there then tests/ckpt/any_layout_test.cc compares.
#include <doctest/doctest.h>

#include <cstring>

#include "ckpt/persist/read.h"
#include "ckpt/restore_slot.h"
#include "ckpt/snapshot/snapshot.h"
#include "tests/ckpt/hook/fake_run.h"
#include "tests/support/no_threads.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

constexpr int64_t kSteps = 3;

RunText run_text() { return {.run_name = "fake", .run_id = fresh_run_id(), .recipe_json = "{}", .recipe_hash = "r"}; }

Arena arena_of(const Plan& plan) { return Arena::create(arena_spec(plan, run_text()).value()).value(); }

/// A run of kSteps steps; the folder of its checkpoint.
std::filesystem::path saved_run(const Plan& plan, const std::filesystem::path& dir) {
  Arena arena = arena_of(plan);
  {
    NodePersister persister(arena, [] { return std::make_unique<PosixBackend>(); }, dir, {});
    PosixBackend io;
    RestoreDecider decider(plan, arena, io, {dir});
    REQUIRE(decider.next_incarnation().ok());
    LifeReport report;
    REQUIRE(live(plan, arena, {.steps = kSteps}, &persister, report).ok());
  }
  ignore(arena.remove(), "end of the run");
  return dir / "step-00000003";
}

struct Case {
  const char* what;
  InitConfig how;
  bool everything = false, untied = false;  // untied: the model; the checkpoint is of a tied one
};

std::vector<Case> cases() {
  InitConfig whole, weights, part, more;
  weights.weights_only = true;
  part.except = {"*norm*", "layers.0.*"};
  more.allow_missing = {"head.weight"};
  return {{"everything", whole, true},
          {"weights alone", weights},
          {"a part", part},
          {"a model with more", more, false, true}};
}

}  // namespace

TEST_SUITE("ckpt/hook/slot_load") {
  TEST_CASE("where no thread can be started a checkpoint is loaded without") {
    const TempDir dir;
    const Plan plan = plan_of({2, 1, 1}, true);
    const std::filesystem::path saved = saved_run(plan, dir.path);
    Arena arena = arena_of(plan);
    const int code = cairn::testing::without_threads([&] {
      PosixBackend io;
      return load_slot(plan, arena, 0, 1, io, saved, {}, nullptr).ok() ? 0 : 1;
    });
    CHECK((code == 0 || code == 77));
    if (code == 0) CHECK(read_common(arena, 0, Check::kEveryByte).value().step == kSteps);
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("a part of a checkpoint is read once for all ranks of any layout, and they find it there") {
    const TempDir dir;
    PosixBackend io;
    int64_t by_ranks = 0, by_agent = 0;
    const std::vector<Layout> layouts = {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}, {1, 1, 3}, {2, 1, 2}};
    for (const Layout& from : layouts) {
      const std::filesystem::path step = saved_run(plan_of(from, true), dir.path / plan_of(from, true).mesh.describe());
      for (const Layout& to : layouts) {
        for (const Case& wanted : cases()) {
          CAPTURE(wanted.what);
          const Plan plan = plan_of(to, !wanted.untied);
          CAPTURE(plan.mesh.describe());
          Arena arena = arena_of(plan);
          const Result<SlotLoad> loaded = load_slot(plan, arena, 1, 7, io, step, wanted.how);
          REQUIRE_OK(loaded);
          const ReadStats& stats = loaded.value().stats;
          // Tensors of some kilobytes are read together with what lies between them, and the report says how much.
          CHECK(static_cast<double>(stats.read_bytes - stats.gap_bytes) <=
                1.02 * static_cast<double>(stats.wanted_bytes));
          CHECK(stats.gap_bytes <= stats.requests * (int64_t{4} << 20));
          if (wanted.how.except.empty() && !wanted.how.weights_only)
            CHECK(static_cast<double>(stats.read_bytes) <= 1.02 * static_cast<double>(stats.wanted_bytes));
          CHECK(stats.wanted_bytes > 0);
          const int64_t at = wanted.how.weights_only ? 0 : kSteps;
          CHECK(loaded.value().position.step == at);
          const auto snapshot = read_common(arena, 1, Check::kEveryByte);
          REQUIRE(snapshot.ok());
          CHECK(snapshot.value().step == at);
          for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
            FakeState state(plan, rank);
            REQUIRE(load_from_memory(plan, arena, 1, state.tensors()).ok());
            if (wanted.everything) REQUIRE(state.wrong_elements(kSteps) == 0);
            for (const trainer::StateTensor& item : state.tensors()) by_ranks += item.bytes;
          }
          by_agent += stats.read_bytes;
          ignore(arena.remove(), "end of the case");
        }
      }
    }
    CHECK(by_agent < by_ranks);
  }

  TEST_CASE("a run that begins with weights alone finds them in memory, and again when its ranks die at once") {
    const TempDir old_run, new_run;
    const std::filesystem::path from = saved_run(plan_of({4, 1, 1}, true), old_run.path);
    Plan plan = plan_of({2, 1, 2}, true);
    plan.recipe.checkpoint.snapshot_steps = 1;
    plan.recipe.init = {.path = from.string(), .weights_only = true};
    Arena arena = arena_of(plan);
    PosixBackend io;
    RestoreDecider decider(plan, arena, io, {new_run.path, from});
    const RestoreChoice choice = decider.next_incarnation().value();
    CHECK(choice.source == arena::Source::kDisk);
    CHECK(choice.step == 0);
    REQUIRE(choice.match.has_value());
    CHECK(choice.match->weights_only);
    const Manifest manifest = read_manifest(io, from).value();
    CHECK(choice.read.wanted_bytes == payload_bytes(manifest) / 3);
    CHECK(choice.read.read_bytes == choice.read.wanted_bytes);
    CHECK(arena.control().decision.source == arena::Source::kMemory);
    LifeReport report;
    REQUIRE(live(plan, arena, {.steps = 5, .die_at = 1}, nullptr, report).ok());
    REQUIRE(report.restored.has_value());
    CHECK(report.restored->step == 0);
    const RestoreChoice again = decider.next_incarnation().value();
    CHECK(again.source == arena::Source::kMemory);  // nothing is read a second time
    CHECK(again.step == 0);
    REQUIRE(live(plan, arena, {.steps = 5, .die_at = 2, .snapshots_at_death = 4}, nullptr, report).ok());
    CHECK(decider.next_incarnation().value().step == 2);
    ignore(arena.remove(), "end of the test");
  }
}
