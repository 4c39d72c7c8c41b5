// Counts the steps of real models on the recorder (counted_steps.h) and holds them to bars.
//
//   step_counts                    the test: a line for each model and kind of snapshots, and the bars
//   step_counts --by-name MODEL    launches of MODEL's step by kernel, and calls and bytes by op
//
// CAIRN_STEP_COUNTS_BY_NAME=1 prints the second for all models in the test.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/runtime/cuda/steps/counted_steps.h"
#include "tests/runtime/cuda/steps/models.h"
#include "tests/simt/symbols.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

/// The most that a step may take. A change that lowers a number lowers it here too; none is raised without a reason.
struct Bar {
  const char* model;
  const char* snapshots;
  int64_t launches, update;
  double bytes_gb;
  int64_t waits;
};
// clang-format off
constexpr Bar kBars[] = {
    // model                    snapshots    launches  update  bytes_gb   waits
    {"gpt2-124m",                "never",         289,      1,    14.09,      1},
    {"gpt2-124m",                "default",       311,     23,    14.09,      1},
    {"gpt2-124m-lamb",           "never",         292,      3,    15.58,      1},
    {"gpt2-124m-lamb",           "default",       314,     25,    15.58,      1},
    {"gpt2-124m-adafactor",      "never",         295,      5,    14.09,      1},
    {"gpt2-124m-adafactor",      "default",       302,     12,    14.09,      1},
    {"gpt2-124m-ema",            "never",         290,      2,    15.58,      1},
    {"gpt2-124m-ema",            "default",       319,     31,    15.58,      1},
    {"gpt2-124m-qk-clip",        "never",         304,      2,    14.23,      1},
    {"gpt2-124m-qk-clip",        "default",       326,     24,    14.23,      1},
    {"gpt2-124m-tp2",            "never",         344,      1,    12.98,      1},
    {"gpt2-124m-tp2",            "default",       355,     12,    12.98,      1},
    {"gpt2-1558m",               "never",        1081,      1,    80.33,      1},
    {"gpt2-1558m",               "default",      1128,     48,    80.33,      1},
    {"gpt2-1558m-lamb-ema",      "never",        1085,      4,   117.72,      1},
    {"gpt2-1558m-lamb-ema",      "default",      1132,     51,   117.72,      1},
    {"llama3-8-layers",          "never",         229,      1,   132.29,      1},
    {"llama3-8-layers",          "default",       276,     48,   132.29,      1},
    {"moe-8-experts",            "never",         405,      1,    70.66,      1},
    {"moe-8-experts",            "default",       452,     48,    70.66,      1},
    {"moe-8-experts-fp32",       "never",         405,      1,   112.74,      1},
    {"moe-8-experts-fp32",       "default",       452,     48,   112.74,      1},
    {"moe-8-experts-biases",     "never",         461,      1,    77.70,      1},
    {"moe-8-experts-biases",     "default",       508,     48,    77.70,      1},
    {"moe-8-experts-model-loss", "never",         414,      1,    70.66,      1},
    {"moe-8-experts-model-loss", "default",       461,     48,    70.66,      1},
};
// clang-format on

double gb(int64_t bytes) { return static_cast<double>(bytes) / 1e9; }

/// `keeps_norms`: as on a card with room for all of it.
Plan plan_of(Recipe recipe, bool snapshots, bool keeps_norms) {
  if (!snapshots) recipe.checkpoint.snapshot_steps = 0;
  auto planned = make_plan(recipe, recipe.mesh.tp);
  REQUIRE_OK(planned);
  planned.value().keeps_norms = keeps_norms;
  return std::move(planned).value();
}

/// An ordinary step: with snapshots the one beside the first copy.
StepCount ordinary_step(const NamedModel& model, bool snapshots, bool keeps_norms = true) {
  const Plan plan = plan_of(model.recipe, snapshots, keeps_norms);
  CountedSteps counted = count_steps(plan, snapshots ? 2 : 3, simt::Backing::kNone);
  REQUIRE(counted.steps.size() == (snapshots ? 2 : 3));
  CHECK(counted.misuses == std::vector<std::string>());
  if (!snapshots) {
    CHECK(counted.steps[2].kernels == counted.steps[1].kernels);
    CHECK(counted.steps[2].waits == counted.steps[1].waits);
    CHECK(counted.steps[2].waits_before_update == counted.steps[1].waits_before_update);
  }
  return std::move(counted.steps[1]);
}

std::string line_of(const NamedModel& model, const char* snapshots, const StepCount& of) {
  return fmt::format("step-counts {} snapshots={} launches={} update={} bytes_gb={:.2f} waits={}", model.name,
                     snapshots, of.launches, of.update, gb(of.bytes), of.waits);
}

/// The largest first.
std::string by_name(const StepCount& of) {
  std::vector<std::pair<int64_t, std::string>> kernels;
  for (const auto& [name, launches] : of.kernels) kernels.emplace_back(-launches, name);
  std::sort(kernels.begin(), kernels.end());
  std::string out = "launches  kernel\n";
  for (const auto& [launches, name] : kernels) out += fmt::format("{:8}  {}\n", -launches, name);
  std::vector<std::tuple<int64_t, std::string, int64_t>> ops;
  for (const auto& [name, calls] : of.ops.calls) ops.emplace_back(-calls.bytes, name, calls.calls);
  std::sort(ops.begin(), ops.end());
  out += "      GB    calls  op\n";
  for (const auto& [bytes, name, calls] : ops) out += fmt::format("{:8.3f} {:8}  {}\n", gb(-bytes), calls, name);
  return out;
}

std::string text(const simt::Ordered& of) {
  using Kind = simt::Ordered::Kind;
  std::string out = of.kind == Kind::kKernel    ? simt::name_of(of.kernel)
                    : of.kind == Kind::kProduct ? "(product)"
                    : of.kind == Kind::kFill    ? "(fill)"
                    : of.kind == Kind::kCopy    ? "(copy)"
                                                : "(other)";
  for (const int64_t number : of.numbers) out += fmt::format(" {}", number);
  return out + fmt::format(" on stream {}", of.stream);
}

int print_by_name(const char* wanted) {
  std::string names;
  for (const NamedModel& model : counted_models()) {
    names += " " + model.name;
    if (model.name != wanted) continue;
    for (const bool snapshots : {false, true}) {
      const StepCount step = ordinary_step(model, snapshots);
      fmt::print("{}\n{}\n", line_of(model, snapshots ? "default" : "never", step), by_name(step));
    }
    return 0;
  }
  fmt::print(stderr, "step_counts: no model {}; there are{}\n", wanted, names);
  return 2;
}

}  // namespace

TEST_SUITE("runtime/cuda/steps") {
  TEST_CASE("a recorder gives zeros and reserves no memory; held copies arrive when they are let or waited for") {
    simt::StreamDouble cuda(2, int64_t{1} << 44, simt::Backing::kNone);
    void* memory = nullptr;
    REQUIRE(cuda.allocate(&memory, int64_t{1} << 40) == 0);
    simt::StreamDouble::Stream stream = nullptr;
    simt::StreamDouble::Event* event = nullptr;
    REQUIRE(cuda.create_stream(&stream) == 0);
    REQUIRE(cuda.create_event(&event) == 0);
    std::vector<int64_t> numbers = {7, 8}, snapshot = {7, 8};
    REQUIRE(cuda.pin(numbers.data(), 16) == 0);
    REQUIRE(cuda.pin(snapshot.data(), 16) == 0);
    REQUIRE(cuda.copy(memory, numbers.data(), 16, stream) == 0);
    CHECK(cuda.given(memory).size() == 16);
    REQUIRE(cuda.copy(numbers.data(), memory, 16, stream) == 0);
    CHECK(numbers == std::vector<int64_t>{0, 0});
    cuda.leave_alone(std::as_bytes(std::span(snapshot)));
    const auto copy = [&] {
      REQUIRE(cuda.copy(snapshot.data(), memory, 16, stream) == 0);
      REQUIRE(cuda.record(event, stream) == 0);
    };
    cuda.hold_copies(std::this_thread::get_id());
    copy();
    CHECK(cuda.query(event) == simt::kNotReady);
    CHECK(cuda.let_arrive());
    CHECK_FALSE(cuda.let_arrive());
    CHECK(cuda.synchronize(event) == 0);
    cuda.hold_copies(std::this_thread::get_id());
    copy();
    CHECK(cuda.waited_for_held() == 0);
    CHECK(cuda.synchronize(event) == 0);
    CHECK(cuda.waited_for_held() == 1);
    CHECK(snapshot == std::vector<int64_t>{7, 8});
    CHECK(cuda.misuses() == std::vector<std::string>());
  }

  TEST_CASE("a recorder orders what the double that computes does, with the same numbers, in the same order") {
    for (const NamedModel& model : tiny_models()) {
      CAPTURE(model.name);
      const Plan plan = plan_of(model.recipe, false, true);
      const CountedSteps computed = count_steps(plan, 3, simt::Backing::kMemory, Wanted::kOrdered);
      const CountedSteps recorded = count_steps(plan, 3, simt::Backing::kNone, Wanted::kOrdered);
      CHECK(computed.misuses == std::vector<std::string>());
      REQUIRE(computed.steps.size() == 3);
      REQUIRE(recorded.steps.size() == 3);
      for (size_t step = 0; step < 3; ++step) {
        CAPTURE(step);
        CHECK(recorded.steps[step].kernels == computed.steps[step].kernels);
        CHECK(recorded.steps[step].update == computed.steps[step].update);
        CHECK(recorded.steps[step].waits == computed.steps[step].waits);
        CHECK(recorded.steps[step].waits_before_update == computed.steps[step].waits_before_update);
      }
      CHECK(recorded.ordered.size() == computed.ordered.size());
      const size_t both = std::min(recorded.ordered.size(), computed.ordered.size());
      REQUIRE(both > 100);
      for (size_t k = 0; k < both; ++k) {
        if (recorded.ordered[k] == computed.ordered[k]) continue;
        CAPTURE(k);
        REQUIRE(text(recorded.ordered[k]) == text(computed.ordered[k]));
      }
    }
  }

  TEST_CASE("a step that keeps norms computes each of its layers once; one that does not, again in backward") {
    for (const NamedModel& model : counted_models()) {
      CAPTURE(model.name);
      const StepCount kept = ordinary_step(model, false), again = ordinary_step(model, false, false);
      const auto norms = [](const StepCount& of) {
        int64_t calls = 0;
        for (const auto& [name, op] : of.ops.calls) calls += name.ends_with("_norm_forward") ? op.calls : 0;
        return calls;
      };
      const int64_t layers = model.recipe.model.layers;
      CHECK(norms(kept) == 2 * layers + 2);  // the head's is computed again
      CHECK(norms(again) == 4 * layers + 2);
      CHECK(again.launches - kept.launches == 2 * layers);
    }
  }

  TEST_CASE("a step of each model stays within its bars") {
    const bool prints = std::getenv("CAIRN_STEP_COUNTS_BY_NAME") != nullptr;
    const std::vector<NamedModel> models = counted_models();
    REQUIRE(2 * models.size() == std::size(kBars));
    for (const NamedModel& model : models) {
      for (const char* const snapshots : {"never", "default"}) {
        const auto bar = std::find_if(std::begin(kBars), std::end(kBars), [&](const Bar& of) {
          return model.name == of.model && std::strcmp(of.snapshots, snapshots) == 0;
        });
        REQUIRE(bar != std::end(kBars));
        const StepCount step = ordinary_step(model, std::strcmp(snapshots, "default") == 0);
        const std::string line = line_of(model, snapshots, step);
        fmt::print("{}\n", line);
        std::fflush(stdout);
        for (const std::string& op : step.ops.unsized) {
          FAIL_CHECK("op ", op, " has no size of its call: tests/runtime/cuda/steps/op_bytes.h");
        }
        fmt::print("step-order {} snapshots={} waits_before_update={} collectives={}\n", model.name, snapshots,
                   step.waits_before_update, step.collectives);
        // A step's last wait is behind the update.
        CHECK(step.waits_before_update == bar->waits - 1);
        CHECK(step.update > 0);  // else is_of_update() does not know the rule's op
        const bool within = step.launches <= bar->launches && step.update <= bar->update &&
                            gb(step.bytes) <= bar->bytes_gb + 0.005 && step.waits <= bar->waits;
        CHECK_MESSAGE(within, line, "\nmore than the bars: launches=", bar->launches, " update=", bar->update,
                      " bytes_gb=", bar->bytes_gb, " waits=", bar->waits, "\n", by_name(step));
        if (within && prints) fmt::print("{}\n", by_name(step));
        if (step.launches < bar->launches || step.update < bar->update || gb(step.bytes) < bar->bytes_gb - 0.005 ||
            step.waits < bar->waits) {
          fmt::print("lower than its bars, which may be lowered: launches={} update={} bytes_gb={:.2f} waits={}\n",
                     bar->launches, bar->update, bar->bytes_gb, bar->waits);
        }
      }
    }
  }
}

int main(int argc, char** argv) {
  doctest::Context tests(argc, argv);
  tests.setAsDefaultForAssertsOutOfTestCases();
  return argc == 3 && std::strcmp(argv[1], "--by-name") == 0 ? print_by_name(argv[2]) : tests.run();
}
