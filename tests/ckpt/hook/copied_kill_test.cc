// Ranks whose snapshots are copied, killed by SIGKILL at random instants: inside copies, passes, updates, publishing.
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <random>

#include "ckpt/snapshot/snapshot.h"
#include "tests/ckpt/hook/mortal_run.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

constexpr int64_t kSteps = 100, kMostRanks = 4;

/// What the ranks of all lives have told, in memory that outlives them.
struct Record {
  std::atomic<int64_t> completed[kMostRanks];                           // the last step whose snapshot a rank has begun
  std::atomic<double> losses[kSteps + 1], norms[kSteps + 1], again[2];  // again: what came otherwise
  std::atomic<int64_t> ended;
};

/// Tells when snapshot() has returned.
class TellingHook final : public ForwardingHook {
 public:
  TellingHook(SharedMemoryHook& hook, std::atomic<int64_t>& completed) : ForwardingHook(hook), completed_(completed) {}
  Status snapshot(const trainer::StepOrder& order, const trainer::TrainPosition& position, int64_t bank,
                  std::span<const trainer::StateTensor> state, std::span<const uint64_t> sums) override {
    RT_TRY(ForwardingHook::snapshot(order, position, bank, state, sums));
    completed_.store(position.step);
    return {};
  }

 private:
  std::atomic<int64_t>& completed_;
};

/// The ranks, in a process of their own. Never returns.
[[noreturn]] void train_in_child(const Plan& plan, const Arena& arena, Record& record) {
  const int64_t world = plan.mesh.world();
  comm::ThreadWorld threads_world(world, comm::Options{.deadline_ms = 60000});
  std::vector<std::unique_ptr<comm::Engine>> engines;
  for (int64_t rank = 0; rank < world; ++rank) engines.push_back(threads_world.engine(rank));
  const SystemClock clock;
  std::atomic<bool> failed = false;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      omp_set_num_threads(1);
      const auto hook = SharedMemoryHook::make(plan, rank, arena, clock).value();
      TellingHook telling(*hook, record.completed[rank]);
      trainer::Environment env{.plan = plan, .rank = rank, .engine = *engines[rank], .hook = telling};
      if (rank == 0) {
        env.on_step = [&](const telemetry::StepMetrics& m) {
          const auto tell = [&](std::atomic<double>& kept, double value, std::atomic<double>& again) {
            if (kept.load() != 0 && kept.load() != value) again = again + 1;
            kept = value;
          };
          tell(record.losses[m.step], m.loss, record.again[0]);
          tell(record.norms[m.step], std::isfinite(m.grad_norm) ? m.grad_norm : -1, record.again[1]);
        };
      }
      if (const auto outcome = trainer::run(env); !outcome.ok()) {
        failed = true;
        std::fprintf(stderr, "rank %d: %s\n", static_cast<int>(rank), outcome.error().message.c_str());
        engines[rank].reset();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  record.ended = 1;
  _exit(failed ? 1 : 0);
}

struct Ended {
  std::vector<double> losses, norms;
  std::vector<std::vector<std::byte>> state;  // of the last step, by rank
};

/// Trains to the end; each of the first `kills` lives is killed at some moment.
Ended train(const Plan& plan, int64_t kills, std::mt19937& random, std::vector<int64_t>* lost = nullptr) {
  const int64_t world = plan.mesh.world();
  void* const raw = mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(raw != MAP_FAILED);
  Record& record = *new (raw) Record{};
  const TempDir dir;
  PosixBackend io;
  auto made = Arena::create(
      arena_spec(plan, {.run_name = "fake", .run_id = fresh_run_id(), .recipe_json = "{}", .recipe_hash = "r"})
          .value());
  REQUIRE_OK(made);
  Arena& arena = made.value();
  RestoreDecider decider(plan, arena, io, RestoreRequest{dir.path});
  int64_t killed = 0, life_us = 25'000;
  for (bool done = false; !done;) {
    int64_t completed = kSteps;
    for (int64_t rank = 0; rank < world; ++rank) completed = std::min(completed, record.completed[rank].load());
    for (int64_t slot = 0; slot < arena.slots(); ++slot) arena.control().reserved[slot] = 0;  // nobody persists here
    const RestoreChoice choice = decider.next_incarnation().value();
    CHECK(choice.step >= completed - 1);
    if (killed > 0 && lost != nullptr) lost->push_back(completed - choice.step);
    if (choice.step == kSteps) break;
    for (int64_t rank = 0; rank < world; ++rank) record.completed[rank] = choice.step;
    const pid_t child = fork();
    if (child == 0) train_in_child(plan, arena, record);
    if (killed < kills) {
      ::usleep(static_cast<useconds_t>(random() % static_cast<uint64_t>(life_us)));
      if (record.ended == 0) kill(child, SIGKILL);
    } else {
      // The last save has nobody to write it: the ranks have ended when its copy is complete.
      while (record.completed[0] < kSteps) ::usleep(1000);
      for (bool whole = false; !whole; ::usleep(1000)) {
        const std::vector<SlotView> views = arena.views();
        const auto newest = newest_whole(views);
        whole = newest && views[*newest].step == kSteps;
      }
      kill(child, SIGKILL);
      done = true;
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    ++killed;
    life_us = std::min<int64_t>(life_us + 1000, 60'000);  // far enough to get on
  }
  Ended out;
  for (int64_t step = 1; step <= kSteps; ++step) {
    out.losses.push_back(record.losses[step]);
    out.norms.push_back(record.norms[step]);
  }
  CHECK(record.again[0] == 0);  // what was trained twice came out twice
  CHECK(record.again[1] == 0);
  const auto newest = newest_whole(arena.views());
  REQUIRE(newest.has_value());
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto slot = arena.payload(rank, *newest);
    out.state.emplace_back(slot.begin(), slot.end());
    CHECK(read_slot(arena, rank, *newest, Check::kEveryByte).ok());
  }
  ignore(arena.remove(), "end of the test");
  munmap(raw, sizeof(Record));
  return out;
}

}  // namespace

TEST_SUITE("ckpt/hook/copied_kill") {
  TEST_CASE("killed at random instants: never more than one step before the last that all completed, the same bits") {
    std::mt19937 random(20);
    for (const auto& [world, zero, precision] :
         {std::tuple(1, 0, Precision::kF32), std::tuple(2, 0, Precision::kBf16), std::tuple(2, 1, Precision::kF32),
          std::tuple(4, 2, Precision::kF16)}) {
      CAPTURE(world);
      Recipe recipe = short_recipe(true, true);
      recipe.stop = {Span::Unit::kSteps, kSteps};
      recipe.precision = precision;
      recipe.optimizer.zero = zero;
      recipe.checkpoint.snapshot_by = SnapshotBy::kCopy;
      const Plan plan = make_plan(recipe, world).value();
      const Ended untouched = train(plan, 0, random);
      std::vector<int64_t> lost;
      const Ended killed = train(plan, 40, random, &lost);
      int64_t told = 0;  // a kill may come between a complete copy and the news of its step
      for (int64_t step = 0; step < kSteps; ++step) {
        if (killed.losses[step] == 0) continue;
        CHECK(killed.losses[step] == untouched.losses[step]);
        CHECK(killed.norms[step] == untouched.norms[step]);
        ++told;
      }
      CHECK(told > kSteps / 2);
      CHECK(killed.state == untouched.state);
      MESSAGE(world << " ranks: " << std::count(lost.begin(), lost.end(), 0) << " kills lost no completed step, "
                    << std::count(lost.begin(), lost.end(), 1) << " lost one");
      CHECK(*std::max_element(lost.begin(), lost.end()) <= 1);
    }
  }
}
