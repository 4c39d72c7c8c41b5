// Products whose algorithm is chosen by timing before the first step, on doubles: choices decide bits, and a file keeps
// them.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/tuning/choices.h"
#include "tests/runtime/cuda/train/layouts.h"
#include "tests/runtime/cuda/train/trained_double.h"
#include "tests/runtime/cuda/train/tuning_files.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt::testing;
namespace simt = cairn::simt;
using cairn::testing::DoubleWays;
using cairn::testing::Lived;
using cairn::testing::train_on_double;
using Files = cairn::testing::TuningFilesInMemory;
using Proposals = std::vector<simt::BlasDouble::Proposal>;

namespace {

Recipe small() {
  Recipe out = short_recipe(false, true);
  out.model.layers = 2;
  out.batch = {.samples = 4, .micro = 1};
  out.precision = Precision::kF32;
  out.device = DeviceChoice::kCuda;
  out.checkpoint.snapshot_by = SnapshotBy::kCopy;
  out.stop = {Span::Unit::kSteps, 3};
  return out;
}

Plan plan_of(const Recipe& recipe, int64_t world = 1) {
  auto planned = make_plan(recipe, world);
  REQUIRE_OK(planned);
  return std::move(planned).value();
}

struct Trained {
  Told told;
  std::map<uint64_t, int64_t> multiplied;
  int64_t launches = 0, waits = 0;  // of the second step
};

Trained trained(const Plan& plan, Files* files, const Proposals& proposals, const std::string& card = "Double",
                size_t version = 130100, std::span<const Death> deaths = {}) {
  std::unique_ptr<Lived> life;
  Trained out;
  out.told = train_on_double(
      plan, 5, deaths, nullptr, &life,
      {.tuning = files != nullptr ? &files->files : nullptr, .card = card, .plant = [&](simt::BlasDouble& products) {
         products.propose(proposals);
         products.use_version(version);
       }});
  out.multiplied = life->device.products.multiplied();
  if (!deaths.empty()) return out;  // its last life may have one step
  out.launches = life->steps.at(1).launches;
  out.waits = life->own_waits.at(1);
  return out;
}

/// The last of three is the fastest, or the first.
const Proposals kLast = {{.work = 4}, {.work = 2}, {.work = 1}}, kFirst = {{.work = 1}, {.work = 2}, {.work = 4}};

}  // namespace

TEST_SUITE("runtime/cuda/train/tuning") {
  TEST_CASE(
      "products are timed before the first step; with the file of that a run has the same bits, and steps no more") {
    const Plan plan = plan_of(small());
    const Trained first = trained(plan, nullptr, {{}, {}, {}});
    Files files;
    const Trained chosen = trained(plan, &files, kLast);
    REQUIRE(files.lines.size() == 1);
    CHECK(files.lines[0].find(" kinds timed") != std::string::npos);
    CHECK(chosen.told.steps != first.told.steps);  // sums in another order
    for (const auto& [step, numbers] : first.told.steps) {
      CHECK(std::abs(chosen.told.steps.at(step).first / numbers.first - 1) < 1e-5);
    }
    Recipe quiet = small();  // a snapshot's sums are launches too, and the clock decides whether one is left out
    quiet.checkpoint.snapshot_steps = 0;
    Files unused;
    const Trained untimed = trained(plan_of(quiet), nullptr, {{}, {}, {}});
    const Trained timed = trained(plan_of(quiet), &unused, kLast);
    CHECK(timed.launches == untimed.launches);  // a step orders what it ordered
    CHECK(timed.waits == untimed.waits);
    const cuda::TuningChoices choices = files.choices();
    CHECK(choices.products.size() > 10);
    for (const cuda::ChosenProduct& of : choices.products) {
      CAPTURE(cuda::text(of.kind));
      CHECK(of.place.card == "Double (4 multiprocessors)");
      CHECK(of.timed.proposed == 3);
      CHECK(of.timed.choice.algorithm.data[7] == 2);
    }

    files.keep();
    const Trained again = trained(plan, &files, kFirst);  // another one would be chosen now
    CHECK(again.told.steps == chosen.told.steps);
    CHECK(again.told.banks == chosen.told.banks);
    CHECK_FALSE(again.multiplied.contains(0));  // nothing was timed, nor tried
    CHECK(files.lines.back().find("choices of before") != std::string::npos);
    CHECK(files.written == files.texts[0].second);

    // Also through deaths, each life of which reads the file.
    const std::vector<Death> deaths = {{Moment::kForward, 2, 0}, {Moment::kBegun, 3, 0}};
    CHECK(trained(plan, &files, kFirst, "Double", 130100, deaths).told.steps == chosen.told.steps);
  }

  TEST_CASE("a given file fills what the run's own lacks, and the run's own wins") {
    const Plan plan = plan_of(small());
    Files own, given;
    const Trained first = trained(plan, &own, kFirst), last = trained(plan, &given, kLast);
    REQUIRE(first.told.steps != last.told.steps);
    Files run;
    run.texts = {{"fleet.json", given.written}};
    CHECK(trained(plan, &run, kFirst).told.steps == last.told.steps);
    CHECK(run.written == given.written);
    run.texts = {{"run/tuning.json", own.written}, {"fleet.json", given.written}};
    CHECK(trained(plan, &run, kLast).told.steps == first.told.steps);
  }

  TEST_CASE("another card and another library are reported, timed anew and kept beside the choices of before") {
    const Plan plan = plan_of(small());
    Files files;
    trained(plan, &files, kFirst);
    const size_t kinds = files.choices().products.size();
    for (const auto& [card, version] : {std::pair(std::string("Other"), size_t{130100}), {"Double", size_t{130200}}}) {
      Files moved;
      moved.texts = {{"run/tuning.json", files.written}};
      const Trained there = trained(plan, &moved, kLast, card, version);
      CHECK(there.multiplied.at(2) > 0);
      CHECK(
          moved.lines.back() ==
          fmt::format("products on {} (4 multiprocessors), cuBLASLt 13.{}.0: {} kinds timed; the choices of before are "
                      "for Double (4 multiprocessors), cuBLASLt 13.1.0: bits differ from theirs from here on",
                      card, version / 100 % 100, kinds));
      CHECK(moved.choices().products.size() == 2 * kinds);
      moved.keep();
      CHECK(trained(plan, &moved, kFirst, card, version).told.steps == there.told.steps);
    }
  }

  TEST_CASE("all ranks have the same choices: stages time their own products, and the others take them") {
    Recipe recipe = small();
    recipe.mesh = {.tp = 2, .pp = 2, .dp = 1};
    const Plan plan = plan_of(recipe, 4);
    Files files;
    const Trained chosen = trained(plan, &files, kLast);
    const cuda::TuningChoices choices = files.choices();
    for (const cuda::ChosenProduct& of : choices.products) CHECK(of.timed.choice.algorithm.data[7] == 2);
    files.keep();
    const Trained again = trained(plan, &files, kFirst);
    CHECK(again.told.steps == chosen.told.steps);
    CHECK(again.told.banks == chosen.told.banks);
    CHECK_FALSE(again.multiplied.contains(0));  // on no rank
  }

  TEST_CASE("choices that are off stay off until they are wanted, and a damaged file ends the start") {
    const Plan plan = plan_of(small());
    Files files;
    const Trained chosen = trained(plan, &files, kLast), plain = trained(plan, nullptr, {{}, {}, {}});
    files.keep();
    files.files.wish = trainer::TuningWish::kOff;
    CHECK(trained(plan, &files, kLast).told.steps == plain.told.steps);
    CHECK(files.choices().off);
    files.keep();
    files.files.wish = trainer::TuningWish::kKept;
    CHECK(trained(plan, &files, kLast).told.steps == plain.told.steps);
    files.files.wish = trainer::TuningWish::kOn;
    CHECK(trained(plan, &files, kFirst).told.steps == chosen.told.steps);
    CHECK_FALSE(files.choices().off);
  }

  TEST_CASE("a damaged file ends the start with its name, the place in it and what to do") {
    for (const bool given : {false, true}) {
      Files files;
      const Plan plan = plan_of(small());
      trained(plan, &files, kLast);
      std::string broken = files.written;
      broken.resize(broken.size() / 2);
      files.texts = {{"run/tuning.json", given ? files.written : broken}};
      if (given) files.texts.emplace_back("fleet.json", broken);
      std::unique_ptr<Lived> life = std::make_unique<Lived>(5, 1, DoubleWays{.tuning = &files.files});
      const auto machine = life->device.open().value();
      comm::ThreadWorld threads(1);
      const auto alone = threads.engine(0);
      const auto world = alone->exact_group("world", {0}).value();
      const Status read = trainer::tune(*machine->tuning(), *world, 0, &files.files, false, [] { return Status(); });
      REQUIRE_FALSE(read.ok());
      CHECK(read.error().code == ErrorCode::kCorrupt);
      CHECK(read.error().message.starts_with(given ? "fleet.json: byte " : "run/tuning.json: byte "));
      CHECK(read.error().message.ends_with(
          "; bring back a copy of it, or do without it: all is timed anew then, and bits may differ"));
    }
  }
}
