// Several ranks on devices that are doubles: any two values of two axes (layouts.h) meet in some run, and it trains as
// the same ranks do on the CPU. First the ranks are threads, and their communication is staged through the host's
// memory. Then they are processes that communicate by the double of NCCL: losses and norms have the same bits.
// CAIRN_ALL_LAYOUTS=1 takes every combination that a world of four and eight ranks allows.
//
// Tolerances as in train_test.cc: 1e-5 relative on losses in float, 1e-2 in bf16; ten times that on norms.

#include <cmath>
#include <cstdlib>

#include "runtime/trainer/state.h"
#include "runtime/trainer/work_shapes.h"
#include "tests/runtime/cuda/train/layouts.h"
#include "tests/runtime/cuda/train/trained_by_nccl.h"
#include "tests/runtime/cuda/train/trained_double.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt::testing;
using namespace cairn::testing;

namespace {

void compare(const Told& cuda, const Told& cpu, double unit) {
  REQUIRE(cuda.steps.size() == kSteps);
  for (const auto& [step, numbers] : cpu.steps) {
    CAPTURE(step);
    CHECK(std::abs(cuda.steps.at(step).first / numbers.first - 1) < unit);
    CHECK(std::abs(cuda.steps.at(step).second / numbers.second - 1) < 10 * unit);
  }
}

}  // namespace

TEST_SUITE("runtime/cuda/train/matrix") {
  TEST_CASE("ranks of every kind of layout train on devices as on the CPU, in the memory that was planned") {
    const bool all = std::getenv("CAIRN_ALL_LAYOUTS") != nullptr;
    const std::vector<Row> accepted = all_rows();
    const std::vector<Row> rows = all ? accepted : pairwise(accepted);
    MESSAGE(rows.size(), " of ", accepted.size());
    CHECK((all || rows.size() <= 40));
    uint64_t seed = 0;
    for (const Row& row : rows) {
      CAPTURE(text_of(row));
      const auto planned = make_plan(recipe_of(row), ranks_of(row));
      REQUIRE_OK(planned);
      const Plan& plan = planned.value();
      std::unique_ptr<Lived> life;
      const Told cuda = train_on_double(plan, ++seed, {}, nullptr, &life);
      compare(cuda, train(plan, {}), plan.recipe.precision == Precision::kF32 ? 1e-5 : 1e-2);
      for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
        CAPTURE(rank);
        auto opened = life->device.open(rank);
        REQUIRE_OK(opened);
        const std::vector<int64_t> blocks = trainer::TrainState::blocks(plan, plan.rank(rank), {});
        CHECK(cuda.on_device.at(rank) == opened.value()->bytes_for(blocks, trainer::work_shapes(plan, rank)));
        CHECK(life->pinned.at(rank) == trainer::staging_rooms(plan, rank).total_bytes());
      }
      CHECK(life->steps[0].allocations == plan.mesh.world());
      for (size_t k = 1; k < life->steps.size(); ++k) {
        CHECK(life->steps[k].allocations == 0);
        CHECK(life->steps[k].pins == 0);
      }
      life.reset();  // the doubles are one at a time
      const TrainedByNccl by_nccl = train_by_nccl(plan, {.seed = seed});
      CHECK(by_nccl.wrong == std::vector<std::string>(static_cast<size_t>(plan.mesh.world()), ""));
      for (const auto& [step, numbers] : cuda.steps) {
        CAPTURE(step);
        CHECK(by_nccl.loss[static_cast<size_t>(step)] == numbers.first);
        CHECK(by_nccl.norm[static_cast<size_t>(step)] == numbers.second);
      }
    }
  }

  TEST_CASE("by NCCL a step moves what the plan says, and a rank allocates once, waits once a step and pins nothing") {
    for (const Row& row : {Row{0, 0, 1, 1, 0, 1, 1, 0}, Row{1, 1, 3, 0, 1, 1, 0, 0}, Row{2, 0, 2, 0, 0, 1, 0, 0}}) {
      CAPTURE(text_of(row));
      std::vector<TrainedByNccl> lives;
      for (const int64_t steps : {2, 3}) {
        Recipe recipe = recipe_of(row);
        recipe.optimizer.lr.clear();
        recipe.stop = {Span::Unit::kSteps, static_cast<double>(steps)};
        const auto planned = make_plan(recipe, ranks_of(row));
        REQUIRE_OK(planned);
        lives.push_back(train_by_nccl(planned.value(), {.seed = 2}));
        CHECK(lives.back().wrong == std::vector<std::string>(static_cast<size_t>(ranks_of(row)), ""));
      }
      const Plan plan = make_plan(recipe_of(row), ranks_of(row)).value();
      for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
        CAPTURE(rank);
        for (const GroupTraffic& planned : step_traffic(plan, plan.rank(rank))) {
          const int64_t found = lives[1].moved(rank, planned.group) - lives[0].moved(rank, planned.group);
          CHECK(found == moved_bytes(planned.traffic));
        }
        const RankCounts& counts = lives[1].counts[static_cast<size_t>(rank)];
        CHECK(counts.allocations == 1);
        CHECK(counts.later_allocations == 0);
        CHECK(counts.later_pins == 0);
        CHECK(counts.waits == 1);
        CHECK(counts.device_bytes == counts.planned_device_bytes);
      }
    }
  }

  TEST_CASE("by NCCL a rank begins its update before the step's one wait, whatever the rule") {
    struct Ranks {
      const char* name;
      Row row;
    };
    for (const Ranks& of : {Ranks{"dp2", {0, 0, 0, 0, 0, 1, 0, 0}},
                            {"dp2-zero1", {0, 0, 1, 0, 0, 1, 0, 0}},
                            {"tp2", {0, 0, 0, 1, 0, 0, 0, 0}},
                            {"pp2", {0, 0, 0, 0, 1, 0, 0, 0}}}) {
      for (const auto& [rule, kind, clip] : {std::tuple("adamw", OptimizerKind::kAdamW, 0.0),
                                             {"lamb", OptimizerKind::kLamb, 0.0},
                                             {"adafactor", OptimizerKind::kAdafactor, 0.0},
                                             {"qk-clip", OptimizerKind::kAdamW, 0.01}}) {
        Recipe recipe = recipe_of(of.row);
        recipe.optimizer.kind = kind;
        recipe.optimizer.qk_clip = clip;
        const auto planned = make_plan(recipe, ranks_of(of.row));
        REQUIRE_OK(planned);
        const TrainedByNccl trained = train_by_nccl(planned.value(), {.seed = 3});
        CHECK(trained.wrong == std::vector<std::string>(static_cast<size_t>(ranks_of(of.row)), ""));
        for (size_t rank = 0; rank < trained.wrong.size(); ++rank) {
          const RankCounts& counts = trained.counts[rank];
          fmt::print("step-order gpt-{}-{} rank={} waits={} waits_before_update={}\n", of.name, rule, rank,
                     counts.waits, counts.waits_before_update);
          CHECK(counts.waits == 1);
          CHECK(counts.waits_before_update == 0);
        }
        const ckpt::testing::Told host = ckpt::testing::train(planned.value(), {});
        for (const auto& [step, numbers] : host.steps) {
          CAPTURE(step);
          CHECK(trained.loss[static_cast<size_t>(step)] == doctest::Approx(numbers.first).epsilon(1e-4));
        }
      }
    }
  }

  TEST_CASE("in registered memory ranks train to the same bits, in whole pieces, with one allocation; none is left") {
    for (const Row& row : {Row{1, 1, 3, 1, 0, 1, 1, 0}, Row{2, 0, 1, 0, 1, 1, 0, 0}}) {
      CAPTURE(text_of(row));
      const auto planned = make_plan(recipe_of(row), ranks_of(row));
      REQUIRE_OK(planned);
      const TrainedByNccl without = train_by_nccl(planned.value(), {.seed = 2});
      const TrainedByNccl with = train_by_nccl(planned.value(), {.seed = 3, .registered = true});
      CHECK(with.wrong == std::vector<std::string>(static_cast<size_t>(ranks_of(row)), ""));
      CHECK(with.loss == without.loss);
      CHECK(with.norm == without.norm);
      for (size_t rank = 0; rank < with.counts.size(); ++rank) {
        CAPTURE(rank);
        const RankCounts& counts = with.counts[rank];
        CHECK(counts.registered > 0);
        CHECK(counts.in_registered > 3 * counts.registered);  // more than their first use
        CHECK(counts.allocations == 1);
        CHECK(counts.later_allocations == 0);
        CHECK(counts.device_bytes == counts.planned_device_bytes);
        CHECK(counts.device_bytes % cuda::kNcclPiece == 0);
        CHECK(without.counts[rank].registered == 0);
      }
    }
  }

  TEST_CASE("a rank that leaves its memory registered is told so by the double") {
    const Plan plan = make_plan(recipe_of({0, 0, 1, 1, 0, 1, 1, 0}), 4).value();
    const TrainedByNccl wrong = train_by_nccl(
        plan, {.seed = 1, .registered = true, .plant = [](int64_t, auto& nccl) { nccl.without_deregistering(); }});
    for (const std::string& one : wrong.wrong)
      CHECK(one.find("is finalized with memory registered") != std::string::npos);
  }

  TEST_CASE("NCCL's own sums: losses as close as any order's, other bits, and the same ones again") {
    bool differs = false;
    for (const Row& row : {Row{0, 0, 2, 0, 0, 1, 0, 0}, Row{1, 1, 3, 1, 0, 1, 1, 0}, Row{2, 0, 0, 1, 1, 0, 0, 0}}) {
      CAPTURE(text_of(row));
      Recipe recipe = recipe_of(row);
      const TrainedByNccl ranked = train_by_nccl(make_plan(recipe, ranks_of(row)).value(), {.seed = 1});
      recipe.sums = Sums::kNccl;
      const auto planned = make_plan(recipe, ranks_of(row));
      REQUIRE_OK(planned);
      const std::vector<std::string> good(static_cast<size_t>(ranks_of(row)), "");
      const TrainedByNccl first = train_by_nccl(planned.value(), {.seed = 2}),
                          second = train_by_nccl(planned.value(), {.seed = 3});
      CHECK(first.wrong == good);
      CHECK(second.wrong == good);
      CHECK(first.loss == second.loss);
      CHECK(first.norm == second.norm);
      differs = differs || first.norm != ranked.norm;
      const double unit = recipe.precision == Precision::kF32 ? 1e-5 : 1e-2;
      for (size_t step = 1; step <= kSteps; ++step) {
        CHECK(std::abs(first.loss[step] / ranked.loss[step] - 1) < unit);
        CHECK(std::abs(first.norm[step] / ranked.norm[step] - 1) < 10 * unit);
      }
      for (int64_t rank = 0; rank < ranks_of(row); ++rank) {
        const RankCounts& counts = first.counts[static_cast<size_t>(rank)];
        CHECK(counts.device_bytes == counts.planned_device_bytes);
        CHECK(counts.later_allocations == 0);
      }
    }
    CHECK(differs);
  }

  TEST_CASE("a rank that asks NCCL in another order, or for messages outside of a group, ends the run with a name") {
    const Plan plan = make_plan(recipe_of({0, 0, 1, 1, 0, 1, 1, 0}), 4).value();
    for (const bool swaps : {true, false}) {
      CAPTURE(swaps);
      const TrainedByNccl ended =
          train_by_nccl(plan, {.seed = 1, .deadline_ms = 1000, .plant = [&](int64_t rank, auto& nccl) {
                                 if (rank == 1 && swaps) nccl.swap_calls(40);
                                 if (!swaps) nccl.without_groups();
                               }});
      for (const std::string& wrong : ended.wrong) {
        CAPTURE(wrong);
        CHECK(wrong.find("].") != std::string::npos);  // "tp[0,1].all_reduce(activations): ..."
      }
    }
  }

  TEST_CASE("each rank waits for its device once a step, and pins no memory after the start") {
    Recipe recipe = recipe_of({0, 0, 1, 0, 1, 1, 0, 0});
    recipe.checkpoint.snapshot_steps = 0;  // else the threads that copy wait too
    recipe.stop = {Span::Unit::kSteps, 6};
    const auto planned = make_plan(recipe, 4);
    REQUIRE_OK(planned);
    std::unique_ptr<Lived> life;
    train_on_double(planned.value(), 6, {}, nullptr, &life);
    REQUIRE(life->steps.size() == 6);
    for (size_t k = 1; k + 1 < 6; ++k) {  // the last one is saved
      CAPTURE(k);
      CHECK(life->own_waits[k] == 1);
      CHECK(life->steps[k].allocations == 0);
      CHECK(life->steps[k].pins == 0);
    }
    int64_t waits = 0;
    for (size_t k = 1; k + 1 < 6; ++k) waits += life->steps[k].waits;
    CHECK(waits <= 4 * 4 + 4);  // of all threads of all ranks; each may be one ahead
  }

  TEST_CASE("killed at each moment of a step: the same bits, a step back at most") {
    Recipe recipe = recipe_of({1, 1, 3, 1, 0, 1, 1, 0});
    recipe.optimizer.bucket = 500;  // state is copied and overwritten in several blocks
    const auto planned = make_plan(recipe, 4);
    REQUIRE_OK(planned);
    const Told untouched = train_on_double(planned.value(), 4);
    const std::vector<Death> deaths = {{Moment::kForward, 2, 1}, {Moment::kUpdated, 3, 3}};
    std::vector<std::pair<int64_t, bool>> from;
    const Told killed = train_on_double(planned.value(), 5, deaths, &from);
    CHECK(killed.steps == untouched.steps);
    CHECK(killed.banks == untouched.banks);
    for (size_t life = 0; life < from.size(); ++life) {
      CAPTURE(life);
      CHECK(from[life].first <= deaths[life].step - 1);
      CHECK(from[life].first >= deaths[life].step - 2);
    }
  }
}
