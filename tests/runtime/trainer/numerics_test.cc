// fp16 with its loss scale, and dropout, in whole training runs.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>

#include "runtime/plan/activations.h"
#include "runtime/plan/communication.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

bool same_bits(const GlobalState& a, const GlobalState& b) {
  return a.size() == b.size() && std::all_of(a.begin(), a.end(), [&](const auto& entry) {
           const auto other = b.find(entry.first);
           return other != b.end() && other->second.size() == entry.second.size() &&
                  std::memcmp(entry.second.data(), other->second.data(), entry.second.size() * 4) == 0;
         });
}

Recipe cut(Recipe recipe, int64_t tp, int64_t pp, int zero, bool sequence_parallel) {
  recipe.mesh.tp = tp;
  recipe.mesh.pp = pp;
  recipe.mesh.sequence_parallel = sequence_parallel;
  recipe.optimizer.zero = zero;
  return recipe;
}

}  // namespace

TEST_SUITE("runtime/trainer/numerics") {
  TEST_CASE("fp16 follows float32 to its rounding, alone and in a mesh") {
    for (const bool llama : {false, true}) {
      Recipe recipe = tiny_recipe(llama, !llama);
      const auto exact = train_on_threads(recipe, 1).value();
      recipe.precision = Precision::kF16;
      for (const int64_t world : {1, 8}) {
        const auto rounded = train_on_threads(world == 1 ? recipe : cut(recipe, 2, 2, 1, true), world);
        REQUIRE_OK(rounded);
        for (size_t k = 0; k < 20; ++k) {  // 11 bits of mantissa: an eighth of what bf16 is allowed
          CHECK(rounded.value().losses[k] == doctest::Approx(exact.losses[k]).epsilon(2e-3));
        }
        CHECK(rounded.value().position.loss_scale ==
              optim::LossScale{.scale = 65536, .good_steps = 20, .hysteresis_left = 2, .skipped = 0});
      }
    }
  }

  TEST_CASE("steps that overflow are skipped, the scale falls, and training goes on as if they had not been") {
    Recipe recipe = tiny_recipe(false, true);
    recipe.precision = Precision::kF16;
    recipe.loss_scale = {.initial = 0x1p40, .window = 4, .hysteresis = 1, .min = 1};
    recipe.stop = {Span::Unit::kSteps, 40};
    const auto skipped_until = [&](const Trained& t) {
      size_t k = 1;
      while (k < t.losses.size() && !std::isfinite(t.norms[k - 1])) ++k;
      return k - 1;
    };
    const auto whole = train_on_threads(recipe, 1).value();
    const size_t first = skipped_until(whole);
    CHECK(first >= 8);
    CHECK(first < 30);
    CHECK(whole.position.loss_scale.skipped >= static_cast<int64_t>(first));
    CHECK(whole.position.loss_scale.scale < 0x1p34);
    CHECK(whole.losses.back() < whole.losses.front() - 0.2);

    SUBCASE("nothing moved until then") {
      Recipe brief = recipe;
      const auto before = train_on_threads(brief, 1, nullptr, static_cast<int64_t>(first)).value();
      brief.loss_scale.initial = 1;
      stop_after(brief, 1);
      const auto one = train_on_threads(brief, 1).value();
      for (const auto& [key, values] : before.state) {
        if (key.first != trainer::StateKind::kWeight) {
          CHECK(std::all_of(values.begin(), values.end(), [](float x) { return x == 0; }));
        }
      }
      CHECK(one.position.loss_scale.skipped == 0);
      CHECK(!same_bits(one.state, before.state));
    }
    SUBCASE("stopped among them and resumed, in place or from bank to bank: the same bits") {
      for (const int64_t stop : {int64_t{3}, static_cast<int64_t>(first) + 1}) {
        for (const int64_t banks : {0, 2}) {
          const auto half = train_on_threads(recipe, 1, nullptr, stop, {}, banks).value();
          const auto rest = train_on_threads(recipe, 1, &half, 0, {}, banks).value();
          CHECK(rest.position.loss_scale == whole.position.loss_scale);
          CHECK(rest.losses.back() == whole.losses.back());
          CHECK(same_bits(rest.state, whole.state));
        }
      }
    }
    SUBCASE("all ranks skip the same steps") {
      const auto meshed = train_on_threads(cut(recipe, 2, 2, 1, true), 8).value();
      CHECK(meshed.position.loss_scale.skipped > 0);
      CHECK(meshed.losses.back() == doctest::Approx(whole.losses.back()).epsilon(5e-3));
    }
  }

  TEST_CASE("an overflow at the smallest scale stops the run") {
    Recipe recipe = tiny_recipe(false, true);
    recipe.precision = Precision::kF16;
    recipe.loss_scale = {.initial = 0x1p36, .window = 4, .hysteresis = 1, .min = 0x1p35};
    const auto stopped = train_on_threads(recipe, 1);
    REQUIRE(!stopped.ok());
    CHECK(stopped.error().code == ErrorCode::kGuard);
    CHECK(stopped.error().message.find("step 2") != std::string::npos);
  }

  TEST_CASE("a group with rate 0 does not move, in any layout; the others move as its rate says") {
    Recipe recipe = tiny_recipe(false, true);
    stop_after(recipe, 3);
    recipe.optimizer.groups = {{.tensors = "*.bias", .weight_decay = 0.5}, {.tensors = "layers.0.*", .lr = 0}};
    const Plan plan = make_plan(recipe, 1).value();
    Recipe still = recipe;
    still.optimizer.peak_lr = 1e-30;
    const auto before = train_on_threads(still, 1).value();
    const auto after = train_on_threads(recipe, 1).value();
    const auto meshed = train_on_threads(cut(recipe, 2, 2, 1, true), 8).value();
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      const auto key = std::make_pair(trainer::StateKind::kWeight, static_cast<int64_t>(t));
      CAPTURE(plan.tensors[t].name);
      const bool frozen = plan.tensors[t].name.starts_with("layers.0.");
      CHECK((after.state.at(key) == before.state.at(key)) == frozen);
      CHECK((meshed.state.at(key) == before.state.at(key)) == frozen);
    }
  }

  TEST_CASE("LAMB learns, alike in every layout, and resumes to the bit") {
    Recipe recipe = tiny_recipe(false, true);
    recipe.optimizer.kind = OptimizerKind::kLamb;
    recipe.optimizer.peak_lr = 6e-2;
    const auto serial = train_on_threads(recipe, 1).value();
    CHECK(serial.losses.back() < serial.losses.front() - 0.3);
    for (const auto& [tp, pp, dp, zero] :
         std::vector<std::array<int64_t, 4>>{{2, 2, 2, 1}, {1, 1, 4, 0}, {1, 2, 2, 3}}) {
      const auto got = train_on_threads(cut(recipe, tp, pp, static_cast<int>(zero), tp > 1), tp * pp * dp).value();
      for (size_t k = 0; k < 20; ++k) CHECK(got.losses[k] == doctest::Approx(serial.losses[k]).epsilon(3e-5));
    }
    const auto half = train_on_threads(recipe, 1, nullptr, 9, {}, 2).value();
    const auto rest = train_on_threads(recipe, 1, &half, 0, {}, 2).value();
    CHECK(same_bits(rest.state, serial.state));
  }

  TEST_CASE("the average of the weights follows its formula, is alike in every layout, and resumes to the bit") {
    using trainer::StateKind;
    Recipe recipe = tiny_recipe(false, true);
    recipe.stop = {Span::Unit::kSteps, 6};
    recipe.precision = Precision::kBf16;  // the average is of the float masters
    recipe.deterministic = Deterministic::kLayout;
    recipe.optimizer.zero = 1;
    const auto plain = train_on_threads(recipe, 1).value();
    recipe.optimizer.ema = 0.75;
    const auto serial = train_on_threads(recipe, 1).value();
    CHECK(serial.losses == plain.losses);
    const Plan plan = make_plan(recipe, 1).value();
    CHECK(plan.checkpoint_bytes == plan.parameters * 16);

    // From the weights after each step, the first of which is the start.
    std::vector<GlobalState> states;
    Recipe still = recipe;
    still.optimizer.peak_lr = 1e-30;
    states.push_back(train_on_threads(still, 1, nullptr, 1).value().state);
    for (int64_t step = 1; step <= 6; ++step)
      states.push_back(train_on_threads(recipe, 1, nullptr, step).value().state);
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      CAPTURE(plan.tensors[t].name);
      const auto weight = [&](size_t step, size_t i) {
        return static_cast<double>(states[step].at({StateKind::kWeight, static_cast<int64_t>(t)})[i]);
      };
      const std::vector<float>& got = serial.state.at({StateKind::kEma, static_cast<int64_t>(t)});
      double worst = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        double wanted = weight(0, i);
        for (size_t step = 1; step <= 6; ++step) wanted = 0.75 * wanted + 0.25 * weight(step, i);
        worst = std::max(worst, std::abs(wanted - static_cast<double>(got[i])));
      }
      CHECK(worst < 1e-6);  // a few roundings of numbers around 1
    }

    for (const auto& [tp, pp, dp, zero] :
         std::vector<std::array<int64_t, 4>>{{1, 1, 4, 1}, {1, 2, 2, 2}, {1, 2, 2, 3}, {1, 4, 1, 1}}) {
      CAPTURE(zero);
      const auto got = train_on_threads(cut(recipe, tp, pp, static_cast<int>(zero), false), tp * pp * dp).value();
      CHECK(same_bits(got.state, serial.state));
    }
    for (const int64_t banks : {0, 2}) {  // in place, and from bank to bank; in another layout as well
      const auto half = train_on_threads(recipe, 1, nullptr, 3, {}, banks).value();
      const auto rest = train_on_threads(cut(recipe, 1, 2, 1, false), 4, &half, 0, {}, banks).value();
      CHECK(same_bits(rest.state, serial.state));
    }
    // Split over tp and without ZeRO, to rounding; memory is what the plan says.
    recipe.deterministic = Deterministic::kRun;
    const Recipe meshed = cut(recipe, 2, 1, 0, true);
    const auto other = train_on_threads(meshed, 4).value();
    const Plan cut_plan = make_plan(meshed, 4).value();
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      const auto key = std::make_pair(StateKind::kEma, static_cast<int64_t>(t));
      for (size_t i = 0; i < serial.state.at(key).size(); i += 7) {
        REQUIRE(std::abs(other.state.at(key)[i] - serial.state.at(key)[i]) < 2e-2F);
      }
    }
    for (int64_t r = 0; r < 4; ++r) {
      const RankPlan rank = cut_plan.rank(r);
      CHECK(rank.bank_bytes() == rank.saved_elems * 16);
      CHECK(other.allocated_bytes[r] == rank.weight_bytes + rank.gathered_bytes + rank.grad_bytes +
                                            rank.optimizer_bytes + largest_stage_buffers_bytes(cut_plan, r) +
                                            cut_plan.boundary_buffers_bytes());
    }
  }

  TEST_CASE("banks on a disk: updates come block by block, each fetched before and released once, to the same bits") {
    /// Counts bytes, and holds that only what was fetched is released.
    class CountingPager final : public Pager {
     public:
      int64_t block_bytes() const override { return 256; }
      void fetch(std::span<const DeviceBytes> areas) override {
        const std::lock_guard lock(mutex_);
        for (const DeviceBytes& area : areas) {
          RT_CHECK(area.size <= block_bytes() && here_.emplace(area.first, area.size).second, "fetched twice");
        }
      }
      void release(std::span<const DeviceBytes> areas, bool written) override {
        const std::lock_guard lock(mutex_);
        for (const DeviceBytes& area : areas) {
          RT_CHECK(here_.erase(area.first) == 1, "released, not fetched");
          (written ? written_ : read_) += area.size;
        }
      }
      int64_t written() const { return written_; }
      int64_t read() const { return read_; }
      bool all_released() const { return here_.empty(); }

     private:
      std::mutex mutex_;
      std::map<DevicePtr<std::byte>, int64_t> here_;
      int64_t written_ = 0, read_ = 0;
    };
    for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kLamb, OptimizerKind::kAdafactor}) {
      for (const double ema : {0.0, 0.5}) {
        Recipe recipe = tiny_recipe(false, true);
        recipe.stop = {Span::Unit::kSteps, 6};
        recipe.optimizer.kind = kind;
        recipe.optimizer.ema = ema;
        recipe.optimizer.qk_clip = ema > 0 ? 1e-3 : 0;  // heads are scaled in each step
        recipe = cut(recipe, 1, 2, 1, false);
        const auto memory = train_on_threads(recipe, 4, nullptr, 0, {}, 2).value();
        CountingPager pager;
        const auto disk = train_on_threads(recipe, 4, nullptr, 0, {}, 2, &pager).value();
        CHECK(same_bits(disk.state, memory.state));
        CHECK(disk.losses == memory.losses);
        CHECK(pager.all_released());
        const int64_t saved = make_plan(recipe, 4).value().checkpoint_bytes;
        CHECK(pager.written() >= 6 * saved);  // more with a second pass: LAMB, heads, the average
        CHECK(pager.read() >= 6 * saved);
        if (kind == OptimizerKind::kAdamW && ema == 0) {
          CHECK(pager.written() == 6 * saved);
          CHECK(pager.read() == 6 * saved);
        }
      }
    }
  }

  TEST_CASE("QK clip holds every head's scores at the threshold, in every layout, and resumes to the bit") {
    for (const bool grouped : {false, true}) {
      CAPTURE(grouped);
      Recipe recipe = tiny_recipe(grouped, true);
      if (grouped) recipe.model.kv_heads = 4;
      recipe.stop = {Span::Unit::kSteps, 8};
      recipe.model.init_std = 0.6;  // scores far above the threshold
      recipe.optimizer.qk_clip = 2.0;
      recipe.deterministic = Deterministic::kLayout;
      recipe.optimizer.zero = 1;
      const auto serial = train_on_threads(recipe, 1).value();
      REQUIRE(serial.max_scores.size() == 8);
      CHECK(serial.max_scores[0] > 10);
      CHECK(serial.max_scores[1] < serial.max_scores[0] / 2);  // scaled to 2, then one update and other samples
      Recipe off = recipe;
      off.optimizer.qk_clip = 1e6;
      const auto unclipped = train_on_threads(off, 1).value();
      CHECK(unclipped.max_scores[0] == serial.max_scores[0]);
      CHECK(unclipped.max_scores[7] > 5 * serial.max_scores[7]);

      for (const auto& [tp, pp, dp, zero] :
           std::vector<std::array<int64_t, 4>>{{1, 1, 4, 1}, {1, 2, 2, 2}, {1, 2, 2, 3}, {1, 4, 1, 1}}) {
        const auto got = train_on_threads(cut(recipe, tp, pp, static_cast<int>(zero), false), tp * pp * dp).value();
        CHECK(same_bits(got.state, serial.state));
        CHECK(got.max_scores == serial.max_scores);
      }
      const auto half = train_on_threads(recipe, 1, nullptr, 4, {}, 2).value();
      const auto rest = train_on_threads(cut(recipe, 1, 1, 1, false), 2, &half, 0, {}, 2).value();
      CHECK(same_bits(rest.state, serial.state));

      recipe.deterministic = Deterministic::kRun;  // tp rounds otherwise; and replicas without ZeRO
      const Recipe meshed = cut(recipe, 2, 2, 0, true);
      const auto other = train_on_threads(meshed, 8).value();
      for (size_t k = 0; k < 8; ++k) CHECK(other.max_scores[k] == doctest::Approx(serial.max_scores[k]).epsilon(2e-2));
      const Plan plan = make_plan(meshed, 8).value();
      for (int64_t r = 0; r < 8; ++r) {
        for (const GroupTraffic& group : step_traffic(plan, plan.rank(r))) {
          if (group.group != kWorldGroup) continue;
          const auto told = std::find_if(other.traffic[r].begin(), other.traffic[r].end(),
                                         [&](const GroupTraffic& g) { return g.group == group.group; });
          REQUIRE(told != other.traffic[r].end());
          CHECK(told->traffic.all_reduce.bytes == 8 * group.traffic.all_reduce.bytes);
        }
      }
    }
  }

  TEST_CASE("dropout keeps the trajectory in every layout and over a restart") {
    Recipe recipe = tiny_recipe(false, true);
    const auto dry = train_on_threads(recipe, 1).value();
    recipe.model.embedding_dropout = recipe.model.attention_dropout = recipe.model.residual_dropout = 0.1;
    const auto wet = train_on_threads(recipe, 1).value();
    CHECK(wet.losses.front() != dry.losses.front());
    CHECK(wet.losses.back() < wet.losses.front() - 0.3);
    struct Layout {
      int64_t tp, pp, dp;
      int zero;
      bool sequence_parallel;
    };
    for (const Layout& l :
         {Layout{2, 2, 1, 0, true}, Layout{1, 1, 4, 1, false}, Layout{1, 4, 1, 0, false}, Layout{2, 1, 2, 1, false}}) {
      CAPTURE(l.tp);
      CAPTURE(l.pp);
      CAPTURE(l.dp);
      const Recipe layout = cut(recipe, l.tp, l.pp, l.zero, l.sequence_parallel);
      const auto parallel = train_on_threads(layout, l.tp * l.pp * l.dp).value();
      for (size_t k = 0; k < 20; ++k) {
        CHECK(std::abs(parallel.losses[k] - wet.losses[k]) / wet.losses[k] < 1e-5);
      }
    }
    const auto half = train_on_threads(recipe, 1, nullptr, 7).value();
    const auto rest = train_on_threads(recipe, 1, &half).value();
    CHECK(same_bits(rest.state, wet.state));

    recipe.eval = {.every_steps = 20, .steps = 1};
    for (DataSource& source : recipe.data.sources) source.valid_path = source.path;
    const auto judged = train_on_threads(recipe, 1).value();
    recipe.model.embedding_dropout = recipe.model.attention_dropout = recipe.model.residual_dropout = 0;

    REQUIRE(judged.valid.size() == 1);
    CHECK(judged.valid[0] < wet.losses.back() + 0.5);  // evaluation drops nothing
  }
}
