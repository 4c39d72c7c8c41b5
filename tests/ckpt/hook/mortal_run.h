#pragma once
// Real training on the arena of an agent, by ranks that are threads and may be cut off in the middle of a step.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "tests/ckpt/hook/fake_run.h"
#include "tests/ckpt/hook/forwarding_hook.h"
#include "tests/runtime/trainer/harness.h"

namespace cairn::ckpt::testing {

enum class Moment {
  kNever,
  kBegun,      // the victim has not begun to update, the others may have: the step before is gone back to
  kUpdated,    // its banks and weights are written, its snapshot is not published: the same
  kGathering,  // all published, but its weights have not come from the others: the step is kept
  kForward,    // of the first step of a life
};

struct Death {
  Moment moment = Moment::kNever;
  int64_t step = 0, victim = 0;
};

/// How often ranks of this process have begun an update, or to end.
inline std::atomic<int64_t> updates_begun = 0;

/// The hook of a rank that may die in the middle of a step: for the others it is then gone, and memory stays as it is.
class MortalHook final : public ForwardingHook {
 public:
  MortalHook(SharedMemoryHook& hook, int64_t rank, const Death& death)
      : ForwardingHook(hook), rank_(rank), death_(death) {}

  Result<int64_t> next_bank(int64_t current) override {
    if (dying_) return Error{ErrorCode::kStopped, "killed by the test"};  // where no other rank has noticed
    return ForwardingHook::next_bank(current);
  }
  Status begin_update(int64_t bank, int64_t step) override {
    RT_TRY(here(Moment::kUpdated, step - 1));  // whose snapshot was left out
    RT_TRY(ForwardingHook::begin_update(bank, step));
    RT_TRY(here(Moment::kBegun, step));
    ++updates_begun;
    // The first update may read what others save: they are done with it when the last begins.
    if (!std::exchange(updated_, true)) std::this_thread::sleep_for(std::chrono::milliseconds(4 * rank_));
    return {};
  }
  Status weights_whole(int64_t step) override {
    RT_TRY(here(Moment::kGathering, step));
    return ForwardingHook::weights_whole(step);
  }
  Status snapshot(const trainer::StepOrder& order, const trainer::TrainPosition& position, int64_t bank,
                  std::span<const trainer::StateTensor> state, std::span<const uint64_t> sums) override {
    RT_TRY(here(Moment::kUpdated, position.step));
    return ForwardingHook::snapshot(order, position, bank, state, sums);
  }
  Status finish() override {
    ++updates_begun;
    return ForwardingHook::finish();
  }
  void release() override {
    ++updates_begun;
    ForwardingHook::release();
  }
  void die() { dying_ = true; }

 private:
  Status here(Moment moment, int64_t step) const {
    if (moment != death_.moment || step != death_.step || rank_ != death_.victim) return {};
    return Error{ErrorCode::kStopped, "killed by the test"};
  }
  int64_t rank_;
  Death death_;
  bool dying_ = false, updated_ = false;
};

struct Told {
  std::map<int64_t, std::pair<double, double>> steps;  // loss and gradient norm
  std::vector<std::vector<std::byte>> banks;           // of the last snapshot, by rank
  std::map<int64_t, int64_t> allocated, on_device;     // of the last life, by rank
  std::set<int64_t> left_out;                          // steps whose snapshot was due and not taken
  std::function<void(int64_t step)> on_step;           // after each, on rank 0
  std::map<int64_t, OpTimes> op_times;                 // by rank; OnDevice::times_ops
};

/// Nothing is left of the weights that an update leaves; padding stays zero.
inline void poison_weights(const Plan& plan, const Arena& arena) {
  if (arena.weights(arena.ranks().first).empty()) return;
  const int64_t elem_bytes = dtype_size_bytes(plan.compute_dtype());
  for (int64_t r = arena.ranks().first; r < arena.ranks().end; ++r) {
    const RankPlan rank = plan.rank(r);
    const auto spoil = [&](int64_t begin, int64_t count) {
      std::memset(arena.weights(r).data() + begin * elem_bytes, 0xff, static_cast<size_t>(count * elem_bytes));
    };
    if (rank.scattered_weights) {
      for (const StatePiece& piece : rank.pieces) spoil(piece.shard_offset, piece.count_elems());
    } else {
      for (const LocalTensor& local : rank.tensors) spoil(local.offset, local.box.count_elems());
    }
  }
}

using MakeLink = std::function<std::unique_ptr<DeviceLink>()>;
/// Of one rank and life.
using MakeMachine = std::function<std::unique_ptr<Machine>(int64_t rank)>;
/// For the memory of a rank's machine; what it is made of outlives it.
using MakeEngine = std::function<std::unique_ptr<comm::Engine>(comm::Engine& of_host, Machine& machine)>;
/// Where the ranks train; empty: on the CPU.
struct OnDevice {
  MakeMachine machine;
  MakeEngine engine;
  bool times_ops = false;
  const trainer::TuningFiles* tuning = nullptr;  // of rank 0, which decides
};

/// HookOptions::ward, by rank.
using WardOf = std::function<std::shared_ptr<const Arena>(int64_t rank)>;

/// One life of all ranks, as threads, each on the arena of its host; `notify` is its agent's. Whether it ended by
/// itself.
inline bool live_on(const Plan& plan, const std::function<Arena&(int64_t rank)>& arena_of,
                    const std::function<void(int64_t rank)>& notify, const Death& death, Told* told,
                    const MakeLink& make_link = {}, const OnDevice& on_device = {}, const WardOf& ward_of = {}) {
  const int64_t world = plan.mesh.world();
  comm::ThreadWorld threads_world(world, comm::Options{.deadline_ms = 60000});
  std::vector<std::unique_ptr<comm::Engine>> engines;
  for (int64_t rank = 0; rank < world; ++rank) engines.push_back(threads_world.engine(rank));
  std::vector<Status> ended(world);
  std::mutex mutex;  // of what ranks write there
  const SystemClock clock;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      omp_set_num_threads(1);
      HookOptions options{
          .on_snapshot = [&](int64_t) { notify(rank); }, .finish_deadline_s = 60, .make_link = make_link};
      if (ward_of) options.ward = ward_of(rank);
      const std::unique_ptr<Machine> machine = on_device.machine ? on_device.machine(rank) : nullptr;
      if (machine != nullptr) options.make_link = [&machine] { return machine->make_link().value(); };
      const auto hook = SharedMemoryHook::make(plan, rank, arena_of(rank), clock, std::move(options)).value();
      MortalHook mortal(*hook, rank, death);
      std::unique_ptr<comm::Engine> for_device;
      if (machine != nullptr && world > 1) for_device = on_device.engine(*engines[rank], *machine);
      trainer::Environment env{
          .plan = plan, .rank = rank, .engine = for_device ? *for_device : *engines[rank], .hook = mortal};
      env.machine = machine.get();
      if (rank == 0) env.tuning = on_device.tuning;
      env.on_phase = [&](int64_t step, const char* what) {
        const bool forward = std::string_view(what) == "forward and backward";
        if (death.moment == Moment::kForward && forward && step == death.step && rank == death.victim) {
          engines[rank]->abort("killed by the test");
          mortal.die();
        }
      };
      if (on_device.times_ops) {
        env.on_op_times = [&, rank](const OpTimes& times) {
          const std::lock_guard lock(mutex);
          told->op_times[rank] = times;
        };
      }
      if (rank == 0) {
        env.on_step = [&](const telemetry::StepMetrics& m) {
          told->steps[m.step] = {m.loss,
                                 std::isnan(m.grad_norm) ? -1 : m.grad_norm};  // of a skipped step: equals itself
          if (m.snapshot_left_out) told->left_out.insert(m.step);
          if (told->on_step) told->on_step(m.step);
        };
      }
      if (const auto outcome = trainer::run(env); !outcome.ok()) {
        ended[rank] = outcome.error();
        for_device.reset();
        engines[rank].reset();
      } else {
        const std::lock_guard lock(mutex);
        told->allocated[rank] = outcome.value().allocated_bytes;
        told->on_device[rank] = outcome.value().device_bytes;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : ended) {
    if (status.ok()) continue;
    REQUIRE_MESSAGE(death.moment != Moment::kNever, status.error().message);
    return false;
  }
  REQUIRE(death.moment == Moment::kNever);
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto last = newest_whole(arena_of(rank).views());
    REQUIRE(last.has_value());
    const auto bank = arena_of(rank).payload(rank, *last);
    told->banks.emplace_back(bank.begin(), bank.end());
  }
  return true;
}

inline bool live_once(const Plan& plan, Agent& agent, const Death& death, Told* told, const MakeLink& make_link = {},
                      const OnDevice& on_device = {}) {
  return live_on(
      plan, [&](int64_t) -> Arena& { return *agent.arena; }, [&](int64_t) { agent.persister->notify(); }, death, told,
      make_link, on_device);
}

/// Trains to the end through these deaths. `from` of each life after the first, and whether its weights were whole.
inline Told train(const Plan& plan, std::span<const Death> deaths,
                  std::vector<std::pair<int64_t, bool>>* from = nullptr, const MakeLink& make_link = {},
                  const OnDevice& on_device = {}, std::function<void(int64_t)> on_step = {}) {
  const TempDir dir;
  Agent agent(plan, fresh_run_id(), dir.path);
  Told told;
  told.on_step = std::move(on_step);
  for (size_t life = 0; life <= deaths.size(); ++life) {
    const RestoreChoice choice = agent.begin().value();
    if (life > 0) {
      REQUIRE(choice.source == arena::Source::kMemory);
      if (from != nullptr) from->emplace_back(choice.step, choice.weights_ready);
      if (!choice.weights_ready) poison_weights(plan, *agent.arena);
    }
    const Death death = life < deaths.size() ? deaths[life] : Death{};
    if (live_once(plan, agent, death, &told, make_link, on_device)) REQUIRE(life == deaths.size());
  }
  return told;
}

inline Recipe short_recipe(bool llama, bool tied) {
  Recipe recipe = test::tiny_recipe(llama, tied);
  recipe.stop = {Span::Unit::kSteps, 7};
  recipe.optimizer.lr.clear();
  recipe.optimizer.bucket = 4000;
  recipe.checkpoint = {.snapshot_steps = 1, .direct_io = false};
  return recipe;
}

struct Case {
  const char* name;
  int64_t tp, pp, dp;
  int zero;
  int64_t shard = 0;
  bool tied = true, overlap = true;
  int64_t world() const { return tp * pp * dp; }
  Recipe recipe() const {
    Recipe out = short_recipe(true, tied);
    out.mesh.tp = tp;
    out.mesh.pp = pp;
    out.mesh.shard = shard;
    out.optimizer.zero = zero;
    out.optimizer.overlap = overlap;
    return out;
  }
};

}  // namespace cairn::ckpt::testing
