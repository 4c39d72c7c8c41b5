// Weights that are made beside the first forward (data_parallel::DataParallel::spread_weights): nothing reads them
// before they are there.

#include <algorithm>
#include <cstring>
#include <thread>

#include "runtime/data_parallel/data_parallel.h"
#include "tests/runtime/nn/stage_testing.h"

using namespace cairn;
using namespace cairn::nn::testing;

TEST_SUITE("runtime/trainer/weights") {
  TEST_CASE("slowly made weights: every unit waits for its own, and is told whole after the last") {
    std::vector<Variant> variants = option_variants();
    variants.push_back({"gpt2", gpt2_recipe()});
    variants.push_back({"llama", llama_recipe()});
    for (auto& [name, recipe] : variants) {
      CAPTURE(name);
      recipe.batch = {.samples = 4, .micro = 2};
      recipe.optimizer.bucket = 2000;
      const Plan plan = plan_of(recipe);
      const Logical weights = draw_weights(plan);
      LoneComm comm;
      Rank ready(plan, 0, comm, weights);
      const std::vector<float> losses = two_micro_batches(ready, plan);

      const std::unique_ptr<Stream> stream = make_cpu_stream();
      std::unique_ptr<data_parallel::DataParallel> listener;
      Rank waiting(plan, 0, comm, weights, true, [&](const RankPlan& rank, float* grads) {
        listener = std::make_unique<data_parallel::DataParallel>(
            *stream, plan, rank, comm::RankGroups{.tp = &comm, .shard = &comm, .replica = &comm},
            data_parallel::Memory{.sums = DevicePtr(grads)});
        return listener.get();
      });
      const std::span<std::byte> used = waiting.weights();
      const std::vector<std::byte> right(used.begin(), used.end());
      for (const LocalTensor& local : waiting.plan().tensors) {  // padding stays zero
        std::memset(used.data() + local.offset * 4, 0xff, static_cast<size_t>(local.box.count_elems() * 4));
      }
      bool whole = false;
      const auto make = [&](Stream&, const Bucket& bucket) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        std::memcpy(used.data() + bucket.shard.begin * 4, right.data() + bucket.shard.begin * 4,
                    static_cast<size_t>(bucket.shard.size() * 4));
      };
      const auto told = [&] {
        whole = std::equal(used.begin(), used.end(), right.begin());
        return Status();
      };
      REQUIRE(listener->spread_weights(make, told).ok());
      listener->begin_pass(true);
      CHECK(two_micro_batches(waiting, plan) == losses);
      REQUIRE(listener->finish().ok());
      CHECK(whole);
      CHECK(std::memcmp(waiting.grads().data(), ready.grads().data(), ready.grads().size() * sizeof(float)) == 0);
    }
  }
}
