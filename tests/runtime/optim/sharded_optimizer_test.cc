// Whole updates of one rank by each rule, and the order in which they overwrite what is saved.

#include "runtime/optim/sharded_optimizer.h"

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <thread>

#include "runtime/comm/thread_world.h"
#include "tests/runtime/optim/rank_memory.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

struct Rule {
  std::string name;
  std::function<void(Recipe&)> change;
};

const std::vector<Rule> kRules = {
    {"AdamW", [](Recipe&) {}},
    {"LAMB", [](Recipe& r) { r.optimizer.kind = OptimizerKind::kLamb; }},
    {"Adafactor", [](Recipe& r) { r.optimizer.kind = OptimizerKind::kAdafactor; }},
    {"Adafactor without averaged steps",
     [](Recipe& r) {
       r.optimizer.kind = OptimizerKind::kAdafactor;
       r.optimizer.beta1 = 0;
     }},
};

/// A block of a saved tensor: its index in a bank, and which of its blocks.
using Place = std::pair<size_t, size_t>;

}  // namespace

TEST_SUITE("runtime/optim/sharded_optimizer") {
  TEST_CASE("an update first overwrites what is saved in the order that its turns say, and nothing unwaited for") {
    constexpr size_t kBlock = 48;
    for (const Rule& rule : kRules) {
      for (const Recipe& base : {small_recipe(), balanced_recipe()}) {
        CAPTURE(rule.name);
        CAPTURE(base.model.moe.experts);
        Recipe recipe = base;
        rule.change(recipe);
        recipe.optimizer.ema = 0.9;
        recipe.optimizer.qk_clip = 1;
        const Plan plan = make_plan(recipe, 1).value();
        RankMemory memory(plan, 0, 1);
        const std::vector<std::span<float>>& bank = memory.saved[0];
        std::vector<std::vector<float>> before;
        for (const std::span<float> tensor : bank) before.emplace_back(tensor.begin(), tensor.end());
        std::vector<std::vector<bool>> waited;
        for (const auto& tensor : before) waited.emplace_back((tensor.size() + kBlock - 1) / kBlock);
        std::vector<Place> order;
        int64_t early = 0;  // blocks
        RecordingGate gate(kBlock, [&](std::span<const float> area) {
          for (size_t t = 0; t < bank.size(); ++t) {
            for (size_t block = 0; block < waited[t].size(); ++block) {
              const size_t at = block * kBlock, count = std::min(kBlock, bank[t].size() - at);
              early += !waited[t][block] && std::memcmp(&bank[t][at], &before[t][at], count * sizeof(float)) != 0;
            }
          }
          const float* const begin = area.data();
          const auto of = std::ranges::find_if(bank, [&](std::span<float> tensor) {
            return begin >= tensor.data() && begin < tensor.data() + tensor.size();
          });
          REQUIRE(of != bank.end());
          const auto t = static_cast<size_t>(of - bank.begin());
          const size_t first = static_cast<size_t>(begin - of->data()) / kBlock;
          for (size_t block = first; block * kBlock < first * kBlock + area.size(); ++block) {
            if (!waited[t][block]) order.emplace_back(t, block);
            waited[t][block] = true;
          }
        });
        memory.arrays.gate = &gate;
        comm::ThreadWorld threads(1);
        const auto engine = threads.engine(0);
        const auto world = engine->exact_group("world", {0}).value();
        optim::ShardedOptimizer optimizer(*memory.stream, plan, memory.rank, {}, memory.arrays);
        optimizer.clear_max_scores();
        *optimizer.max_scores().address() = 4;  // of the first head, which is scaled
        const Status updated = optimizer.update({.number = 1, .lr = 0.01, .tokens = 16}, *world);
        REQUIRE_OK(updated);
        CHECK(early == 0);
        CHECK(memory.stream->settled() == 0);

        const std::vector<int64_t> turns = optim::overwrite_turns(plan, memory.rank);
        REQUIRE(turns.size() == bank.size());
        std::vector<Place> want;
        for (int64_t turn = 0; turn <= *std::ranges::max_element(turns); ++turn) {
          size_t longest = 0;
          for (size_t t = 0; t < bank.size(); ++t) {
            if (turns[t] == turn) longest = std::max(longest, waited[t].size());
          }
          for (size_t block = 0; block < longest; ++block) {
            for (size_t t = 0; t < bank.size(); ++t) {
              if (turns[t] == turn && block < waited[t].size()) want.emplace_back(t, block);
            }
          }
        }
        CHECK(order == want);
        for (size_t t = 0; t < memory.arrays.banks[0].size(); ++t) CHECK_FALSE(std::ranges::equal(bank[t], before[t]));
      }
    }
  }

  TEST_CASE("a loss that is ruined on one rank keeps all ranks from writing, though every gradient is finite") {
    constexpr int64_t kRanks = 2;
    const Plan plan = make_plan(small_recipe(), kRanks).value();
    for (const bool ruins : {false, true}) {
      CAPTURE(ruins);
      comm::ThreadWorld threads(kRanks, comm::Options{.deadline_ms = 60000});
      std::vector<std::string> wrong(kRanks);
      std::vector<std::thread> ranks;
      for (int64_t r = 0; r < kRanks; ++r) {
        ranks.emplace_back([&, r] {
          RankMemory memory(plan, r, 1);
          RecordingGate gate(48, [](std::span<const float>) {});
          memory.arrays.gate = &gate;
          const auto engine = threads.engine(r);
          const auto dp = engine->group("dp", {0, 1}).value();
          const auto world = engine->exact_group("world", {0, 1}).value();
          optim::ShardedOptimizer optimizer(*memory.stream, plan, memory.rank, {.replica = dp.get()}, memory.arrays);
          const std::span<const float> weights = memory.saved[0].front();
          const std::vector<float> before(weights.begin(), weights.end());
          *optimizer.ruined().address() = ruins && r == 1 ? 1 : 0;
          const kernels::ClipNumbers gradients{.gradient_scale = 1};
          const auto update = [&]() -> Status {
            RT_TRY(optimizer.take_squared_norm(8));
            RT_TRY(optimizer.update_unseen({.number = 1, .lr = 0.01, .gradients = gradients, .tokens = 16}, *world));
            return memory.stream->settle();
          };
          const Status updated = update();
          if (!updated.ok()) wrong[static_cast<size_t>(r)] = updated.error().message;
          if (optimizer.wrote({.gradient_scale = 1.0 / 16}) == ruins) wrong[static_cast<size_t>(r)] += "wrote() ";
          if (std::ranges::equal(weights, before) != ruins) wrong[static_cast<size_t>(r)] += "weights";
        });
      }
      for (std::thread& rank : ranks) rank.join();
      CHECK(wrong == std::vector<std::string>(kRanks));
    }
  }

  TEST_CASE("squares of gradients count once over the ranks that hold them, and those of balancing biases not at all") {
    const Plan plan = make_plan(balanced_recipe(), 2).value();
    ExactSum parts;
    double want = 0;
    for (const int64_t r : {0, 1}) {
      RankMemory memory(plan, r, 1);
      optim::ShardedOptimizer optimizer(*memory.stream, plan, memory.rank, {}, memory.arrays);
      REQUIRE_OK(optimizer.take_squared_norm());
      REQUIRE_OK(memory.stream->settle());
      const ExactSum part = optimizer.squared_norm_part();
      CHECK(part.value() > 0);
      parts.add(part);
      if (r > 0) continue;  // each has all gradients, and the same
      for (const LocalTensor& local : memory.rank.tensors) {
        if (plan.tensors[local.tensor].balances) continue;
        // Without rows of padding, behind them.
        for (const float g : memory.grads.subspan(local.offset, local.box.count_elems()))
          want += static_cast<double>(g) * static_cast<double>(g);
      }
    }
    CHECK(parts.value() == doctest::Approx(want).epsilon(1e-12));
  }
}
