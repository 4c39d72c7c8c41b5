#include "ckpt/hook.h"

#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "ckpt/persist/read.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/position.h"
#include "ckpt/restore_slot.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/snapshot/snapshot.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "tests/ckpt/hook/fake_run.h"
#include "tests/ckpt/run_load.h"
#include "tests/ckpt/snapshot/write_snapshot.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

Plan plan_saving(const Layout& layout, CheckpointConfig config, bool tied = true) {
  Plan plan = plan_of(layout, tied);
  plan.recipe.checkpoint = std::move(config);
  return plan;
}

std::vector<int64_t> steps_on_disk(const std::filesystem::path& dir) {
  PosixBackend io;
  std::vector<int64_t> out;
  const auto catalog = list_checkpoints(io, dir);
  REQUIRE(catalog.ok());
  for (const CheckpointInfo& info : catalog.value().checkpoints) {
    if (info.complete) out.push_back(info.step);
  }
  return out;
}

void flip_byte(const std::filesystem::path& dir) {
  PosixBackend io;
  const Manifest manifest = read_manifest(io, dir).value();
  const ShardEntry& shard = manifest.shards[manifest.shards.size() / 2];
  std::fstream file(dir / manifest.files[shard.file].name, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(shard.offset);
  const char byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(shard.offset);
  file.put(byte);
}

}  // namespace

TEST_SUITE("ckpt/hook") {
  TEST_CASE("ranks killed in the middle of an update go on from the step before, and end on disk") {
    for (const bool torn : {false, true}) {
      const TempDir dir;
      const Plan plan = plan_saving({2, 2, 2}, {.save = {{.steps = 6}}, .snapshot_steps = 2});
      Agent agent(plan, fresh_run_id(), dir.path);
      CHECK(agent.begin().value().source == arena::Source::kFresh);
      const LifeReport first = agent.run({.steps = 20, .die_at = 8, .snapshots_at_death = 5, .torn = torn});
      CHECK_FALSE(first.restored.has_value());

      const RestoreChoice again = agent.begin().value();
      CHECK(again.source == arena::Source::kMemory);
      CHECK(again.step == 6);  // step 8 is whole on five of eight ranks
      CHECK_FALSE(again.weights_ready);
      const LifeReport second = agent.run({.steps = 20, .die_at = 9, .torn = torn});
      REQUIRE(second.restored.has_value());
      CHECK(second.restored->sampler == position_at(6).sampler);
      CHECK(second.restored->seed == position_at(6).seed);
      CHECK(second.restored->lr == position_at(6).lr);
      CHECK(second.restored->tokens == position_at(6).tokens);

      CHECK(agent.begin().value().step == 8);
      const LifeReport third = agent.run({.steps = 20});
      CHECK(third.last_step == 20);
      for (const Status& status : third.finished) CHECK(status.ok());
      const std::vector<int64_t> steps = steps_on_disk(dir.path);
      CHECK(std::count(steps.begin(), steps.end(), 6) == 1);
      CHECK(std::count(steps.begin(), steps.end(), 20) == 1);
      CHECK(third.stats.last_ms > 0);
    }
  }

  TEST_CASE("every step is restorable whatever it is that a kill cuts off, with two banks, three and four") {
    const TempDir dir;
    const Plan plan = plan_saving({2, 1, 2}, {.save = {{.steps = 3}}, .snapshot_steps = 1});
    for (const int64_t slots : {2, 3, 4}) {
      Agent agent(plan, fresh_run_id(), dir.path / std::to_string(slots), {}, 0, slots);
      CHECK(agent.begin().value().source == arena::Source::kFresh);
      int64_t step = 0, ready = 0;
      for (int64_t life = 0; life < 12; ++life) {
        // Dies one or two steps on: before anybody published, after some, after all; the rest with torn updates.
        const int64_t published = life % 5;
        const int64_t dies = step + 1 + life % 2;
        const LifeReport report =
            agent.run({.steps = 1000, .die_at = dies, .snapshots_at_death = published, .torn = life % 3 != 0});
        CHECK(report.restored.has_value() == (step > 0));
        if (report.restored) CHECK(report.restored->step == step);
        step = published == 4 ? dies : dies - 1;
        const RestoreChoice choice = agent.begin().value();
        CHECK(choice.step == step);
        CHECK(choice.weights_ready == (published == 4));  // else somebody's weights are being written
        ready += choice.weights_ready ? 1 : 0;
      }
      CHECK(ready > 0);
    }
  }

  TEST_CASE("a kill before the weights of the last step are there: the step is kept, the weights are made again") {
    const TempDir dir;
    const Plan plan = plan_saving({2, 1, 2}, {.snapshot_steps = 1});
    Agent agent(plan, fresh_run_id(), dir.path);
    REQUIRE(agent.begin().ok());
    agent.run({.steps = 20, .die_at = 5, .snapshots_at_death = 4, .weights_late = true});
    RestoreChoice choice = agent.begin().value();
    CHECK(choice.source == arena::Source::kMemory);
    CHECK(choice.step == 5);
    CHECK_FALSE(choice.weights_ready);
    agent.run({.steps = 20, .die_at = 7, .snapshots_at_death = 4});
    choice = agent.begin().value();
    CHECK(choice.step == 7);
    CHECK(choice.weights_ready);
  }

  TEST_CASE("killed while weights are made again, ranks make them once more: no mark of before is believed") {
    const TempDir dir;
    const Plan plan = plan_saving({2, 1, 2}, {.snapshot_steps = 1});
    Agent agent(plan, fresh_run_id(), dir.path);
    REQUIRE(agent.begin().ok());
    agent.run({.steps = 20, .die_at = 5, .snapshots_at_death = 4});
    agent.arena->control().distrusted = 1;  // all marks say that the weights are those of step 5, and may be wrong
    for (int kill = 0; kill < 2; ++kill) {
      const RestoreChoice choice = agent.begin().value();
      CHECK(choice.step == 5);
      CHECK_FALSE(choice.weights_ready);
    }
    agent.run({.steps = 20, .die_at = 6, .snapshots_at_death = 4});
    CHECK(agent.begin().value().weights_ready);
  }

  TEST_CASE("a rank that died of a wild write: every byte is checked, and the step before it is taken") {
    const TempDir dir;
    const Plan plan = plan_saving({2, 1, 1}, {.snapshot_steps = 1});
    Agent agent(plan, fresh_run_id(), dir.path);
    REQUIRE(agent.begin().ok());
    agent.run({.steps = 20, .die_at = 5, .snapshots_at_death = 2});
    const auto newest = newest_whole(agent.arena->views());
    REQUIRE(newest.has_value());
    std::byte& victim = agent.arena->payload(1, *newest)[agent.arena->shards(1).back().offset + 3];
    victim ^= std::byte{4};
    agent.arena->control().distrusted = 1;
    const RestoreChoice choice = agent.begin().value();
    CHECK(choice.source == arena::Source::kMemory);
    CHECK(choice.step == 4);
    CHECK_FALSE(choice.weights_ready);
    REQUIRE(choice.warnings.size() == 1);
    CHECK(choice.warnings[0].find("step 5, shard") != std::string::npos);
    CHECK(agent.arena->control().distrusted == 0);
    CHECK(agent.begin().value().step == 4);  // the damaged one is not found again
    const LifeReport report = agent.run({.steps = 7});
    CHECK(report.restored.value().step == 4);
  }

  TEST_CASE("a save that only memory has lost is taken from disk, also where that step was passed over before") {
    const TempDir dir;
    const Plan plan = plan_saving({2, 1, 1}, {.save = {{.steps = 4}}, .snapshot_steps = 0});
    {
      Agent agent(plan, fresh_run_id(), dir.path);
      REQUIRE(agent.begin().ok());
      agent.run({.steps = 4});
      REQUIRE(agent.begin().ok());
      agent.run({.steps = 8});
    }
    flip_byte(dir.path / "step-00000008");
    Agent agent(plan, fresh_run_id(), dir.path);
    REQUIRE(agent.begin().value().step == 4);
    agent.run({.steps = 20, .die_at = 9, .snapshots_at_death = 2});
    REQUIRE(agent.persister->flush().ok());
    const auto scribble = [&](int64_t slot) {
      agent.arena->payload(1, slot)[agent.arena->shards(1).back().offset + 3] ^= std::byte{4};
      agent.arena->control().distrusted = 1;
    };
    scribble(*newest_whole(agent.arena->views()));  // step 8; the bank before has step 4
    RestoreChoice choice = agent.begin().value();
    CHECK(choice.source == arena::Source::kDisk);
    CHECK(choice.step == 8);
    const std::vector<SlotView> views = agent.arena->views();
    for (int64_t slot = 0; slot < agent.arena->slots(); ++slot) {
      if (views[slot].whole) scribble(slot);
    }
    choice = agent.begin().value();
    CHECK(choice.source == arena::Source::kDisk);
    CHECK(choice.step == 8);
    CHECK(agent.run({.steps = 9}).restored.value().step == 8);
  }

  TEST_CASE("a new agent takes over the memory of a dead one, or its disk when the memory is gone") {
    const TempDir dir;
    const Plan plan = plan_saving({2, 1, 2}, {.save = {{.steps = 4}}, .snapshot_steps = 1});
    const std::string run_id = fresh_run_id();
    {
      Agent agent(plan, run_id, dir.path);
      REQUIRE(agent.begin().ok());
      agent.run({.steps = 20, .die_at = 6, .snapshots_at_death = 4});
      REQUIRE(agent.persister->flush().ok());  // step 6 was promised to nobody and is written all the same
      CHECK(steps_on_disk(dir.path) == std::vector<int64_t>{4, 6});
    }
    Agent agent(plan, run_id, dir.path);
    const RestoreChoice choice = agent.begin().value();
    CHECK(choice.source == arena::Source::kDisk);
    CHECK(choice.step == 6);
    const LifeReport report = agent.run({.steps = 7});
    REQUIRE(report.restored.has_value());
    CHECK(report.restored->sampler == position_at(6).sampler);
  }

  TEST_CASE("a run goes on in another layout from its checkpoint") {
    const TempDir dir;
    for (const Layout& layout : {Layout{2, 2, 1}, Layout{1, 1, 3}, Layout{4, 1, 1}, Layout{1, 4, 1}, Layout{1, 1, 1}}) {
      const Plan plan = plan_saving(layout, {.save = {{.steps = 2}}});
      Agent agent(plan, fresh_run_id(), dir.path);
      const std::vector<int64_t> steps = steps_on_disk(dir.path);
      const int64_t from = steps.empty() ? 0 : steps.back();
      CHECK(agent.begin().value().step == from);
      const LifeReport report = agent.run({.steps = from + 3});
      CHECK(report.restored.has_value() == (from > 0));
      CHECK(report.finished[0].ok());
    }
  }

  TEST_CASE("a damaged checkpoint is named and the one before is taken; if all are damaged nothing starts") {
    const TempDir dir;
    const Plan plan = plan_saving({2, 1, 1}, {.save = {{.steps = 2}}});
    {
      Agent agent(plan, fresh_run_id(), dir.path);
      REQUIRE(agent.begin().ok());
      for (int64_t steps : {2, 4, 6}) {
        agent.run({.steps = steps});
        REQUIRE(agent.begin().ok());
      }
    }
    REQUIRE(steps_on_disk(dir.path) == std::vector<int64_t>{2, 4, 6});
    flip_byte(dir.path / "step-00000006");
    {
      Agent agent(plan, fresh_run_id(), dir.path);
      const RestoreChoice choice = agent.begin().value();
      CHECK(choice.step == 4);
      REQUIRE(choice.warnings.size() == 1);
      CHECK(choice.warnings[0].find("step-00000006") != std::string::npos);
      CHECK(choice.warnings[0].find("chunk") != std::string::npos);
      LifeReport report;
      REQUIRE(live(plan, *agent.arena, {.steps = 4}, nullptr, report).ok());
      CHECK(report.restored->step == 4);
    }
    flip_byte(dir.path / "step-00000004");
    std::filesystem::resize_file(dir.path / "step-00000002" / "manifest.json", 100);
    Agent agent(plan, fresh_run_id(), dir.path);
    const auto choice = agent.begin();
    REQUIRE_FALSE(choice.ok());
    CHECK(choice.error().code == ErrorCode::kCorrupt);
    for (const char* name : {"step-00000002", "step-00000004", "step-00000006"}) {
      CHECK(choice.error().message.find(name) != std::string::npos);
    }
  }

  TEST_CASE("memory older than the disk stands in for no checkpoint that is whole, and what is passed over is named") {
    const TempDir dir, elsewhere;
    const Plan plan = plan_saving({2, 1, 1}, {.save = {{.steps = 2}}, .snapshot_steps = 1});
    {  // on another machine
      Agent agent(plan, fresh_run_id(), dir.path);
      REQUIRE(agent.begin().ok());
      for (int64_t steps : {2, 4, 6, 8}) {
        agent.run({.steps = steps});
        REQUIRE(agent.begin().ok());
      }
    }
    const auto warned_of = [](const RestoreChoice& choice, const char* step) {
      return std::count_if(choice.warnings.begin(), choice.warnings.end(), [&](const std::string& warning) {
        return warning.find(step) != std::string::npos && warning.find("chunk") != std::string::npos;
      });
    };
    const auto start = [&]() {
      Agent agent(plan, fresh_run_id(), elsewhere.path);
      REQUIRE(agent.begin().ok());
      agent.run({.steps = 20, .die_at = 3, .snapshots_at_death = 2});
      agent.persister->ranks_gone();
      RestoreDecider decider(plan, *agent.arena, agent.io, {dir.path});
      std::filesystem::remove_all(elsewhere.path);
      return decider.next_incarnation().value();
    };
    flip_byte(dir.path / "step-00000008");
    RestoreChoice choice = start();
    CHECK(choice.source == arena::Source::kDisk);
    CHECK(choice.step == 6);
    CHECK(warned_of(choice, "step-00000008") == 1);
    flip_byte(dir.path / "step-00000006");
    std::filesystem::remove_all(dir.path / "step-00000004");
    choice = start();
    CHECK(choice.source == arena::Source::kMemory);
    CHECK(choice.step == 3);
    CHECK(warned_of(choice, "step-00000008") == 1);
    CHECK(warned_of(choice, "step-00000006") == 1);
  }

  TEST_CASE("the agent reads each byte once for all ranks, from any layout into any layout's memory") {
    const std::vector<std::vector<int64_t>> layouts = {{1, 1, 1}, {2, 1, 2}, {1, 2, 2}, {2, 2, 1}};
    for (const auto& from : layouts) {
      const TempDir dir;
      {
        const Plan plan = plan_saving({from[0], from[1], from[2]}, {});
        Agent agent(plan, fresh_run_id(), dir.path);
        REQUIRE(agent.begin().ok());
        agent.run({.steps = 3});
      }
      for (const auto& to : layouts) {
        const Plan plan = plan_saving({to[0], to[1], to[2]}, {.snapshot_steps = 1});
        const std::string run_id = fresh_run_id();
        Agent agent(plan, run_id, dir.path);
        const Result<SlotLoad> loaded = load_slot(plan, *agent.arena, 1, 7, agent.io, dir.path / "step-00000003");
        REQUIRE_OK(loaded);
        CHECK(loaded.value().position.step == 3);
        const int64_t payload = payload_bytes(read_manifest(agent.io, dir.path / "step-00000003").value());
        CHECK(loaded.value().stats.wanted_bytes == payload);
        CHECK(static_cast<double>(loaded.value().stats.read_bytes) <= 1.02 * static_cast<double>(payload));
        const auto snapshot = read_common(*agent.arena, 1, Check::kEveryByte);
        REQUIRE(snapshot.ok());
        CHECK(snapshot.value().step == 3);
        for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
          FakeState state(plan, rank);
          REQUIRE(load_from_memory(plan, *agent.arena, 1, state.tensors()).ok());
          CHECK(state.wrong_elements(3) == 0);
        }
      }
    }
  }

  TEST_CASE("a checkpoint of another model is refused with every difference") {
    const TempDir dir;
    const Plan tied = plan_saving({1, 1, 1}, {});
    {
      Agent agent(tied, fresh_run_id(), dir.path);
      REQUIRE(agent.begin().ok());
      agent.run({.steps = 1});
    }
    const Plan untied = plan_saving({1, 1, 1}, {}, false);
    Agent agent(untied, fresh_run_id(), dir.path);
    const auto choice = agent.begin();
    REQUIRE_FALSE(choice.ok());
    CHECK(choice.error().code == ErrorCode::kInvalidInput);
    CHECK(choice.error().message.find("missing: exp_avg head.weight f32 [65, 24]") != std::string::npos);
  }

  TEST_CASE("a run without state of its own begins with the checkpoint that a person names, and leaves it behind") {
    const TempDir old_run, new_run;
    const Plan plan = plan_saving({2, 1, 1}, {.snapshot_steps = 2});
    {
      Agent agent(plan, fresh_run_id(), old_run.path);
      REQUIRE(agent.begin().ok());
      agent.run({.steps = 5});
    }
    Agent agent(plan, fresh_run_id(), new_run.path, old_run.path / "step-00000005");
    CHECK(agent.begin().value().step == 5);
    agent.run({.steps = 20, .die_at = 6});
    const RestoreChoice again = agent.begin().value();
    CHECK(again.source == arena::Source::kMemory);  // where the agent has read it to
    CHECK(again.step == 5);
    agent.run({.steps = 20, .die_at = 9});
    const RestoreChoice third = agent.begin().value();
    CHECK(third.source == arena::Source::kMemory);
    CHECK(third.step == 8);
  }

  TEST_CASE("a full disk fails the save by name, frees the slot, and the next save succeeds") {
    const TempDir dir;
    const Plan plan = plan_saving({2, 1, 1}, {.save = {{.steps = 2}}});
    auto arena = Arena::create(arena_spec(plan, {.run_id = fresh_run_id(), .recipe_json = "{}"}).value()).value();
    PosixBackend real;
    std::vector<PersistEvent> events;
    const auto life = [&](const FaultPlan& faults, int64_t steps) {
      NodePersister persister(arena, [&] { return std::make_unique<FaultBackend>(real, faults); }, dir.path,
                              {.on_event = [&](const PersistEvent& event) { events.push_back(event); }});
      PosixBackend io;
      RestoreDecider decider(plan, arena, io, {dir.path});
      REQUIRE(decider.next_incarnation().ok());
      LifeReport report;
      REQUIRE(live(plan, arena, {.steps = steps}, &persister, report).ok());
      return report;
    };
    FaultPlan full = FaultPlan::fail_from(0, ENOSPC);
    full.only = IoOp::kCreate;
    const LifeReport failed = life(full, 2);
    REQUIRE_FALSE(failed.finished[1].ok());
    CHECK(failed.finished[1].error().code == ErrorCode::kNoSpace);
    CHECK(failed.finished[1].error().message.find("the checkpoint of step 2 could not be written") == 0);
    REQUIRE(events.size() == 1);
    CHECK_FALSE(events[0].status.ok());
    CHECK(steps_on_disk(dir.path).empty());
    const LifeReport later = life({}, 4);  // restored from memory, where step 2 still is
    REQUIRE(later.restored.has_value());
    CHECK(later.restored->step == 2);
    CHECK(later.finished[0].ok());
    CHECK(steps_on_disk(dir.path) == std::vector<int64_t>{4});
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("a newest checkpoint that cannot be read now stops the start; a failing disk's is passed over") {
    const TempDir dir;
    const Plan plan = plan_saving({1, 1, 1}, {.save = {{.steps = 1}}});
    PosixBackend real;
    {
      auto arena = Arena::create(arena_spec(plan, {.run_id = fresh_run_id(), .recipe_json = "{}"}).value()).value();
      NodePersister persister(arena, [] { return std::make_unique<PosixBackend>(); }, dir.path, {});
      RestoreDecider decider(plan, arena, real, {dir.path});
      REQUIRE(decider.next_incarnation().ok());
      LifeReport report;
      REQUIRE(live(plan, arena, {.steps = 2}, &persister, report).ok());
      ignore(arena.remove(), "its step 2 is on disk");
    }
    REQUIRE(steps_on_disk(dir.path) == std::vector<int64_t>{1, 2});
    const auto disk_fails = [](int os_errno) { return os_errno != EMFILE && os_errno != EACCES; };
    const auto once_more = [](int tries) { return std::vector(tries, std::chrono::milliseconds(0)); };
    for (const auto& [os_errno, tries] :
         {std::pair(EMFILE, 0), std::pair(EACCES, 0), std::pair(EIO, 0), std::pair(EIO, 1), std::pair(ENODATA, 0),
          std::pair(EREMOTEIO, 0), std::pair(EILSEQ, 0), std::pair(EUCLEAN, 0), std::pair(EBADMSG, 0)}) {
      CAPTURE(os_errno);
      CAPTURE(tries);
      int64_t older = 0, refused = 0;
      for (int64_t n = 0;; ++n) {
        auto arena = Arena::create(arena_spec(plan, {.run_id = fresh_run_id(), .recipe_json = "{}"}).value()).value();
        FaultBackend io(real, FaultPlan::fail_call(n, os_errno));
        RestoreDecider decider(plan, arena, io, {.checkpoints_dir = dir.path, .read_again = once_more(tries)});
        const Result<RestoreChoice> choice = decider.next_incarnation();
        ignore(arena.remove(), "end of the case");
        if (choice.ok() && choice.value().step == 1) {
          ++older;
          CAPTURE(n);
          CHECK_MESSAGE(disk_fails(os_errno), choice.value().warnings.at(0));
        }
        if (!choice.ok()) {
          ++refused;
          CHECK_MESSAGE(choice.error().os_errno == os_errno, choice.error().message);
        }
        if (!io.fired()) {
          CHECK(choice.value().step == 2);
          break;
        }
      }
      CHECK((older > 0) == (disk_fails(os_errno) && tries == 0));  // what comes back was no damage
      CHECK(refused > 0);
    }
  }

  TEST_CASE("saves that come faster than the disk: two banks are always left to training, and the newest state wins") {
    const Plan plan = plan_saving({1, 1, 1}, {.save = {{.steps = 1}}, .snapshot_steps = 1});
    for (const int64_t slots : {3, 4}) {
      ArenaSpec spec = arena_spec(plan, {.run_id = fresh_run_id(), .recipe_json = "{}"}).value();
      spec.slots = slots;
      auto arena = Arena::create(spec).value();
      const TempDir dir;
      PosixBackend io;
      const SystemClock clock;
      RestoreDecider decider(plan, arena, io, {dir.path});
      REQUIRE(decider.next_incarnation().ok());
      auto hook = SharedMemoryHook::make(plan, 0, arena, clock).value();  // no persister: promises stay
      const auto memory = FakeState::memory_of(*hook, plan, 0).value();
      FakeState state(plan, 0, memory);
      int64_t bank = 0;
      const auto step = [&](int64_t number, bool last = false) {
        bank = hook->next_bank(bank).value();
        REQUIRE(arena.control().reserved[bank] == 0);
        REQUIRE(hook->begin_update(bank, number).ok());
        state.advance_to(number, bank);
        const trainer::StepOrder order = hook->decide(position_at(number), last).value();
        CHECK(order.snapshot);
        REQUIRE(hook->snapshot(order, position_at(number), bank, state.tensors(bank), state.sums(bank)).ok());
        return order;
      };
      int64_t number = 0;
      for (int64_t k = 0; k < slots - 2; ++k) CHECK(step(++number).persist);
      for (int64_t k = 0; k < 5; ++k) CHECK_FALSE(step(++number).persist);  // nothing waits
      CHECK(hook->stats().put_off == 5);
      for (int64_t slot = 0; slot < slots; ++slot) {  // the agent has written one of them
        if (arena.control().reserved[slot] == 1) arena.control().reserved[slot] = 0;
      }
      CHECK(step(++number).persist);
      CHECK(arena.control().reserved[bank] == number);
      const trainer::StepOrder last = step(++number, true);
      CHECK(last.persist);
      CHECK(arena.control().reserved[bank] == number);
      ignore(arena.remove(), "end of the test");
    }
  }

  TEST_CASE("with two banks an update waits for the disk, and is told to have; too long a wait goes on in place") {
    Plan plan = plan_saving({1, 1, 1}, {.save = {{.steps = 100}}, .snapshot_steps = 1});
    plan.recipe.restart.deadline_s = 0.1;  // the other ranks' patience: half of it is waited
    ArenaSpec spec = arena_spec(plan, {.run_id = fresh_run_id(), .recipe_json = "{}"}).value();
    spec.slots = 2;
    auto arena = Arena::create(spec).value();
    const TempDir dir;
    PosixBackend io;
    const SystemClock clock;
    RestoreDecider decider(plan, arena, io, {dir.path});
    REQUIRE(decider.next_incarnation().ok());
    auto hook = SharedMemoryHook::make(plan, 0, arena, clock).value();
    const auto memory = FakeState::memory_of(*hook, plan, 0).value();
    FakeState state(plan, 0, memory);
    int64_t bank = 0;
    const auto step = [&](int64_t number) {
      bank = hook->next_bank(bank).value();
      REQUIRE(hook->begin_update(bank, number).ok());
      state.advance_to(number, bank);
      const trainer::StepOrder order = hook->decide(position_at(number), false).value();
      REQUIRE(hook->snapshot(order, position_at(number), bank, state.tensors(bank), state.sums(bank)).ok());
    };
    step(99);
    step(100);
    CHECK(arena.control().reserved[bank] == 100);
    const int64_t saved = bank;
    step(101);
    CHECK(bank != saved);
    const int64_t newest = bank;
    step(102);  // both are taken: waits, and goes on in place
    CHECK(bank == newest);
    CHECK(hook->stats().in_place == 1);
    CHECK(hook->stats().last_ms >= 50);
    CHECK(hook->stats().last_ms < 5000);
    CHECK(arena.views()[saved].whole);  // a kill within step 102 would have found step 100
    std::thread agent([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      arena.control().reserved[saved] = 0;
    });
    agent.join();
    step(103);
    CHECK(bank == saved);
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("a save by time is due by the run's clock, not by that of the ranks' present life") {
    const Plan plan = plan_saving({1, 1, 1}, {.save = {{.seconds = 100}}, .snapshot_steps = 1});
    auto arena = Arena::create(arena_spec(plan, {.run_id = fresh_run_id(), .recipe_json = "{}"}).value()).value();
    struct HandClock final : Clock {
      int64_t now = 1;
      int64_t now_ns() const override { return now; }
      double unix_s() const override { return 0; }
    } clock;
    const TempDir dir;
    PosixBackend io;
    RestoreDecider decider(plan, arena, io, {dir.path});
    int64_t saves = 0;
    for (int64_t life = 0; life < 4; ++life) {  // each of 60 seconds
      REQUIRE(decider.next_incarnation().ok());
      auto hook = SharedMemoryHook::make(plan, 0, arena, clock).value();
      const auto memory = FakeState::memory_of(*hook, plan, 0).value();
      FakeState state(plan, 0, memory);
      const auto found = hook->restore(state.tensors()).value();
      CHECK(found.has_value() == (life > 0));
      int64_t step = found ? found->position.step : 0, bank = found ? found->bank : 0;
      for (int64_t k = 0; k < 6; ++k) {
        clock.now += 10'000'000'000;
        bank = hook->next_bank(bank).value();
        REQUIRE(hook->begin_update(bank, ++step).ok());
        state.advance_to(step, bank);
        const trainer::StepOrder order = hook->decide(position_at(step), false).value();
        REQUIRE(hook->snapshot(order, position_at(step), bank, state.tensors(bank), state.sums(bank)).ok());
        saves += order.persist ? 1 : 0;
        if (order.persist) arena.control().reserved[bank] = 0;  // written at once
      }
    }
    CHECK(saves == 2);  // after 100 s and 200 s of 240
    ignore(arena.remove(), "end of the test");
  }

  TEST_CASE("a checkpoint on disk of any layout loads into any layout, bit for bit") {
    const auto all = layouts();
    for (const bool tied : {true, false}) {
      for (const Layout& source : all) {
        const Plan from = plan_of(source, tied);
        auto memory = std::make_unique<MemoryBackend>();
        MemoryBackend& disk = *memory;
        auto arena = Arena::create(arena_spec(from, {.run_id = fresh_run_id(), .recipe_json = "{}"}).value()).value();
        for (int64_t rank = 0; rank < from.mesh.world(); ++rank) {
          FakeState state(from, rank);
          state.advance_to(7);
          std::vector<std::span<const std::byte>> sources;
          for (const trainer::StateTensor& item : state.tensors()) {
            if (item.primary) sources.emplace_back(address_of(item.data), item.bytes);
          }
          REQUIRE(write_snapshot(arena, rank, 0, 1, 7, encode_position(position_at(7)), sources).ok());
        }
        NodePersister persister(arena, [&] { return std::move(memory); }, "/run", {.low_priority = false});
        const Status flushed = persister.flush();
        REQUIRE_OK(flushed);
        for (const Layout& target : all) {
          const Plan to = plan_of(target, tied);
          RunLoad load(to);
          const auto position = load.read(disk, "/run/step-00000007");
          REQUIRE_OK(position);
          REQUIRE(position.value().sampler == position_at(7).sampler);
          for (int64_t rank = 0; rank < to.mesh.world(); ++rank) {
            FakeState disk_state(to, rank), memory_state(to, rank);
            load.fill(rank, disk_state.tensors());
            REQUIRE(disk_state.wrong_elements(7) == 0);
            REQUIRE(load_from_memory(to, arena, 0, memory_state.tensors()).ok());
            REQUIRE(memory_state.wrong_elements(7) == 0);
          }
        }
        ignore(arena.remove(), "end of the test");
      }
    }
  }
}
