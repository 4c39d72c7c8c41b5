// Real training on the banks of an arena, cut off in the middle of an update, of the gathers behind it, of the making
// of weights after such a kill: what goes on from there is the run that nobody touched, bit for bit.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "tests/ckpt/hook/fake_run.h"
#include "tests/runtime/trainer/harness.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

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

/// The hook of a rank that may die in the middle of a step: for the others it is then gone, and memory stays as it is.
class MortalHook final : public trainer::CheckpointHook {
 public:
  MortalHook(SharedMemoryHook& hook, int64_t rank, const Death& death) : hook_(hook), rank_(rank), death_(death) {}

  Result<trainer::StateMemory> memory(std::span<const trainer::StateTensor> saved,
                                      std::span<const trainer::StateTensor> copies, int64_t weight_bytes) override {
    return hook_.memory(saved, copies, weight_bytes);
  }
  Result<std::optional<trainer::Restored>> restore(std::span<const trainer::StateTensor> state) override {
    return hook_.restore(state);
  }
  Result<int64_t> next_bank(int64_t current) override {
    if (dying_) return Error{ErrorCode::kStopped, "killed by the test"};  // where no other rank has noticed
    return hook_.next_bank(current);
  }
  Status begin_update(int64_t bank, int64_t step) override {
    RT_TRY(hook_.begin_update(bank, step));
    RT_TRY(here(Moment::kBegun, step));
    // The first update may read what others save: they are done with it when the last begins.
    if (!std::exchange(updated_, true)) std::this_thread::sleep_for(std::chrono::milliseconds(4 * rank_));
    return {};
  }
  Result<trainer::StepOrder> decide(const trainer::TrainPosition& position, bool last) override {
    return hook_.decide(position, last);
  }
  Status weights_whole(int64_t step) override {
    RT_TRY(here(Moment::kGathering, step));
    return hook_.weights_whole(step);
  }
  Status snapshot(const trainer::StepOrder& order, const trainer::TrainPosition& position, int64_t bank,
                  std::span<const trainer::StateTensor> state, std::span<const uint64_t> sums) override {
    RT_TRY(here(Moment::kUpdated, position.step));
    return hook_.snapshot(order, position, bank, state, sums);
  }
  Status finish() override { return hook_.finish(); }
  void die() { dying_ = true; }

 private:
  Status here(Moment moment, int64_t step) const {
    if (moment != death_.moment || step != death_.step || rank_ != death_.victim) return {};
    return Error{ErrorCode::kStopped, "killed by the test"};
  }
  SharedMemoryHook& hook_;
  int64_t rank_;
  Death death_;
  bool dying_ = false, updated_ = false;
};

struct Told {
  std::map<int64_t, std::pair<double, double>> steps;  // loss and gradient norm
  std::vector<std::vector<std::byte>> banks;           // of the last snapshot, by rank
};

/// Nothing is left of the weights that an update leaves; padding stays zero.
void poison_weights(const Plan& plan, const Arena& arena) {
  const int64_t elem_bytes = dtype_size_bytes(plan.compute_dtype());
  for (int64_t r = 0; r < plan.mesh.world(); ++r) {
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

/// One life of all ranks, as threads. Whether it ended by itself.
bool live_once(const Plan& plan, Agent& agent, const Death& death, Told* told) {
  const int64_t world = plan.mesh.world();
  comm::ThreadWorld threads_world(world, comm::Options{.deadline_ms = 60000});
  std::vector<std::unique_ptr<comm::Engine>> engines;
  for (int64_t rank = 0; rank < world; ++rank) engines.push_back(threads_world.engine(rank));
  std::vector<Status> ended(world);
  const SystemClock clock;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      omp_set_num_threads(1);
      HookOptions options{.notify =
                              [&](const SnapshotNotice& notice) {
                                agent.persister->notify(notice);
                                return Status();
                              },
                          .finish_deadline_s = 60};
      const auto hook = SharedMemoryHook::make(plan, rank, *agent.arena, clock, std::move(options)).value();
      MortalHook mortal(*hook, rank, death);
      trainer::Environment env{.plan = plan, .rank = rank, .engine = *engines[rank], .hook = mortal};
      env.on_phase = [&](int64_t step, const char* what) {
        const bool forward = std::string_view(what) == "forward and backward";
        if (death.moment == Moment::kForward && forward && step == death.step && rank == death.victim) {
          engines[rank]->abort("killed by the test");
          mortal.die();
        }
      };
      if (rank == 0) {
        env.on_step = [&](const telemetry::StepMetrics& m) {
          told->steps[m.step] = {m.loss,
                                 std::isnan(m.grad_norm) ? -1 : m.grad_norm};  // of a skipped step: equals itself
        };
      }
      if (const auto outcome = trainer::run(env); !outcome.ok()) {
        ended[rank] = outcome.error();
        engines[rank].reset();
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
  const auto last = newest_whole(agent.arena->views());
  REQUIRE(last.has_value());
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto bank = agent.arena->payload(rank, *last);
    told->banks.emplace_back(bank.begin(), bank.end());
  }
  return true;
}

/// Trains to the end through these deaths. `from` of each life after the first, and whether its weights were whole.
Told train(const Plan& plan, std::span<const Death> deaths, std::vector<std::pair<int64_t, bool>>* from = nullptr) {
  const TempDir dir;
  Agent agent(plan, fresh_run_id(), dir.path());
  Told told;
  for (size_t life = 0; life <= deaths.size(); ++life) {
    const RestoreChoice choice = agent.begin().value();
    if (life > 0) {
      REQUIRE(choice.source == arena::Source::kMemory);
      if (from != nullptr) from->emplace_back(choice.step, choice.weights_ready);
      if (!choice.weights_ready) poison_weights(plan, *agent.arena);
    }
    const Death death = life < deaths.size() ? deaths[life] : Death{};
    if (live_once(plan, agent, death, &told)) REQUIRE(life == deaths.size());
  }
  return told;
}

void check_killed(const Recipe& recipe, int64_t world) {
  const auto planned = make_plan(recipe, world);
  REQUIRE_MESSAGE(planned.ok(), (planned.ok() ? "" : planned.error().message));
  const Plan& plan = planned.value();
  const Told untouched = train(plan, {});
  REQUIRE(untouched.steps.size() == 7);
  std::vector<std::pair<int64_t, bool>> from;
  const Told killed = train(plan,
                            std::vector<Death>{{Moment::kUpdated, 2, world - 1},
                                               {Moment::kForward, 2, 0},  // while the weights are made
                                               {Moment::kBegun, 3, 0},
                                               {Moment::kForward, 3, world - 1},
                                               {Moment::kGathering, 4, world - 1},
                                               {Moment::kUpdated, 6, 0}},
                            &from);
  const bool gathers = plan.shard_size() > 1 && plan.zero() < 3;  // else the weights were whole before the snapshot
  const std::vector<int64_t> steps = {1, 1, 2, 2, gathers ? 4 : 3, 5};
  for (size_t life = 0; life < steps.size(); ++life) {
    CAPTURE(life);
    CHECK(from.at(life) == std::pair(steps[life], false));
  }
  CHECK(killed.steps == untouched.steps);
  CHECK(killed.banks == untouched.banks);
}

/// State that replicas keep of each other: after a kill it is read where it is saved, by the first update of a life.
void check_copies(const Recipe& recipe, int64_t world, int64_t skipped = 0) {
  const auto planned = make_plan(recipe, world);
  REQUIRE_MESSAGE(planned.ok(), (planned.ok() ? "" : planned.error().message));
  const Plan& plan = planned.value();
  int64_t copied = 0;
  for (int64_t rank = 0; rank < world; ++rank) copied += plan.rank(rank).private_bytes();
  REQUIRE(copied > 0);

  const Told untouched = train(plan, {});
  const auto alone = test::train_on_threads(recipe, world);  // there each rank fills its own copies
  REQUIRE_MESSAGE(alone.ok(), (alone.ok() ? "" : alone.error().message));
  REQUIRE(untouched.steps.size() == alone.value().losses.size());
  for (const auto& [step, told] : untouched.steps) CHECK(told.first == alone.value().losses[step - 1]);
  CHECK(alone.value().position.loss_scale.skipped == skipped);

  const int64_t published = recipe.checkpoint.snapshot_steps == 1 ? 3 : 4;
  const Told killed =
      train(plan, std::vector<Death>{{Moment::kForward, 3, 0},          // of a life's third step
                                     {Moment::kForward, 3, world - 1},  // of its first: nothing is copied
                                     {Moment::kBegun, 3, world - 1},    // some have, their banks are torn
                                     {Moment::kUpdated, published, 0},  // all have, and nobody knows
                                     {Moment::kBegun, 5, 0},
                                     {Moment::kForward, 6, world - 1}});
  CHECK(killed.steps == untouched.steps);
  CHECK(killed.banks == untouched.banks);
}

Recipe short_recipe(bool llama, bool tied) {
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

}  // namespace

TEST_SUITE("ckpt/hook/kill") {
  TEST_CASE("killed inside an update, and again while weights are made anew: the same bits under every ZeRO stage") {
    for (const int zero : {0, 1, 2, 3}) {
      for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
        CAPTURE(zero);
        CAPTURE(precision == Precision::kBf16);
        Recipe recipe = short_recipe(zero % 2 == 0, zero % 2 != 0);
        recipe.precision = precision;
        recipe.optimizer.zero = zero;
        check_killed(recipe, 2);
      }
    }
  }

  TEST_CASE("so it is with tensor and pipeline parallelism, tied embeddings, shard groups, one rank, without overlap") {
    for (const Case& c : {Case{"one rank", 1, 1, 1, 0}, Case{"tp", 2, 1, 1, 0}, Case{"pp, tied", 1, 2, 1, 0},
                          Case{"all", 2, 2, 2, 1}, Case{"all, ZeRO-3", 2, 2, 2, 3, 0, false},
                          Case{"shard groups", 1, 1, 4, 2, 2}, Case{"no overlap", 1, 1, 2, 1, 0, true, false}}) {
      CAPTURE(c.name);
      check_killed(c.recipe(), c.world());
    }
  }

  TEST_CASE("so it is with an average of the weights, QK clip, Adafactor, experts and half precision's loss scale") {
    for (const char* what : {"average", "clip", "Adafactor", "experts", "fp16", "layout"}) {
      CAPTURE(what);
      const std::string_view name = what;
      Recipe recipe = short_recipe(true, false);
      recipe.optimizer.zero = 1;
      if (name == "average") recipe.optimizer.ema = 0.9;
      if (name == "clip") recipe.optimizer.qk_clip = 0.01;
      if (name == "Adafactor") recipe.optimizer.kind = OptimizerKind::kAdafactor;
      if (name == "experts") recipe.model.moe = {.experts = 4, .top_k = 2};
      if (name == "fp16") recipe.precision = Precision::kF16;
      if (name == "layout") recipe.deterministic = Deterministic::kLayout;
      check_killed(recipe, 2);
    }
  }

  TEST_CASE("state kept for other replicas is read where they save it, until an update has put it in its place") {
    for (const Case& c :
         {Case{"dp", 1, 1, 2, 0}, Case{"tp", 2, 1, 2, 0}, Case{"pp, tied", 1, 2, 2, 0}, Case{"groups", 1, 1, 4, 1, 2},
          Case{"groups, ZeRO-2", 1, 1, 4, 2, 2}, Case{"groups, ZeRO-3", 1, 1, 4, 3, 2, false},
          Case{"no overlap", 1, 1, 2, 0, 0, true, false}}) {
      CAPTURE(c.name);
      check_copies(c.recipe(), c.world());
    }
  }

  TEST_CASE("so are they with every optimizer, on a disk, with snapshots now and then, where steps are skipped") {
    for (const char* what : {"bf16", "average", "clip", "LAMB", "Adafactor", "experts", "ep", "disk", "now and then",
                             "fp16", "skips", "skips now and then"}) {
      CAPTURE(what);
      const std::string_view name = what;
      const TempDir disk;
      Recipe recipe = short_recipe(true, false);
      int64_t world = 2, skipped = 0;
      if (name == "bf16") recipe.precision = Precision::kBf16;
      if (name == "average") recipe.optimizer.ema = 0.9;
      if (name == "clip") recipe.optimizer.qk_clip = 0.01;
      if (name == "LAMB") recipe.optimizer.kind = OptimizerKind::kLamb;
      if (name == "Adafactor") recipe.optimizer.kind = OptimizerKind::kAdafactor;
      if (name == "experts" || name == "ep") recipe.model.moe = {.experts = 4, .top_k = 2};
      if (name == "ep") {
        recipe.mesh.ep = 2;
        world = 4;
      }
      if (name == "disk") recipe.optimizer.offload = disk.path();
      if (name.ends_with("now and then")) recipe.checkpoint.snapshot_steps = 2;
      if (name == "fp16" || name.starts_with("skips")) recipe.precision = Precision::kF16;
      if (name.starts_with("skips")) {
        recipe.loss_scale = {.initial = 0x1p24, .hysteresis = 1};
        skipped = 4;
      }
      check_copies(recipe, world, skipped);
    }
  }
}
