// Attention by the kernels that timing chooses before the first step, forward and backward apart, on doubles. The
// double of cuDNN computes what Cairn's own kernels compute, so choices show in what was ordered.

#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/tuning/choices.h"
#include "runtime/trainer/state.h"
#include "runtime/trainer/work_shapes.h"
#include "tests/runtime/cuda/train/trained_double.h"
#include "tests/runtime/cuda/train/tuning_files.h"
#include "tests/simt/executor.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt::testing;
namespace simt = cairn::simt;
using cairn::testing::Lived;
using cairn::testing::train_on_double;
using cairn::testing::TuningFilesInMemory;
using cuda::AttentionBy;
using cuda::AttentionPass;

namespace {

constexpr int64_t kSteps = 3;

Recipe small() {
  Recipe out = short_recipe(false, true);
  out.model.layers = 2;
  out.model.heads = out.model.kv_heads = 2;
  out.model.head_dim = 16;
  out.batch = {.samples = 4, .micro = 1};
  out.precision = Precision::kBf16;
  out.device = DeviceChoice::kCuda;
  out.checkpoint.snapshot_by = SnapshotBy::kCopy;
  out.stop = {Span::Unit::kSteps, kSteps};
  return out;
}

Plan plan_of(const Recipe& recipe, int64_t world = 1) {
  auto planned = make_plan(recipe, world);
  REQUIRE_OK(planned);
  return std::move(planned).value();
}

/// Microseconds of a pass by Cairn's own kernels, by warpgroups, by cuDNN.
constexpr simt::AttentionTimes kCudnnForward{.forward = {90, 60, 30}, .backward = {30, 60, 90}},
    kCudnnBackward{.forward = {30, 60, 90}, .backward = {90, 60, 30}},
    kWarpgroupBoth{.forward = {60, 30, 90}, .backward = {60, 30, 90}};

struct Ways {
  std::string card = "Double";
  int64_t library = 91900;
  bool warpgroups = false;
  std::function<void(simt::AttentionDouble&)> plant = {};
  std::span<const Death> deaths = {};
};

struct Trained {
  Told told;
  int64_t built = 0, forward = 0, backward = 0;  // of the library
  int64_t by_warpgroups = 0;                     // passes
};

Trained trained(const Plan& plan, TuningFilesInMemory& files, const simt::AttentionTimes& times,
                const Ways& ways = {}) {
  std::unique_ptr<Lived> life;
  Trained out;
  out.told = train_on_double(plan, 5, ways.deaths, nullptr, &life,
                             {.tuning = &files.files,
                              .card = ways.card,
                              .times_attention = true,
                              .times_warpgroups = ways.warpgroups,
                              .plant_attention = [&](simt::AttentionDouble& attention) {
                                attention.plant(times);
                                attention.use_version(ways.library);
                                if (ways.plant) ways.plant(attention);
                              }});
  const simt::AttentionCounts& counts = life->device.attention.counts();
  out.built = counts.built;
  out.forward = counts.forward;
  out.backward = counts.backward;
  out.by_warpgroups = counts.warpgroups;
  return out;
}

AttentionBy by(const TuningFilesInMemory& files, AttentionPass pass) {
  const std::vector<cuda::ChosenAttention> choices = files.choices().attention;
  REQUIRE(choices.size() == 2);  // layers are alike
  return choices[choices[0].kind.pass == pass ? 0 : 1].timed.by;
}
std::vector<AttentionBy> timed(const TuningFilesInMemory& files, AttentionPass pass) {
  std::vector<AttentionBy> out;
  for (const cuda::ChosenAttention& of : files.choices().attention) {
    if (of.kind.pass != pass) continue;
    for (const auto& [way, us] : of.timed.us) out.push_back(way);
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/cuda/train/attention_tuning") {
  TEST_CASE("forward and backward of attention are by whom the clock says, apart, and a resume takes the file's word") {
    const Plan plan = plan_of(small());
    const int64_t passes = kSteps * plan.micro_batches * plan.recipe.model.layers;
    const Told own = train_on_double(plan, 5);
    for (const bool forward : {true, false}) {
      CAPTURE(forward);
      const simt::AttentionTimes &times = forward ? kCudnnForward : kCudnnBackward,
                                 &others = forward ? kCudnnBackward : kCudnnForward;
      TuningFilesInMemory files;
      const Trained chosen = trained(plan, files, times);
      CHECK(by(files, AttentionPass::kForward) == (forward ? AttentionBy::kCudnn : AttentionBy::kOwn));
      CHECK(by(files, AttentionPass::kBackward) == (forward ? AttentionBy::kOwn : AttentionBy::kCudnn));
      for (const AttentionPass pass : {AttentionPass::kForward, AttentionPass::kBackward}) {
        CHECK(timed(files, pass) == std::vector{AttentionBy::kOwn, AttentionBy::kCudnn});  // each once
      }
      const auto place = files.choices().attention[0].place;
      CHECK(place.card == "Double (4 multiprocessors)");
      CHECK(place.library == 91900);
      CHECK(chosen.built == 2);
      CHECK(chosen.told.steps == own.steps);  // the double's bits are Cairn's own
      REQUIRE(files.lines.size() == 2);
      CHECK(files.lines[1].starts_with(
          "attention on Double (4 multiprocessors), cuDNN 9.19.0: 2 kinds timed; bf16 1 x 16 tokens, 2 heads of 16: "));
      CHECK(files.lines[1].find(forward ? "forward by cudnn (own 91.0 us, cudnn 31.0 us), backward by own (own "
                                        : "forward by own (own 31.0 us, cudnn 91.0 us), backward by cudnn (own ") !=
            std::string::npos);

      files.keep();
      const Trained again = trained(plan, files, others);  // the clock says the contrary now
      CHECK(again.told.steps == chosen.told.steps);
      CHECK(again.built == 1);  // a plan of the other pass is not even made
      CHECK(again.forward == (forward ? passes : 0));
      CHECK(again.backward == (forward ? 0 : passes));
      CHECK(files.written == files.texts[0].second);
      CHECK(files.lines.back().find("2 choices of before; bf16 ") != std::string::npos);
      const std::vector<Death> deaths = {{Moment::kForward, 2, 0}};
      const Trained killed = trained(plan, files, others, {.deaths = deaths});
      CHECK(killed.told.steps == chosen.told.steps);
      CHECK((forward ? killed.backward : killed.forward) == 0);
    }
  }

  TEST_CASE("another card, another cuDNN and none are reported, and their choices are kept beside the new ones") {
    const Plan plan = plan_of(small());
    TuningFilesInMemory files;
    trained(plan, files, kCudnnForward);
    for (const auto& [card, library, words] :
         {std::tuple(std::string("Other"), int64_t{91900}, "Other (4 multiprocessors), cuDNN 9.19.0"),
          {"Double", 92000, "Double (4 multiprocessors), cuDNN 9.20.0"}}) {
      TuningFilesInMemory moved;
      moved.texts = {{"run/tuning.json", files.written}};
      trained(plan, moved, kCudnnBackward, {.card = card, .library = library});
      CHECK(moved.lines.back().starts_with(fmt::format("attention on {}: 2 kinds timed; ", words)));
      CHECK(
          moved.lines.back().ends_with("; the choices of before are for Double (4 multiprocessors), cuDNN 9.19.0: "
                                       "bits differ from theirs from here on"));
      CHECK(moved.choices().attention.size() == 4);
      moved.keep();
      CHECK(trained(plan, moved, kCudnnBackward).backward == 0);  // back on the first card with its choices
    }
  }

  TEST_CASE(
      "a way that is refused, fails, gives other numbers or other bits each time is left out, and the rest is timed") {
    Recipe recipe = small();
    recipe.batch.micro = 2;
    const Plan plan = plan_of(recipe);
    using simt::AttentionFault;
    for (const AttentionFault fault :
         {AttentionFault::kRefused, AttentionFault::kFails, AttentionFault::kWrong, AttentionFault::kNotANumber,
          AttentionFault::kUnsteady, AttentionFault::kUnsteadyEnd}) {
      for (const AttentionPass pass : {AttentionPass::kForward, AttentionPass::kBackward}) {
        CAPTURE(static_cast<int>(fault));
        CAPTURE(static_cast<int>(pass));
        const AttentionPass other =
            pass == AttentionPass::kForward ? AttentionPass::kBackward : AttentionPass::kForward;
        TuningFilesInMemory files;
        trained(plan, files, {.forward = {90, 0, 30}, .backward = {90, 0, 30}},
                {.plant = [&](simt::AttentionDouble& attention) { attention.plant(pass, fault); }});
        CHECK(by(files, pass) == AttentionBy::kOwn);
        CHECK(by(files, other) == AttentionBy::kCudnn);
        CHECK(std::ranges::count(timed(files, pass), AttentionBy::kCudnn) == 0);
      }
    }
  }

  TEST_CASE("Cairn's own kernels stay where the library is hardly faster") {
    TuningFilesInMemory files;
    trained(plan_of(small()), files, {.forward = {199, 0, 197}, .backward = {199, 0, 197}});
    CHECK(by(files, AttentionPass::kForward) == AttentionBy::kOwn);
    CHECK(timed(files, AttentionPass::kBackward) == std::vector{AttentionBy::kOwn, AttentionBy::kCudnn});
  }

  TEST_CASE("the run's own choices of attention go before those of a given file") {
    const Plan plan = plan_of(small());
    TuningFilesInMemory own, given, run;
    trained(plan, own, kCudnnForward);
    trained(plan, given, kCudnnBackward);
    run.texts = {{"run/tuning.json", own.written}, {"fleet.json", given.written}};
    const Trained both = trained(plan, run, kCudnnBackward);
    CHECK(both.forward > 0);
    CHECK(both.backward == 0);
    CHECK(by(run, AttentionPass::kForward) == AttentionBy::kCudnn);
  }

  TEST_CASE("attention by warpgroups is timed where it takes part and the device has them, and not before") {
    CHECK_FALSE(cuda::kTimesWarpgroups);  // no card has run it: docs/gpu.md
    simt::give_warpgroups(true);
    const Plan plan = plan_of(small());
    TuningFilesInMemory without, with;
    trained(plan, without, kWarpgroupBoth);
    CHECK(by(without, AttentionPass::kForward) == AttentionBy::kOwn);
    CHECK(timed(without, AttentionPass::kForward) == std::vector{AttentionBy::kOwn, AttentionBy::kCudnn});
    const Trained chosen = trained(plan, with, kWarpgroupBoth, {.warpgroups = true});
    for (const AttentionPass pass : {AttentionPass::kForward, AttentionPass::kBackward}) {
      CHECK(by(with, pass) == AttentionBy::kWarpgroup);
      CHECK(timed(with, pass) == std::vector{AttentionBy::kOwn, AttentionBy::kWarpgroup, AttentionBy::kCudnn});
    }
    with.keep();
    // Chosen once, it stays, though it takes no part in what is timed.
    const Trained again = trained(plan, with, kCudnnForward);
    CHECK(again.told.steps == chosen.told.steps);
    CHECK(again.by_warpgroups == 2 * kSteps * plan.micro_batches * plan.recipe.model.layers);
    simt::give_warpgroups(false);
    TuningFilesInMemory older;
    trained(plan, older, kWarpgroupBoth, {.warpgroups = true});
    CHECK(timed(older, AttentionPass::kForward) == std::vector{AttentionBy::kOwn, AttentionBy::kCudnn});
  }

  TEST_CASE("all ranks have the first rank's choice of attention") {
    Recipe recipe = small();
    recipe.mesh = {.tp = 1, .pp = 2, .dp = 2};
    const Plan plan = plan_of(recipe, 4);
    TuningFilesInMemory files;
    const Trained chosen = trained(plan, files, kCudnnForward);
    CHECK(by(files, AttentionPass::kForward) == AttentionBy::kCudnn);
    CHECK(chosen.built == 2 + 3);  // one rank times both passes, the others make the plan that was chosen
    files.keep();
    const Trained again = trained(plan, files, kCudnnBackward);
    CHECK(again.told.steps == chosen.told.steps);
    CHECK(again.told.banks == chosen.told.banks);
    CHECK(again.backward == 0);  // on no rank
    CHECK(again.built == 4);
  }

  TEST_CASE("a device without room for cuDNN's workspace is left with Cairn's own kernels") {
    const Plan plan = plan_of(small());
    TuningFilesInMemory elsewhere, files;
    trained(plan, elsewhere, kCudnnForward);
    Lived life(5, 1, {.tuning = &files.files, .times_attention = true});
    auto machine = life.device.open();
    REQUIRE_OK(machine);
    WorkShapes work = trainer::work_shapes(plan, 0);
    REQUIRE(work.attention.size() == 1);
    const std::vector<int64_t> blocks = trainer::TrainState::blocks(plan, plan.rank(0), {});
    const int64_t with = machine.value()->bytes_for(blocks, work);
    work.attention[0].samples = int64_t{1} << 20;  // scores of which no card has memory for
    work.attention[0].head_dim = 16;
    REQUIRE_OK(machine.value()->reserve(blocks, work));
    CHECK(machine.value()->reserved_bytes() < with);
    CHECK(machine.value()->attention() == nullptr);
    CHECK_FALSE(machine.value()->attention_ways()->allows_any());
    // Choices by cuDNN that another device has made stay in the file, and ask for nothing here.
    const Status read = machine.value()->tuning()->read(elsewhere.written, /*uses=*/true);
    CHECK(read.ok());
  }
}
