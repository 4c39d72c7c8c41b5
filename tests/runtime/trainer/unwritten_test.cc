// Gradients that the first product of a step overwrites (nn::Parameter::unwritten), against gradients that begin as
// zeros and are added to.

#include <cstring>
#include <limits>

#include "runtime/data_parallel/data_parallel.h"
#include "tests/runtime/nn/stage_testing.h"

using namespace cairn;
using namespace cairn::nn::testing;

TEST_SUITE("runtime/trainer/unwritten") {
  TEST_CASE("a step's gradients do not depend on what lay in their memory, and are the bits of sums from zero") {
    std::vector<Variant> variants = option_variants();
    variants.push_back({"gpt2", gpt2_recipe()});
    variants.push_back({"llama", llama_recipe()});
    for (auto& [name, recipe] : variants) {
      for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
        CAPTURE(name);
        CAPTURE(precision == Precision::kBf16);
        recipe.precision = precision;
        recipe.batch = {.samples = 4, .micro = 2};
        const Plan plan = plan_of(recipe);
        const Logical weights = draw_weights(plan);
        LoneComm comm;
        Rank zeros(plan, 0, comm, weights);
        two_micro_batches(zeros, plan);

        const std::unique_ptr<Stream> stream = make_cpu_stream();
        std::unique_ptr<data_parallel::DataParallel> listener;
        Rank marked(plan, 0, comm, weights, true, [&](const RankPlan& rank, float* grads) {
          listener = std::make_unique<data_parallel::DataParallel>(
              *stream, plan, rank, comm::RankGroups{.tp = &comm, .shard = &comm, .replica = &comm},
              data_parallel::Memory{.sums = DevicePtr(grads)});
          return listener.get();
        });
        for (int step = 0; step < 2; ++step) {  // the second one over the first one's gradients
          if (step == 0) std::ranges::fill(marked.grads(), std::numeric_limits<float>::quiet_NaN());
          listener->begin_pass(true);
          const std::span<const uint8_t> unwritten = listener->unwritten();
          CHECK(std::ranges::count(unwritten, 1) > 0);
          two_micro_batches(marked, plan);
          REQUIRE(listener->finish().ok());
          CHECK(std::ranges::count(unwritten, 1) == 0);
          CHECK(std::memcmp(marked.grads().data(), zeros.grads().data(), zeros.grads().size() * sizeof(float)) == 0);
        }
      }
    }
  }
}
