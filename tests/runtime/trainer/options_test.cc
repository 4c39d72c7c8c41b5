// Training with model options: any layout trains as one rank does, in the memory and with the traffic of the plan.

#include <doctest/doctest.h>

#include <cmath>

#include "runtime/plan/activations.h"
#include "runtime/plan/communication.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

constexpr double kLossTolerance = 1e-5;  // as parity_test.cc: float sums in another order

struct Option {
  const char* name;
  bool llama;
  void (*set)(ModelConfig&);
};

// Together they use every tensor that an option adds, and each way in which a gradient is shared over tp.
const Option kOptions[] = {
    {"alibi, embedding norm", false,
     [](ModelConfig& m) {
       m.positions = Positions::kAlibi;
       m.embedding_norm = true;
     }},
    {"parallel with one norm, part of the head turns in neighbours, head bias", false,
     [](ModelConfig& m) {
       m.block = BlockKind::kParallelShared;
       m.positions = Positions::kRotary;
       m.rope = {.dims = 4, .pairs = RotaryPairs::kInterleaved};
       m.qkv_bias = m.out_bias = false;
       m.tied_embeddings = false;
       m.head_bias = true;
     }},
    {"norms behind the sums, narrow embedding", false,
     [](ModelConfig& m) {
       m.block = BlockKind::kPostNorm;
       m.position_offset = 2;
       m.final_norm = false;
       m.embed_dim = 24;
     }},
    {"norms of q and k, norms on both sides, a window", true,
     [](ModelConfig& m) {
       m.qk_norm = QkNorm::kHead;
       m.block = BlockKind::kSandwich;
       m.sliding_window = 5;
     }},
    {"norms behind the branches, of whole q and k", true,
     [](ModelConfig& m) {
       m.block = BlockKind::kOutNorm;
       m.qk_norm = QkNorm::kWhole;
     }},
    {"LayerNorm of each head, without bias, layers that do not turn", true,
     [](ModelConfig& m) {
       m.norm = NormKind::kLayerNorm;
       m.norm_bias = false;
       m.qk_norm = QkNorm::kHeadLayerNorm;
       m.nope_layers = {1};
     }},
    {"LayerNorm of heads with one weight and one bias", false,
     [](ModelConfig& m) {
       m.positions = Positions::kRotary;
       m.qk_norm = QkNorm::kSharedLayerNorm;
     }},
    {"rounded alibi", false,
     [](ModelConfig& m) {
       m.positions = Positions::kAlibi;
       m.alibi = AlibiForm::kRounded;
     }},
    {"weights from 1, caps, factors, another rotary base", true,
     [](ModelConfig& m) {
       m.norm_plus_one = true;
       m.score_cap = 0.5;
       m.logit_cap = 2;
       m.embedding_scale = 3;
       m.branch_scale = 0.7;
       m.sliding_window = 5;
       m.window_layers = {0};
       m.window_rope_theta = 50;
     }},
    {"norms without weights, clipped q, k and v", true,
     [](ModelConfig& m) {
       m.norm_weight = false;
       m.clip_qkv = 0.05;
     }},
    {"sinks, clamped experts and a router with biases, a window", true,
     [](ModelConfig& m) {
       m.attention_sinks = true;
       m.bias = true;
       m.activation = Activation::kSwiGluClamp;
       m.swiglu_limit = 0.05;
       m.sliding_window = 5;
       m.window_layers = {0};
       m.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.01, .ffn = 20, .router_bias = true};
     }},
    {"chunks, warm queries, L2 norms, scaled inputs of experts", true,
     [](ModelConfig& m) {
       m.qk_norm = QkNorm::kL2;
       m.attention_chunk = 5;
       m.chunk_layers = {0};
       m.nope_layers = {1};
       m.temperature_scale = 0.6;
       m.temperature_floor = 3;
       m.moe = {.experts = 4,
                .top_k = 1,
                .renormalise = false,
                .router = RouterKind::kSigmoid,
                .shared_experts = 1,
                .ffn = 20,
                .dense_layers = {0},
                .scale_input = true};
     }},
    {"warm queries in layers that turn", true,
     [](ModelConfig& m) {
       m.temperature_scale = 0.6;
       m.temperature_floor = 3;
       m.temperature_form = TemperatureForm::kMinistral3;
     }},
    {"latent attention, experts", true,
     [](ModelConfig& m) {
       m.kv_heads = m.heads;
       m.mla = {.kv_rank = 24, .q_rank = 20, .nope_dim = 10, .rope_dim = 6, .value_dim = 12};
       m.head_dim = 16;
       m.moe = {.experts = 4,
                .top_k = 2,
                .router = RouterKind::kSigmoid,
                .ffn = 20,
                .dense_layers = {0},
                .choice_bias = true};
     }},
    {"latent attention, queries from the stream", true,
     [](ModelConfig& m) {
       m.kv_heads = m.heads;
       m.mla = {.kv_rank = 18, .nope_dim = 4, .rope_dim = 8, .value_dim = 12};
       m.head_dim = 12;
     }},
    {"top query layer", false, [](ModelConfig& m) { m.top_query = true; }},
    {"modules that guess further tokens, tied", true,
     [](ModelConfig& m) {
       m.tied_embeddings = true;
       m.mtp = {.depth = 2};
     }},
    {"latent attention, experts, a module that guesses a further token", true,
     [](ModelConfig& m) {
       m.kv_heads = m.heads;
       m.mla = {.kv_rank = 24, .q_rank = 20, .nope_dim = 10, .rope_dim = 6, .value_dim = 12};
       m.head_dim = 16;
       m.moe = {.experts = 4,
                .top_k = 2,
                .router = RouterKind::kSigmoid,
                .shared_experts = 1,
                .ffn = 20,
                .dense_layers = {0},
                .choice_bias = true};
       m.mtp = {.depth = 1, .loss = 0.5};
     }},
    {"experts, balanced", true, [](ModelConfig& m) { m.moe = {.experts = 4, .top_k = 2, .aux_loss = 0.01}; }},
    {"a gated shared expert, a dense layer between narrow experts", true,
     [](ModelConfig& m) {
       m.moe = {.experts = 4, .top_k = 2, .ffn = 20, .dense_layers = {1}, .shared_ffn = 28, .shared_gate = true};
     }},
};

struct Layout {
  int64_t tp, pp, dp;
  int zero;
  bool sequence_parallel;
  int64_t world() const { return tp * pp * dp; }
};
const Layout kLayouts[] = {{2, 2, 1, 0, true}, {4, 1, 1, 1, false}, {2, 1, 2, 3, true}};

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.optimizer.zero = l.zero;
  recipe.mesh.sequence_parallel = l.sequence_parallel;
  return recipe;
}

/// Of the tp groups alone: all calls and bytes of all their collectives.
std::pair<int64_t, int64_t> tp_volume(const std::vector<GroupTraffic>& traffic) {
  std::pair<int64_t, int64_t> out;
  for (const GroupTraffic& g : traffic) {
    if (g.group != kTpGroup) continue;
    for (const Volume& v : {g.traffic.all_reduce, g.traffic.reduce_scatter, g.traffic.all_gather}) {
      out.first += v.bytes;
      out.second += v.calls;
    }
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/trainer/options") {
  TEST_CASE("models with options train alike in every layout, with the plan's memory and traffic") {
    for (const Option& option : kOptions) {
      CAPTURE(option.name);
      Recipe base = tiny_recipe(option.llama, !option.llama);
      option.set(base.model);
      base.stop = {Span::Unit::kSteps, 3};
      base.optimizer.lr.clear();
      // The loss that balances experts is of a micro-batch: all layouts here cut the batch into the same ones.
      base.batch = {.samples = 8, .micro = 2};
      const auto serial = train_on_threads(base, 1);
      REQUIRE_OK(serial);
      CHECK(serial.value().losses.back() < serial.value().losses.front());
      for (const Layout& layout : kLayouts) {
        CAPTURE(layout.tp);
        CAPTURE(layout.pp);
        CAPTURE(layout.zero);
        const Recipe recipe = with(base, layout);
        const Plan plan = make_plan(recipe, layout.world()).value();
        const auto trained = train_on_threads(recipe, layout.world());
        REQUIRE_OK(trained);
        check_allocated(plan, trained.value());
        for (size_t k = 0; k < serial.value().losses.size(); ++k) {
          const double wanted = serial.value().losses[k];
          CHECK(std::abs(trained.value().losses[k] - wanted) < kLossTolerance * wanted);
        }
        CHECK((serial.value().mtp_losses.size() == 3) == (base.model.mtp.depth > 0));
        REQUIRE(trained.value().mtp_losses.size() == serial.value().mtp_losses.size());
        for (size_t k = 0; k < serial.value().mtp_losses.size(); ++k) {
          const double wanted = serial.value().mtp_losses[k];
          CHECK(std::abs(trained.value().mtp_losses[k] - wanted) < kLossTolerance * wanted);
        }
        Recipe longer = recipe;
        longer.stop.value += 1;
        const auto more = train_on_threads(longer, layout.world());
        REQUIRE_OK(more);
        for (int64_t rank = 0; rank < layout.world(); ++rank) {
          const auto after = tp_volume(more.value().traffic[rank]), before = tp_volume(trained.value().traffic[rank]);
          const auto planned = tp_volume(step_traffic(plan, plan.rank(rank)));
          CHECK(after.first - before.first == planned.first);
          CHECK(after.second - before.second == planned.second);
        }
      }
    }
  }
}
