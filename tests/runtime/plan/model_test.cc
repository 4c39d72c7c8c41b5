// The options of a model: what tensors they make, and what they demand of each other.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/plan/model_check.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/plan.h"

using namespace cairn;

namespace {

ModelConfig small() {
  return {.layers = 2, .width = 24, .heads = 4, .kv_heads = 4, .head_dim = 6, .ffn = 40, .context = 8, .vocab = 65};
}

/// "name [shape]" of the tensors outside layer 1, where layer 0 stands for all.
std::vector<std::string> listed(const ModelConfig& m) {
  std::vector<std::string> out;
  for (const TensorSpec& t : model_tensors(m)) {
    if (t.name.starts_with("layers.1.")) continue;
    std::string shape;
    for (const int64_t n : t.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(n);
    out.push_back(t.name + " [" + shape + "]");
  }
  return out;
}

bool has(const ModelConfig& m, const std::string& entry) {
  const std::vector<std::string> all = listed(m);
  return std::find(all.begin(), all.end(), entry) != all.end();
}

std::vector<std::string> fields_of(const ModelConfig& m) {
  std::vector<std::string> out;
  for (const Mistake& mistake : find_mistakes(m)) {
    CHECK(mistake.message.starts_with(mistake.field + " "));
    out.push_back(mistake.field);
  }
  return out;
}

using Fields = std::vector<std::string>;

}  // namespace

TEST_SUITE("runtime/plan/model") {
  TEST_CASE("GPT-2's list: weights that one product takes side by side, then their biases") {
    CHECK(listed(small()) == std::vector<std::string>{"embed.tokens [65, 24]",
                                                      "embed.positions [8, 24]",
                                                      "layers.0.attn_norm.weight [24]",
                                                      "layers.0.attn_norm.bias [24]",
                                                      "layers.0.attn.q.weight [24, 24]",
                                                      "layers.0.attn.k.weight [24, 24]",
                                                      "layers.0.attn.v.weight [24, 24]",
                                                      "layers.0.attn.q.bias [24]",
                                                      "layers.0.attn.k.bias [24]",
                                                      "layers.0.attn.v.bias [24]",
                                                      "layers.0.attn.o.weight [24, 24]",
                                                      "layers.0.attn.o.bias [24]",
                                                      "layers.0.mlp_norm.weight [24]",
                                                      "layers.0.mlp_norm.bias [24]",
                                                      "layers.0.mlp.up.weight [40, 24]",
                                                      "layers.0.mlp.up.bias [40]",
                                                      "layers.0.mlp.down.weight [24, 40]",
                                                      "layers.0.mlp.down.bias [24]",
                                                      "final_norm.weight [24]",
                                                      "final_norm.bias [24]"});
  }

  TEST_CASE("the rule of the initial weights says each tensor's deviation") {
    ModelConfig m = small();  // 2 layers, width 24, ffn 40
    m.init_std = 0.5;
    const auto std_of = [&](std::string_view name) {
      for (const TensorSpec& t : model_tensors(m)) {
        if (t.name == name) return t.init_std;
      }
      return -1.0;
    };
    CHECK(std_of("layers.0.attn.q.weight") == 0.5);
    CHECK(std_of("layers.0.attn.o.weight") == 0.25);
    CHECK(std_of("layers.1.mlp.down.weight") == 0.25);
    m.init = WeightInit::kPlain;
    CHECK(std_of("layers.0.attn.o.weight") == 0.5);
    CHECK(std_of("embed.tokens") == 0.5);
    m.init = WeightInit::kSmallWang;
    for (const char* name : {"embed.tokens", "layers.0.attn.v.weight", "layers.0.mlp.up.weight"}) {
      CHECK(std_of(name) == doctest::Approx(std::sqrt(2.0 / (5 * 24))));
    }
    for (const char* name : {"layers.0.attn.o.weight", "layers.0.mlp.down.weight"}) {
      CHECK(std_of(name) == doctest::Approx(2 / (2 * std::sqrt(24.0))));
    }
    m.init = WeightInit::kDeepNorm;
    CHECK(std_of("embed.tokens") == 0.5);
    CHECK(std_of("layers.0.attn.q.weight") == doctest::Approx(std::sqrt(2.0 / 48)));
    CHECK(std_of("layers.0.attn.k.weight") == doctest::Approx(std::sqrt(2.0 / 48)));
    for (const char* name : {"layers.0.attn.v.weight", "layers.0.attn.o.weight"}) {
      CHECK(std_of(name) == doctest::Approx(std::sqrt(2.0 / 48) / 2));  // (2 layers)^(-1/2)
    }
    CHECK(std_of("layers.0.mlp.up.weight") == doctest::Approx(std::sqrt(2.0 / 64) / 2));
    CHECK(std_of("layers.0.mlp.down.weight") == doctest::Approx(std::sqrt(2.0 / 64) / 2));
  }

  TEST_CASE("each option adds or takes its tensors") {
    ModelConfig m = small();
    m.position_offset = 2;
    m.embed_dim = 10;
    m.embedding_norm = true;
    m.head_bias = true;
    m.final_norm = false;
    for (const char* entry :
         {"embed.tokens [65, 10]", "embed.project_in.weight [24, 10]", "embed.positions [10, 24]",
          "embed.norm.weight [24]", "embed.norm.bias [24]", "head.project_out.weight [10, 24]", "head.bias [65]"}) {
      CAPTURE(entry);
      CHECK(has(m, entry));
    }
    CHECK(!has(m, "final_norm.weight [24]"));
    m.tied_embeddings = false;
    CHECK(has(m, "head.weight [65, 10]"));

    m = small();
    m.block = BlockKind::kParallelShared;
    CHECK(!has(m, "layers.0.mlp_norm.weight [24]"));
    m.block = BlockKind::kSandwich;
    CHECK(has(m, "layers.0.attn_out_norm.weight [24]"));
    CHECK(has(m, "layers.0.mlp_out_norm.bias [24]"));
    m.block = BlockKind::kOutNorm;
    CHECK(!has(m, "layers.0.attn_norm.weight [24]"));
    CHECK(!has(m, "layers.0.mlp_norm.weight [24]"));
    CHECK(has(m, "layers.0.attn_out_norm.weight [24]"));
    m.norm_bias = false;
    CHECK(!has(m, "layers.0.mlp_out_norm.bias [24]"));
    CHECK(has(m, "final_norm.weight [24]"));
    m.norm_weight = false;
    CHECK(!has(m, "final_norm.weight [24]"));
    CHECK(!has(m, "final_norm.bias [24]"));

    m = small();
    m.positions = Positions::kAlibi;
    m.bias = false;
    m.qkv_bias = true;
    m.qk_norm = QkNorm::kHead;
    CHECK(!has(m, "embed.positions [8, 24]"));
    CHECK(has(m, "layers.0.attn.v.bias [24]"));
    CHECK(!has(m, "layers.0.attn.o.bias [24]"));
    CHECK(!has(m, "layers.0.mlp.up.bias [40]"));
    CHECK(has(m, "layers.0.attn.q_norm.weight [6]"));
    CHECK(has(m, "layers.0.attn.k_norm.weight [6]"));
    m.qk_norm = QkNorm::kWhole;
    m.kv_heads = 2;
    CHECK(has(m, "layers.0.attn.q_norm.weight [24]"));
    CHECK(has(m, "layers.0.attn.k_norm.weight [12]"));
    m.qk_norm = QkNorm::kSharedLayerNorm;
    CHECK(has(m, "layers.0.attn.q_norm.weight [6]"));
    CHECK(has(m, "layers.0.attn.k_norm.bias [6]"));
    for (const TensorSpec& tensor : model_tensors(m)) {  // of all heads: ranks add what theirs give
      if (tensor.name.find("attn.q_norm.") != std::string::npos) CHECK(tensor.partial);
    }
    m.qk_norm = QkNorm::kHeadLayerNorm;
    CHECK(!has(m, "layers.0.attn.q_norm.bias [6]"));
    CHECK(has(m, "layers.0.attn.q_norm.weight [4, 6]"));
    CHECK(has(m, "layers.0.attn.k_norm.weight [2, 6]"));
    for (const TensorSpec& tensor : model_tensors(m)) {  // a rank's heads; several ranks may hold one of k
      if (!tensor.name.ends_with("_norm.weight") || tensor.name.find(".attn.") == std::string::npos) continue;
      CHECK(tensor.cut == TensorCut::kDim0);
      CHECK(!tensor.decay);
      CHECK(tensor.heads == (tensor.name.ends_with("k_norm.weight") ? 2 : 0));
    }
    m.norm_plus_one = true;
    for (const TensorSpec& tensor : model_tensors(m)) {
      if (tensor.name.ends_with("norm.weight")) CHECK(tensor.init == InitKind::kZeros);
    }

    m = small();
    m.mla = {.kv_rank = 10, .q_rank = 14, .nope_dim = 3, .rope_dim = 2, .value_dim = 4};
    m.head_dim = 5;
    for (const char* entry :
         {"layers.0.attn.q_a.weight [14, 24]", "layers.0.attn.q_a.bias [14]", "layers.0.attn.q_a_norm.weight [14]",
          "layers.0.attn.q_b.weight [20, 14]", "layers.0.attn.kv_a.weight [12, 24]", "layers.0.attn.kv_a.bias [12]",
          "layers.0.attn.kv_a_norm.weight [10]", "layers.0.attn.kv_b.weight [28, 10]",
          "layers.0.attn.o.weight [24, 16]"}) {
      CAPTURE(entry);
      CHECK(has(m, entry));
    }
    for (const char* entry : {"layers.0.attn.q.weight [20, 24]", "layers.0.attn.k.weight [20, 24]"}) {
      CAPTURE(entry);
      CHECK(!has(m, entry));
    }
    for (const TensorSpec& tensor : model_tensors(m)) {  // by heads, or not at all
      const bool cut = tensor.name.find("_b.weight") != std::string::npos;
      if (tensor.name.find("attn.q_") != std::string::npos || tensor.name.find("attn.kv_") != std::string::npos) {
        CHECK(tensor.cut == (cut ? TensorCut::kDim0 : TensorCut::kReplicated));
      }
    }
    m.mla.q_rank = 0;
    CHECK(has(m, "layers.0.attn.q.weight [20, 24]"));
    CHECK(!has(m, "layers.0.attn.q.bias [20]"));
    CHECK(!has(m, "layers.0.attn.q_a.weight [14, 24]"));

    m = small();
    m.bias = false;
    m.activation = Activation::kSwiGlu;
    m.moe.experts = 3;
    CHECK(has(m, "layers.0.moe.router.weight [3, 24]"));
    CHECK(has(m, "layers.0.moe.experts.2.gate.weight [40, 24]"));
    CHECK(has(m, "layers.0.moe.experts.0.down.weight [24, 40]"));
    m.layers = 2;
    m.moe.ffn = 16;
    m.moe.dense_layers = {1};
    m.moe.shared_ffn = 56;
    m.moe.shared_gate = m.moe.choice_bias = true;
    CHECK(has(m, "layers.0.moe.router.bias [3]"));
    CHECK(has(m, "layers.0.moe.experts.0.down.weight [24, 16]"));
    CHECK(has(m, "layers.0.moe.shared.down.weight [24, 56]"));
    CHECK(has(m, "layers.0.moe.shared_gate.weight [1, 24]"));
    m.moe.shared_ffn = 0;
    m.moe.shared_experts = 2;
    CHECK(has(m, "layers.0.moe.shared.down.weight [24, 32]"));
    ModelConfig other = m;
    other.moe.dense_layers = {0};
    CHECK(has(other, "layers.0.mlp.up.weight [40, 24]"));
    CHECK_FALSE(has(other, "layers.0.moe.router.weight [3, 24]"));
    CHECK(!has(m, "layers.0.mlp.up.weight [40, 24]"));
    m.mlp_bias = m.attention_sinks = m.moe.router_bias = true;
    m.moe.shared_experts = 0;
    m.moe.shared_gate = false;
    m.qk_norm = QkNorm::kL2;
    for (const char* entry : {"layers.0.attn.sinks [4]", "layers.0.moe.router.logit_bias [3]",
                              "layers.0.moe.experts.2.gate.bias [16]", "layers.0.moe.experts.2.down.bias [24]"}) {
      CAPTURE(entry);
      CHECK(has(m, entry));
    }
    CHECK(!has(m, "layers.0.attn.q_norm.weight [6]"));
    for (const TensorSpec& tensor : model_tensors(m)) {
      if (tensor.name.ends_with(".attn.sinks")) CHECK(tensor.cut == TensorCut::kDim0);
      if (tensor.name.ends_with(".down.bias")) CHECK(tensor.cut == TensorCut::kReplicated);
    }
  }

  TEST_CASE("options that contradict each other are told by field, all of them") {
    CHECK(fields_of(small()).empty());
    ModelConfig m = small();
    m.position_offset = 2;
    m.positions = Positions::kRotary;
    m.rope.dims = 5;
    m.residual_scale = 2;
    m.window_layers = {1};
    CHECK(fields_of(m) ==
          Fields{"model.rope.dims", "model.position_offset", "model.residual_scale", "model.window_layers"});
    m = small();
    m.positions = Positions::kRotary;
    m.rope.dims = 8;
    CHECK(fields_of(m) == Fields{"model.rope.dims"});
    m.rope = {.scaling = RopeScaling::kLlama3, .factor = 8, .low_freq_factor = 4, .high_freq_factor = 4};
    CHECK(fields_of(m) == Fields{"model.rope.low_freq_factor"});
    m.rope = {.scaling = RopeScaling::kYarn, .beta_fast = 1, .beta_slow = 1};
    CHECK(fields_of(m) == Fields{"model.rope.beta_slow"});
    m.rope = {.dims = 4, .scaling = RopeScaling::kLongRope, .original_context = 1, .short_factor = {1, 2, 3}};
    CHECK(fields_of(m) == Fields{"model.rope.short_factor", "model.rope.long_factor", "model.rope.original_context"});
    m.rope = {.dims = 4,
              .scaling = RopeScaling::kLongRope,
              .original_context = 2,
              .short_factor = {1, 2},
              .long_factor = {3, 4}};
    CHECK(fields_of(m).empty());
    m = small();
    m.moe = {.experts = 2, .top_k = 3};
    CHECK(fields_of(m) == Fields{"model.moe.top_k", "model.activation"});
    m = small();
    m.moe = {.experts = 2, .dense_layers = {1, 2}, .shared_gate = true};
    m.activation = Activation::kSwiGlu;
    m.bias = false;
    CHECK(fields_of(m) == Fields{"model.moe.shared_gate", "model.moe.dense_layers"});
    m.moe = {.experts = 2, .shared_experts = 1, .dense_layers = {0, 1}, .shared_ffn = 8};
    CHECK(fields_of(m) == Fields{"model.moe.shared_ffn", "model.moe.dense_layers"});
    m.moe = {.ffn = 8, .dense_layers = {0}, .shared_ffn = 8, .shared_gate = true, .choice_bias = true};
    CHECK(fields_of(m) == Fields{"model.moe.ffn", "model.moe.dense_layers", "model.moe.shared_ffn",
                                 "model.moe.shared_gate", "model.moe.choice_bias"});
    m = small();
    m.mla = {.q_rank = 4, .nope_dim = 3, .rope_dim = 2, .value_dim = 4};
    CHECK(fields_of(m) ==
          Fields{"model.mla.q_rank", "model.mla.nope_dim", "model.mla.rope_dim", "model.mla.value_dim"});
    m.mla.kv_rank = 10;
    CHECK(fields_of(m) == Fields{"model.positions", "model.head_dim"});
    m.positions = Positions::kRotary;
    m.head_dim = 5;
    CHECK(fields_of(m).empty());
    m.mla.value_dim = 6;
    m.kv_heads = 2;
    m.rope.dims = 2;
    m.qk_norm = QkNorm::kHead;
    m.top_query = true;
    CHECK(fields_of(m) ==
          Fields{"model.mla.value_dim", "model.kv_heads", "model.rope.dims", "model.qk_norm", "model.top_query"});
    m = small();
    m.positions = Positions::kRotary;
    m.mla = {.kv_rank = 10};
    CHECK(fields_of(m) == Fields{"model.mla.nope_dim", "model.mla.rope_dim", "model.mla.value_dim"});
    m.mla = {.kv_rank = 10, .nope_dim = 3, .rope_dim = 3, .value_dim = 4};
    m.head_dim = 6;
    CHECK(fields_of(m) == Fields{"model.mla.rope_dim"});
    m.mla.rope_dim = 2;
    m.head_dim = 5;
    m.clip_qkv = 1;
    CHECK(fields_of(m) == Fields{"model.clip_qkv"});
    m = small();
    m.sliding_window = 4;
    m.window_layers = {0, 2};
    m.mask = Mask::kBidirectional;
    CHECK(fields_of(m) == Fields{"model.window_layers", "model.sliding_window"});
    m = small();
    m.logit_scale = 2;
    m.head_bias = true;
    CHECK(fields_of(m) == Fields{"model.logit_scale"});
    m = small();
    m.branch_scale = 0.5;
    CHECK(fields_of(m).empty());
    m.block = BlockKind::kParallelShared;
    m.norm_plus_one = true;
    m.norm_weight = false;
    m.clip_qkv = 1;
    m.qk_norm = QkNorm::kWhole;
    m.score_cap = 1;
    m.positions = Positions::kAlibi;
    m.window_rope_theta = 100;
    m.nope_layers = {2};
    CHECK(fields_of(m) == Fields{"model.branch_scale", "model.norm_plus_one", "model.clip_qkv", "model.score_cap",
                                 "model.window_rope_theta", "model.nope_layers", "model.nope_layers"});
    m = small();
    m.positions = Positions::kRotary;
    m.window_rope_theta = 100;
    m.nope_layers = {1};
    CHECK(fields_of(m) == Fields{"model.window_rope_theta"});
    m.sliding_window = 3;
    CHECK(fields_of(m).empty());

    m = small();
    m.positions = Positions::kRotary;
    m.qk_norm = QkNorm::kL2;
    m.attention_chunk = 4;
    m.chunk_layers = {0};
    m.nope_layers = {1};
    m.temperature_scale = 0.1;
    m.attention_sinks = true;
    m.activation = Activation::kSwiGluClamp;
    m.swiglu_limit = 3;
    CHECK(fields_of(m).empty());
    m.sliding_window = 3;
    m.chunk_layers = {0, 2};
    m.nope_layers.clear();
    m.rope.scaling = RopeScaling::kYarn;
    m.activation = Activation::kSwiGlu;
    CHECK(fields_of(m) == Fields{"model.temperature_scale", "model.rope.scaling", "model.chunk_layers",
                                 "model.attention_chunk", "model.swiglu_limit"});
    m = small();
    m.positions = Positions::kLearned;
    m.chunk_layers = {0};
    m.qk_norm = QkNorm::kL2;
    m.swiglu_alpha = 1;
    CHECK(fields_of(m) == Fields{"model.qk_norm", "model.chunk_layers", "model.swiglu_alpha"});
    m = small();
    m.alibi = AlibiForm::kRounded;
    CHECK(fields_of(m) == Fields{"model.alibi"});
    m.positions = Positions::kAlibi;
    CHECK(fields_of(m).empty());
    m = small();
    m.temperature_scale = 0.1;
    m.temperature_form = TemperatureForm::kMinistral3;
    CHECK(fields_of(m) == Fields{"model.temperature_form"});
    m.positions = Positions::kRotary;
    CHECK(fields_of(m).empty());
    m.head_dim = 5;
    m.rope.dims = 4;
    CHECK(fields_of(m) == Fields{"model.head_dim"});
    m = small();
    m.positions = Positions::kRotary;
    m.temperature_scale = 0.1;
    m.top_query = true;
    m.temperature_form = TemperatureForm::kMinistral3;
    CHECK(fields_of(m) == Fields{"model.temperature_form"});
    m = small();
    m.attention_chunk = 4;
    m.attention_sinks = m.top_query = true;
    m.mask = Mask::kBidirectional;
    CHECK(fields_of(m) == Fields{"model.attention_chunk", "model.attention_chunk", "model.attention_sinks"});
    m = small();
    m.moe.router_bias = m.moe.scale_input = true;
    CHECK(fields_of(m) == Fields{"model.moe.router_bias", "model.moe.scale_input"});
    m.activation = Activation::kSwiGlu;
    m.moe = {.experts = 4, .top_k = 2, .shared_ffn = 8, .shared_gate = true, .scale_input = true};
    m.mlp_bias = true;
    CHECK(fields_of(m) == Fields{"model.mlp_bias", "model.mlp_bias"});
    m.moe = {.experts = 4, .top_k = 2};
    CHECK(fields_of(m).empty());

    m = small();
    m.top_query = true;
    CHECK(fields_of(m).empty());
    m.final_norm = false;
    m.block = BlockKind::kParallel;
    CHECK(fields_of(m) == Fields{"model.top_query", "model.top_query"});
    m = small();
    m.top_query = true;
    m.bias = false;
    m.activation = Activation::kSwiGlu;
    m.moe = {.experts = 4, .top_k = 2};
    CHECK(fields_of(m) == Fields{"model.top_query"});
  }

  TEST_CASE("a top query layer costs what a layer does, and its table of positions nothing") {
    Recipe recipe;
    recipe.name = "one";
    recipe.stop = {Span::Unit::kSteps, 1};
    recipe.batch = {.samples = 1, .micro = 1};
    recipe.model = small();
    const double without = make_plan(recipe, 1).value().flops_per_token();
    recipe.model.top_query = true;
    const double with = make_plan(recipe, 1).value().flops_per_token();
    recipe.model.top_query = false;
    recipe.model.layers += 1;
    CHECK(with == make_plan(recipe, 1).value().flops_per_token());
    CHECK(with > without);
  }

  TEST_CASE("a module that guesses a further token: its tensors, what it goes with, what it costs") {
    ModelConfig m = small();
    m.positions = Positions::kRotary;
    m.norm = NormKind::kRmsNorm;
    m.bias = m.tied_embeddings = false;
    m.mtp.depth = 2;
    CHECK(fields_of(m).empty());
    for (const char* entry :
         {"mtp.0.embed_norm.weight [24]", "mtp.1.hidden_norm.weight [24]", "mtp.1.project.weight [24, 48]",
          "mtp.0.attn.q.weight [24, 24]", "mtp.1.mlp.down.weight [24, 40]", "mtp.1.norm.weight [24]"}) {
      CAPTURE(entry);
      CHECK(has(m, entry));
    }
    for (const TensorSpec& tensor : model_tensors(m)) {
      if (tensor.name.starts_with("mtp.")) CHECK(tensor.layer == kHeadLayer);
    }

    Recipe recipe;
    recipe.name = "one";
    recipe.stop = {Span::Unit::kSteps, 1};
    recipe.batch = {.samples = 1, .micro = 1};
    recipe.model = m;
    const double with = make_plan(recipe, 1).value().flops_per_token();
    recipe.model.mtp.depth = 0;
    recipe.model.layers += 2;
    const double layers = make_plan(recipe, 1).value().flops_per_token();
    CHECK(with == layers + 6 * 2.0 * (24 * 48 + 65 * 24));

    // The table of embeddings is on the last stage too, though the head has a matrix of its own.
    recipe.model = m;
    recipe.mesh.pp = 2;
    const Plan plan = make_plan(recipe, 2).value();
    CHECK(plan.has_table_copy());
    CHECK(plan.rank(1).find(plan.tensors, "embed.tokens") != nullptr);
    CHECK(plan.rank(1).find(plan.tensors, "head.weight") != nullptr);
    recipe.model.layers = 6;
    CHECK(plan_stages(recipe.model, recipe.mesh)[0].end_layer == 4);  // each module weighs a layer
    recipe.mesh.head_weight = 1;
    CHECK(plan_stages(recipe.model, recipe.mesh)[0].end_layer == 5);  // and a head
    recipe.mesh.head_weight = 0;
    recipe.model.mtp.depth = 0;
    CHECK(plan_stages(recipe.model, recipe.mesh)[0].end_layer == 3);

    m.context = 3;
    CHECK(fields_of(m) == Fields{"model.mtp.depth"});
    m = small();
    m.mtp.depth = 1;
    m.mask = Mask::kBidirectional;
    m.block = BlockKind::kSandwich;
    m.embed_dim = 12;
    m.embedding_norm = true;
    m.embedding_scale = 2;
    CHECK(fields_of(m) == Fields{"model.block", "model.mask", "model.positions", "model.embed_dim",
                                 "model.embedding_norm", "model.embedding_scale"});
  }

  TEST_CASE("stages are balanced by what their layers take") {
    ModelConfig m = small();
    m.layers = 9;
    m.activation = Activation::kSwiGlu;
    m.bias = false;
    const auto counts = [&](MeshConfig mesh) {
      std::vector<int64_t> out;
      for (const Stage& stage : plan_stages(m, mesh)) out.push_back(stage.end_layer - stage.first_layer);
      return out;
    };
    using Counts = std::vector<int64_t>;
    m.moe = {.experts = 8, .top_k = 4};
    CHECK(counts({.pp = 3}) == Counts{3, 3, 3});
    m.moe.dense_layers = {0, 1, 2};  // each takes less than half of the others'
    const double dense = layer_products(m, 0), sparse = layer_products(m, 8);
    CHECK(dense * 2 < sparse);
    CHECK(counts({.pp = 3}) == Counts{4, 2, 3});
    m.moe.dense_layers = {6, 7, 8};
    CHECK(counts({.pp = 3}) == Counts{2, 3, 4});
    CHECK(counts({.pp = 9}) == Counts{1, 1, 1, 1, 1, 1, 1, 1, 1});
    CHECK(counts({.pp = 1}) == Counts{9});
    CHECK(counts({.pp = 2, .stages = {1, 8}}) == Counts{1, 8});
    CHECK(counts({.pp = 3, .head_weight = 20}) == Counts{3, 5, 1});  // 3 and 3.8 beside the head
    // No other cut has a lighter heaviest stage.
    for (int64_t seed = 1; seed < 200; ++seed) {
      m.layers = 4 + seed % 7;
      m.moe.dense_layers.clear();
      for (int64_t layer = 0; layer < m.layers; ++layer) {
        if ((seed * 2654435761 >> (layer + 5)) % 2 == 0) m.moe.dense_layers.push_back(layer);
      }
      if (m.moe.dense_layers.empty() || expert_layers(m) == 0) continue;
      const MeshConfig mesh{.pp = 3, .embedding_weight = 0.3 * static_cast<double>(seed % 3), .head_weight = 0.5};
      double unit = 0;
      for (int64_t l = 0; l < m.layers; ++l) unit = std::max(unit, layer_products(m, l));
      const auto heaviest = [&](const Counts& cut) {
        double out = 0;
        int64_t layer = 0;
        for (int64_t s = 0; s < 3; ++s) {
          double load = (s == 0 ? mesh.embedding_weight : s == 2 ? mesh.head_weight : 0.0) * unit;
          for (int64_t end = layer + cut[s]; layer < end; ++layer) load += layer_products(m, layer);
          out = std::max(out, load);
        }
        return out;
      };
      double least = 1e30;
      for (int64_t a = 1; a + 2 <= m.layers; ++a) {
        for (int64_t b = 1; a + b + 1 <= m.layers; ++b) least = std::min(least, heaviest({a, b, m.layers - a - b}));
      }
      const Counts got = counts(mesh);
      CAPTURE(seed);
      CHECK(std::accumulate(got.begin(), got.end(), int64_t{0}) == m.layers);
      CHECK(heaviest(got) <= least * (1 + 1e-9));
    }
  }

  TEST_CASE("a token of latent attention pays for its products, not for what widens its values") {
    Recipe recipe;
    recipe.name = "one";
    recipe.stop = {Span::Unit::kSteps, 1};
    recipe.batch = {.samples = 1, .micro = 1};
    recipe.model = small();
    recipe.model.positions = Positions::kRotary;
    recipe.model.bias = false;
    const double mlp = 2.0 * 24 * 40, head = 65.0 * 24, core = 8.0 / 2 * 4 * (5 + 4);
    recipe.model.mla = {.kv_rank = 10, .q_rank = 14, .nope_dim = 3, .rope_dim = 2, .value_dim = 4};
    recipe.model.head_dim = 5;
    double attention = 24.0 * 14 + 14 * 4 * 5 + 24 * 12 + 10 * 4 * 7 + 4 * 4 * 24;
    CHECK(layer_products(recipe.model, 0) == doctest::Approx(attention + core + mlp));
    CHECK(make_plan(recipe, 1).value().flops_per_token() ==
          doctest::Approx(6 * (static_cast<double>(recipe.model.layers) * (attention + core + mlp) + head)));
    recipe.model.mla.q_rank = 0;
    attention += 24.0 * 4 * 5 - 24.0 * 14 - 14 * 4 * 5;
    CHECK(layer_products(recipe.model, 0) == doctest::Approx(attention + core + mlp));
    CHECK(cached_elems(recipe.model) == 12);
  }

  TEST_CASE("a token pays for the experts it goes through") {
    Recipe recipe;
    recipe.name = "one";
    recipe.stop = {Span::Unit::kSteps, 1};
    recipe.batch = {.samples = 1, .micro = 1};
    recipe.model = small();
    recipe.model.bias = false;
    recipe.model.activation = Activation::kSwiGlu;
    recipe.model.moe = {.experts = 6, .top_k = 1};
    const double one = make_plan(recipe, 1).value().flops_per_token();
    recipe.model.moe.top_k = 3;
    const double three = make_plan(recipe, 1).value().flops_per_token();
    CHECK(three - one == doctest::Approx(6.0 * 2 * 2 * 3 * 24 * 40));  // layers, experts more, matrices of each
    recipe.model.moe.dense_layers = {1};
    const double mixed = make_plan(recipe, 1).value().flops_per_token();  // one MLP for three experts and a router
    CHECK(three - mixed == doctest::Approx(6.0 * (2 * 3 * 24 * 40 + 6 * 24)));
    recipe.model.moe.router_bias = true;  // a vector more, no product
    recipe.model.mlp_bias = true;
    CHECK(make_plan(recipe, 1).value().flops_per_token() == mixed);
    recipe.model.mlp_bias = false;
    recipe.model.attention_chunk = 2;  // of a context of 8, in one of two layers: a query sees 1 key in place of 4
    recipe.model.chunk_layers = {0};
    CHECK(mixed - make_plan(recipe, 1).value().flops_per_token() == doctest::Approx(6.0 * (4 - 1) * 4 * (6 + 6)));
    recipe.model.attention_chunk = 0;
    recipe.model.chunk_layers.clear();
    recipe.model.moe.shared_ffn = 8;
    recipe.model.moe.shared_gate = true;
    CHECK(make_plan(recipe, 1).value().flops_per_token() - mixed == doctest::Approx(6.0 * (3 * 24 * 8 + 24)));
  }
}
