#pragma once
// Tiny models, and a harness that runs one micro-batch through every stage of a plan, ranks as threads.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/comm/thread_world.h"
#include "runtime/core/random.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/activations.h"
#include "tests/runtime/nn/reference.h"
#include "tests/support/ok.h"

namespace cairn::nn::testing {

/// A group of one: nothing ever moves.
class LoneComm final : public comm::Comm {
 public:
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }
  const std::string& name() const override { return name_; }
  Status all_reduce(void*, int64_t, DType, comm::ReduceOp, std::string_view) override { return {}; }
  Status reduce_scatter(const void*, void*, int64_t, DType, comm::ReduceOp, std::string_view) override { return {}; }
  Status reduce_scatter_add(const void*, void*, int64_t, DType, int64_t, std::string_view) override { return {}; }
  Status all_gather(const void*, void*, int64_t, std::string_view) override { return {}; }
  Status broadcast(void*, int64_t, int64_t, std::string_view) override { return {}; }
  Status all_to_all(std::span<const comm::OutPart>, std::span<const comm::InPart>, std::string_view) override {
    return {};
  }
  Status barrier(std::string_view) override { return {}; }
  Status isend(const void*, int64_t, int64_t, std::string_view) override { return {}; }
  Status recv(void*, int64_t, int64_t, std::string_view) override { return {}; }
  Status wait_sends(std::string_view) override { return {}; }
  Status wait_sends_to(int64_t, int64_t, std::string_view) override { return {}; }
  Traffic traffic() const override { return {}; }

 private:
  std::string name_ = "tp[0]";
};

/// Sizes are unlike each other wherever they may be, and H * F / 4 is no multiple of 16, so that gate and up are one
/// product with tp 1 and 2 and two with tp 4.
inline Recipe gpt2_recipe() {
  Recipe r;
  r.name = "gpt2";
  r.stop = {Span::Unit::kSteps, 1};
  r.model = {.layers = 3,
             .width = 20,
             .heads = 4,
             .kv_heads = 4,
             .head_dim = 6,
             .ffn = 24,
             .context = 6,
             .vocab = 65,
             .positions = Positions::kLearned,
             .norm = NormKind::kLayerNorm,
             .norm_eps = 1e-5,
             .activation = Activation::kGeluTanh,
             .bias = true,
             .tied_embeddings = true};
  r.batch = {.samples = 2, .micro = 2};
  return r;
}

inline Recipe llama_recipe() {
  Recipe r = gpt2_recipe();
  r.name = "llama";
  r.model.heads = 8;
  r.model.kv_heads = 4;
  r.model.head_dim = 4;
  r.model.positions = Positions::kRotary;
  r.model.rope_theta = 100.0;  // so that angles differ within 6 positions
  r.model.norm = NormKind::kRmsNorm;
  r.model.activation = Activation::kSwiGlu;
  r.model.bias = false;
  r.model.tied_embeddings = false;
  return r;
}

struct Variant {
  std::string name;
  Recipe recipe;
};

/// Small models that together use every option, most pairs of options that could meet, and the families' combinations.
inline std::vector<Variant> option_variants() {
  std::vector<Variant> out;
  const auto add = [&](std::string name, Recipe r, const auto& change) {
    change(r.model);
    r.name = name.substr(0, 100);
    std::replace_if(
        r.name.begin(), r.name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
    out.push_back({std::move(name), std::move(r)});
  };
  const auto rotary = [](ModelConfig& m) {
    m.positions = Positions::kRotary;
    m.rope_theta = 100.0;
    m.tied_embeddings = false;
  };
  add("gpt_neox: parallel, two norms, part of the head turns, exact gelu", gpt2_recipe(), [&](ModelConfig& m) {
    rotary(m);
    m.block = BlockKind::kParallel;
    m.rope.dims = 4;
    m.activation = Activation::kGeluErf;
  });
  add("gptj: parallel, one norm, interleaved, biases of the MLP and the head only", gpt2_recipe(), [&](ModelConfig& m) {
    rotary(m);
    m.block = BlockKind::kParallelShared;
    m.rope = {.dims = 4, .pairs = RotaryPairs::kInterleaved};
    m.qkv_bias = m.out_bias = false;
    m.head_bias = true;
  });
  add("bloom: alibi, embedding norm", gpt2_recipe(), [](ModelConfig& m) {
    m.heads = m.kv_heads = 12;  // no power of two, and a rank's heads cross the border of the lists
    m.head_dim = 4;
    m.positions = Positions::kAlibi;
    m.embedding_norm = true;
  });
  add("falcon rw: rounded alibi", gpt2_recipe(), [](ModelConfig& m) {
    m.heads = m.kv_heads = 12;
    m.head_dim = 4;
    m.positions = Positions::kAlibi;
    m.alibi = AlibiForm::kRounded;
  });
  add("opt: offset positions, silu for relu's kink", gpt2_recipe(), [](ModelConfig& m) {
    m.position_offset = 2;
    m.activation = Activation::kSilu;
  });
  add("opt-350m: norms behind the sums, no final norm, narrower embedding", gpt2_recipe(), [](ModelConfig& m) {
    m.block = BlockKind::kPostNorm;
    m.position_offset = 2;
    m.final_norm = false;
    m.embed_dim = 12;
  });
  add("wider embedding, untied, with a norm", gpt2_recipe(), [](ModelConfig& m) {
    m.embed_dim = 28;
    m.tied_embeddings = false;
    m.embedding_norm = true;
    m.head_bias = true;
  });
  add("qwen2: biases of q, k, v only, a window in some layers", llama_recipe(), [](ModelConfig& m) {
    m.qkv_bias = true;
    m.sliding_window = 3;
    m.window_layers = {1, 2};
  });
  add("qwen3: norms of q and k", llama_recipe(), [](ModelConfig& m) { m.qk_norm = QkNorm::kHead; });
  add("mistral: window in all layers, linear scaling", llama_recipe(), [](ModelConfig& m) {
    m.sliding_window = 2;
    m.rope.scaling = RopeScaling::kLinear;
    m.rope.factor = 3;
  });
  add("glm: interleaved half of the head, biases of q, k, v", llama_recipe(), [](ModelConfig& m) {
    m.head_dim = 8;
    m.rope = {.dims = 4, .pairs = RotaryPairs::kInterleaved};
    m.qkv_bias = true;
  });
  add("glm4: norms before and behind, norms of q and k too", llama_recipe(), [](ModelConfig& m) {
    m.block = BlockKind::kSandwich;
    m.qk_norm = QkNorm::kHead;
    m.rope.pairs = RotaryPairs::kInterleaved;
    m.qkv_bias = true;
  });
  add("glm-130b: deep norm, exact geglu, all biases", llama_recipe(), [](ModelConfig& m) {
    m.kv_heads = m.heads;
    m.norm = NormKind::kLayerNorm;
    m.block = BlockKind::kDeepNorm;
    m.residual_scale = 2.5;
    m.activation = Activation::kGeGlu;
    m.bias = true;
    m.tied_embeddings = true;
  });
  add("bidirectional, dynamic scaling, scaled scores and logits", llama_recipe(), [](ModelConfig& m) {
    m.mask = Mask::kBidirectional;
    m.rope = {.scaling = RopeScaling::kDynamic, .factor = 2, .original_context = 4};
    m.attention_scale = 0.7;
    m.attention_scale_by_layer = true;
    m.logit_scale = 0.5;
    m.activation = Activation::kGeGluTanh;
  });
  add("parallel, rms norms, squared relu, alibi and a window", gpt2_recipe(), [](ModelConfig& m) {
    m.norm = NormKind::kRmsNorm;
    m.positions = Positions::kAlibi;
    m.block = BlockKind::kParallel;
    m.activation = Activation::kRelu2;
    m.sliding_window = 4;
    m.qk_norm = QkNorm::kHead;
  });
  add("mixtral: experts, balanced", llama_recipe(), [](ModelConfig& m) {
    m.moe = {.experts = 5, .top_k = 2, .aux_loss = 0.3};
    m.sliding_window = 5;
  });
  add("mixtral: experts, balanced over all layers, a squared gate", llama_recipe(), [](ModelConfig& m) {
    m.moe = {.experts = 5, .top_k = 2, .aux_loss = 0.6, .aux_scope = AuxScope::kModel};
    m.activation = Activation::kReGlu2;
  });
  add("a quick gelu gate", llama_recipe(), [](ModelConfig& m) { m.activation = Activation::kQuickGeGlu; });
  add("experts without renormalised weights, norms on both sides, geglu", llama_recipe(), [](ModelConfig& m) {
    m.moe = {.experts = 3, .top_k = 3, .renormalise = false};
    m.block = BlockKind::kSandwich;
    m.activation = Activation::kGeGlu;
  });
  add("deepseek-v3: sigmoids, biases, groups, shared experts", llama_recipe(), [](ModelConfig& m) {
    m.moe = {.experts = 8,
             .top_k = 3,
             .aux_loss = 0.3,
             .router = RouterKind::kSigmoid,
             .shared_experts = 2,
             .groups = 4,
             .groups_per_token = 2,
             .scale = 2.5,
             .bias_rate = 0.001};
  });
  add("ernie 4.5: biases of experts and of shared ones, a dense layer first", llama_recipe(), [](ModelConfig& m) {
    m.bias = m.head_bias = true;
    m.rope.pairs = RotaryPairs::kInterleaved;
    m.moe = {.experts = 4, .top_k = 2, .shared_experts = 2, .ffn = 12, .dense_layers = {0}, .choice_bias = true};
  });
  add("softmax with groups and a z-loss, a shared expert", llama_recipe(), [](ModelConfig& m) {
    m.moe = {.experts = 6,
             .top_k = 2,
             .renormalise = false,
             .aux_loss = 0.2,
             .z_loss = 0.05,
             .shared_experts = 1,
             .groups = 3,
             .groups_per_token = 2,
             .scale = 1.5};
  });
  add("qwen2-moe: a gated shared expert, some layers dense, balanced over the others", llama_recipe(),
      [](ModelConfig& m) {
        m.moe = {.experts = 5,
                 .top_k = 2,
                 .renormalise = false,
                 .aux_loss = 0.6,
                 .ffn = 12,
                 .dense_layers = {1},
                 .shared_ffn = 20,
                 .shared_gate = true,
                 .aux_scope = AuxScope::kModel};
        m.qkv_bias = true;
      });
  add("glm4-moe: a dense layer first, narrow experts, biases that nothing moves, a shared one", llama_recipe(),
      [](ModelConfig& m) {
        m.moe = {.experts = 6,
                 .top_k = 3,
                 .router = RouterKind::kSigmoid,
                 .shared_experts = 2,
                 .ffn = 8,
                 .dense_layers = {0},
                 .scale = 1.7,
                 .choice_bias = true};
        m.rope.dims = 4;
        m.qk_norm = QkNorm::kHead;
      });
  add("ernie-4.5-moe: softmax with biases of the choice, wide experts in one layer", llama_recipe(),
      [](ModelConfig& m) {
        m.moe = {.experts = 4, .top_k = 2, .shared_experts = 1, .ffn = 44, .dense_layers = {0, 2}, .choice_bias = true};
        m.rope.pairs = RotaryPairs::kInterleaved;
      });
  const auto latent = [](ModelConfig& m, MlaConfig mla) {
    m.heads = m.kv_heads = 4;
    m.mla = mla;
    m.head_dim = mla.nope_dim + mla.rope_dim;
  };
  add("deepseek-v3's attention: latent queries, keys and values, experts with groups behind a dense layer",
      llama_recipe(), [&](ModelConfig& m) {
        latent(m, {.kv_rank = 7, .q_rank = 9, .nope_dim = 3, .rope_dim = 4, .value_dim = 5});
        m.rope.pairs = RotaryPairs::kInterleaved;
        m.moe = {.experts = 8,
                 .top_k = 3,
                 .router = RouterKind::kSigmoid,
                 .shared_experts = 2,
                 .ffn = 8,
                 .dense_layers = {0},
                 .groups = 4,
                 .groups_per_token = 2,
                 .scale = 2.5,
                 .choice_bias = true};
      });
  add("latent keys and values, queries from the stream, biases, half pairs", llama_recipe(), [&](ModelConfig& m) {
    latent(m, {.kv_rank = 6, .nope_dim = 5, .rope_dim = 2, .value_dim = 7});
    m.qkv_bias = m.out_bias = true;
    m.attention_scale = 0.4;
  });
  add("latent queries, keys and values with biases, weights from 1, deep norm, one layer that does not turn",
      llama_recipe(), [&](ModelConfig& m) {
        latent(m, {.kv_rank = 5, .q_rank = 6, .nope_dim = 2, .rope_dim = 4, .value_dim = 1});
        m.bias = true;
        m.norm_plus_one = true;
        m.block = BlockKind::kDeepNorm;
        m.residual_scale = 1.5;
        m.nope_layers = {1};
      });
  add("latent attention in parallel blocks, a window, dynamic scaling", llama_recipe(), [&](ModelConfig& m) {
    latent(m, {.kv_rank = 8, .q_rank = 3, .nope_dim = 2, .rope_dim = 4, .value_dim = 6});
    m.block = BlockKind::kParallelShared;
    m.rope = {.scaling = RopeScaling::kDynamic, .factor = 2, .original_context = 4};
    m.sliding_window = 3;
    m.window_layers = {0, 2};
  });
  add("two key/value heads, biases of q, k, v, norms of q and k", llama_recipe(), [](ModelConfig& m) {
    m.kv_heads = 2;
    m.qkv_bias = true;
    m.qk_norm = QkNorm::kHead;
  });
  add("one key/value head", gpt2_recipe(), [](ModelConfig& m) { m.kv_heads = 1; });
  add("codegeex: a top query layer after the final norm, quick gelu", gpt2_recipe(), [](ModelConfig& m) {
    m.top_query = true;
    m.activation = Activation::kGeluQuick;
  });
  add("a top query layer with rotary positions, norms of q and k, grouped heads, no biases", llama_recipe(),
      [](ModelConfig& m) {
        m.top_query = true;
        m.qk_norm = QkNorm::kHead;
      });
  add("gemma: weights from 1, a scaled embedding, tied", llama_recipe(), [](ModelConfig& m) {
    m.norm_plus_one = true;
    m.embedding_scale = 4.5;
    m.activation = Activation::kGeGluTanh;
    m.tied_embeddings = true;
  });
  add("gemma 2: caps of scores and logits, norms on both sides, a window in some layers", llama_recipe(),
      [](ModelConfig& m) {
        m.norm_plus_one = true;
        m.block = BlockKind::kSandwich;
        m.score_cap = 0.6;
        m.logit_cap = 0.9;
        m.sliding_window = 3;
        m.window_layers = {0, 2};
        m.embedding_scale = 3;
        m.tied_embeddings = true;
      });
  add("gemma 3: two rotary bases, norms of q and k from 1", llama_recipe(), [](ModelConfig& m) {
    m.norm_plus_one = true;
    m.block = BlockKind::kSandwich;
    m.qk_norm = QkNorm::kHead;
    m.sliding_window = 3;
    m.window_layers = {0, 1};
    m.window_rope_theta = 5;
    m.embedding_scale = 4.5;
    m.rope.scaling = RopeScaling::kLinear;
    m.rope.factor = 3;
  });
  add("olmo: norms without weights, clipped q, k and v", llama_recipe(), [](ModelConfig& m) {
    m.norm = NormKind::kLayerNorm;
    m.norm_weight = false;
    m.clip_qkv = 0.9;
    m.kv_heads = 2;
  });
  add("olmo 2: norms behind the branches alone, of whole q and k", llama_recipe(), [](ModelConfig& m) {
    m.block = BlockKind::kOutNorm;
    m.qk_norm = QkNorm::kWhole;
  });
  add("norms of whole q and k from 1, two key/value heads, biases", llama_recipe(), [](ModelConfig& m) {
    m.qk_norm = QkNorm::kWhole;
    m.norm_plus_one = true;
    m.kv_heads = 2;
    m.qkv_bias = true;
  });
  add("cohere: parallel, LayerNorm without bias, of each head too, layers that do not turn", llama_recipe(),
      [](ModelConfig& m) {
        m.norm = NormKind::kLayerNorm;
        m.norm_bias = false;
        m.block = BlockKind::kParallelShared;
        m.qk_norm = QkNorm::kHeadLayerNorm;
        m.kv_heads = 2;
        m.rope.pairs = RotaryPairs::kInterleaved;
        m.logit_scale = 0.3;
        m.sliding_window = 3;
        m.window_layers = {0, 1};
        m.nope_layers = {2};
        m.tied_embeddings = true;
      });
  add("phi: LayerNorm of heads with one weight and one bias, biases, partial rotary", gpt2_recipe(),
      [](ModelConfig& m) {
        m.positions = Positions::kRotary;
        m.rope_theta = 100;
        m.rope.dims = 4;
        m.block = BlockKind::kParallelShared;
        m.qk_norm = QkNorm::kSharedLayerNorm;
        m.head_bias = true;
      });
  add("granite: scaled embedding, branches, scores and logits", llama_recipe(), [](ModelConfig& m) {
    m.embedding_scale = 3.1;
    m.branch_scale = 0.37;
    m.attention_scale = 0.21;
    m.logit_scale = 0.43;
    m.nope_layers = {0, 2};
  });
  add("scaled branches of norms behind the sums", gpt2_recipe(), [](ModelConfig& m) {
    m.block = BlockKind::kPostNorm;
    m.branch_scale = 0.6;
    m.embed_dim = 12;
    m.embedding_scale = 2;
  });
  add("scaled branches with norms on both sides, experts", llama_recipe(), [](ModelConfig& m) {
    m.block = BlockKind::kSandwich;
    m.branch_scale = 0.6;
    m.moe = {.experts = 4, .top_k = 2};
  });
  add("scaled branches of deep norm", gpt2_recipe(), [](ModelConfig& m) {
    m.block = BlockKind::kDeepNorm;
    m.residual_scale = 1.5;
    m.branch_scale = 0.6;
  });
  add("nemotron: LayerNorm with weights from 1, squared relu", gpt2_recipe(), [](ModelConfig& m) {
    m.norm_plus_one = true;
    m.positions = Positions::kRotary;
    m.rope_theta = 100;
    m.rope.dims = 4;
    m.activation = Activation::kRelu2;
    m.bias = false;
    m.tied_embeddings = false;
  });
  add("gpt-oss: sinks, clamped gates, experts and router with biases, every other layer with a window", llama_recipe(),
      [](ModelConfig& m) {
        m.attention_sinks = true;
        m.activation = Activation::kSwiGluClamp;
        m.swiglu_limit = 0.4;
        m.swiglu_alpha = 1.3;
        m.bias = true;
        m.moe = {.experts = 5, .top_k = 2, .aux_loss = 0.3, .router_bias = true};
        m.sliding_window = 3;
        m.window_layers = {0, 2};
      });
  add("sinks with dense layers, clamped gates, some experts with biases, sigmoids", llama_recipe(), [](ModelConfig& m) {
    m.attention_sinks = true;
    m.kv_heads = 2;
    m.activation = Activation::kSwiGluClamp;
    m.mlp_bias = true;
    m.moe = {.experts = 4,
             .top_k = 2,
             .router = RouterKind::kSigmoid,
             .ffn = 12,
             .dense_layers = {1},
             .router_bias = true,
             .choice_bias = true};
  });
  add("llama 4: chunks, layers that do not turn with warm queries, L2 norms, experts' inputs scaled", llama_recipe(),
      [](ModelConfig& m) {
        m.rope.pairs = RotaryPairs::kInterleaved;
        m.qk_norm = QkNorm::kL2;
        m.nope_layers = {1};
        m.attention_chunk = 4;
        m.chunk_layers = {0, 2};
        m.temperature_scale = 0.7;
        m.temperature_floor = 2;
        m.moe = {.experts = 4,
                 .top_k = 2,
                 .renormalise = false,
                 .router = RouterKind::kSigmoid,
                 .shared_experts = 1,
                 .ffn = 12,
                 .dense_layers = {0},
                 .scale_input = true};
      });
  add("ministral 3: warm queries in layers that turn and in one that does not, norms of q and k", llama_recipe(),
      [](ModelConfig& m) {
        m.qk_norm = QkNorm::kHead;
        m.nope_layers = {2};
        m.temperature_scale = 0.7;
        m.temperature_floor = 2;
        m.temperature_form = TemperatureForm::kMinistral3;
      });
  add("scaled inputs of experts with softmax, balanced, sinks, chunks in all layers", gpt2_recipe(),
      [](ModelConfig& m) {
        m.bias = false;
        m.activation = Activation::kSwiGlu;
        m.attention_sinks = true;
        m.attention_chunk = 3;
        m.moe = {.experts = 3, .top_k = 2, .aux_loss = 0.2, .scale_input = true};
      });
  add("a module that guesses a further token", llama_recipe(), [](ModelConfig& m) { m.mtp = {.depth = 1}; });
  add("three of them, tied, norms from 1, a window, grouped heads, biases", llama_recipe(), [](ModelConfig& m) {
    m.mtp = {.depth = 3, .loss = 0.9};
    m.norm_plus_one = m.tied_embeddings = m.bias = true;
    m.kv_heads = 2;
    m.sliding_window = 3;
    m.logit_scale = 0.7;
  });
  add("deepseek-v3 with its module", llama_recipe(), [&](ModelConfig& m) {
    latent(m, {.kv_rank = 7, .q_rank = 9, .nope_dim = 3, .rope_dim = 4, .value_dim = 5});
    m.moe = {.experts = 8,
             .top_k = 3,
             .aux_loss = 0.02,
             .router = RouterKind::kSigmoid,
             .shared_experts = 1,
             .ffn = 8,
             .dense_layers = {0, 1},
             .groups = 4,
             .groups_per_token = 2,
             .scale = 2.5,
             .choice_bias = true};
    m.mtp = {.depth = 2, .loss = 0.5};
  });
  add("a module of a model with LayerNorm, without rotary positions", gpt2_recipe(), [](ModelConfig& m) {
    m.positions = Positions::kAlibi;
    m.mtp = {.depth = 1, .loss = 1.5};
  });
  add("quick gelu, no biases but the output's", gpt2_recipe(), [](ModelConfig& m) {
    m.activation = Activation::kGeluQuick;
    m.bias = false;
    m.out_bias = true;
  });
  return out;
}

/// For tp x pp ranks: dp is 1.
inline Plan plan_of(const Recipe& recipe) {
  auto plan = make_plan(recipe, recipe.mesh.tp * recipe.mesh.pp);
  REQUIRE_OK(plan);
  return std::move(plan).value();
}

/// All logical tensors, drawn so that no gradient is tiny: norms near 1, biases and matrices of visible size.
using Logical = std::vector<std::vector<float>>;
inline Logical draw_weights(const Plan& plan, uint64_t seed = 7) {
  Logical out;
  for (const TensorSpec& spec : plan.tensors) {
    const uint64_t key = stream_key(seed, spec.name);
    const double std = spec.shape.size() == 2 ? 0.7 / std::sqrt(static_cast<double>(spec.shape[1])) : 0.2;
    const double mean = spec.init == InitKind::kOnes ? 1.0 : 0.0;
    std::vector<float> values(count_elems(spec.shape));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(mean + std * normal_at(key, i));
    out.push_back(std::move(values));
  }
  return out;
}

inline void round_to_bf16(Logical& weights) {
  for (auto& tensor : weights) {
    for (float& x : tensor) x = to_f32(to_bf16(x));
  }
}
inline void round_to_f16(Logical& weights) {
  for (auto& tensor : weights) {
    for (float& x : tensor) x = to_f32(to_f16(x));
  }
}

inline void store(DType dtype, float x, std::byte* array, int64_t at) {
  if (dtype == DType::kBf16) {
    reinterpret_cast<bf16*>(array)[at] = to_bf16(x);
  } else if (dtype == DType::kF16) {
    reinterpret_cast<f16*>(array)[at] = to_f16(x);
  } else {
    reinterpret_cast<float*>(array)[at] = x;
  }
}
inline float load(DType dtype, const std::byte* array, int64_t at) {
  if (dtype == DType::kBf16) return to_f32(reinterpret_cast<const bf16*>(array)[at]);
  if (dtype == DType::kF16) return to_f32(reinterpret_cast<const f16*>(array)[at]);
  return reinterpret_cast<const float*>(array)[at];
}

inline Weights reference_weights(const Plan& plan, const Logical& logical) {
  Weights out;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    out[plan.tensors[i].name] = std::vector<double>(logical[i].begin(), logical[i].end());
  }
  return out;
}

struct Batch {
  std::vector<int32_t> tokens, targets;          // [T]
  std::vector<uint64_t> dropout_keys;            // [B], or empty
  std::vector<int32_t> positions, starts, ends;  // SequenceRows: [T], or empty
  std::vector<float> weights;                    // likewise
};
inline Batch draw_batch(const Plan& plan, uint64_t seed = 3) {
  Batch out;
  const int64_t rows = plan.recipe.batch.micro * plan.recipe.model.context;
  const auto draw = [&](const char* name, int64_t i) {
    return static_cast<int32_t>(uniform_at(stream_key(seed, name), i) * static_cast<double>(plan.recipe.model.vocab));
  };
  for (int64_t i = 0; i < rows; ++i) {
    out.tokens.push_back(draw("tokens", i));
    out.targets.push_back(draw("targets", i));
  }
  out.targets[0] = static_cast<int32_t>(plan.recipe.model.vocab - 1);  // the last row of the vocabulary, and the first
  out.tokens[1] = static_cast<int32_t>(plan.recipe.model.vocab - 1);
  out.tokens[0] = 0;
  return out;
}

/// The elements of `local` in the tensor's global order, for as many as it has: f(global index, index in the flat
/// range).
inline void for_each_element(const TensorSpec& spec, const LocalTensor& local,
                             const std::function<void(int64_t, int64_t)>& f) {
  const int64_t cols = spec.shape.back();
  const int64_t width = local.box.extent(local.box.dims() - 1);
  const int64_t first = local.box.empty() ? 0 : flat_offset(spec.shape, local.box.lo);
  for (int64_t i = 0; i < local.box.count_elems(); ++i) {
    f(first + i / width * cols + i % width, local.offset + i);
  }
}

/// One stage of one rank with memory of its own, filled with NaN bits first and walled by guard bytes.
class Rank {
 public:
  /// `listen`: makes the model's listener, which outlives it, from where the gradients lie.
  Rank(const Plan& plan, int64_t world_rank, comm::Comm& tp, const Logical& weights, bool trains = true,
       const std::function<UseListener*(const RankPlan&, float*)>& listen = {})
      : plan_(plan), rank_(plan.rank(world_rank)) {
    const DType dtype = plan.compute_dtype();
    weights_.assign(rank_.flat_elems * dtype_size_bytes(dtype), std::byte{0});
    grads_.assign(rank_.flat_elems, 0.0f);
    for (const LocalTensor& local : rank_.tensors) {
      for_each_element(plan.tensors[local.tensor], local, [&](int64_t global, int64_t flat) {
        store(dtype, weights[local.tensor][global], weights_.data(), flat);
      });
    }
    bytes_ = stage_buffers_bytes(plan, rank_);
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, bytes_ + 2 * kGuardBytes)));
    std::memset(memory_.get(), 0xff, bytes_ + 2 * kGuardBytes);
    auto made = StageModel::make(
        *stream_, plan, rank_, 0, {.tp = &tp}, DevicePtr(weights_.data()), trains ? DevicePtr(grads_.data()) : nullptr,
        {DevicePtr(memory_.get() + kGuardBytes), bytes_}, listen ? listen(rank_, grads_.data()) : nullptr);
    REQUIRE_OK(made);
    model_ = std::move(made).value();
  }

  StageModel& model() { return *model_; }
  /// [T], and behind them those of modules that guess further tokens.
  std::vector<float> all_losses(int64_t slot) {
    std::vector<float> out(static_cast<size_t>(model_->loss_rows()));
    model_->token_losses(slot, out);
    REQUIRE_OK(stream_->settle());
    return out;
  }
  std::vector<float> token_losses(int64_t slot) {
    std::vector<float> out = all_losses(slot);
    out.resize(static_cast<size_t>(model_->rows()));
    return out;
  }
  const RankPlan& plan() const { return rank_; }
  std::span<std::byte> weights() { return weights_; }
  std::vector<float>& grads() { return grads_; }

  bool guards_whole() const {
    const auto whole = [&](int64_t begin) {
      return std::all_of(memory_.get() + begin, memory_.get() + begin + kGuardBytes,
                         [](std::byte b) { return b == std::byte{0xff}; });
    };
    return whole(0) && whole(kGuardBytes + bytes_);
  }

  /// Adds this rank's gradients to the global ones as the trainer would: replicated tensors once, or, where they are
  /// partial over tp, from every rank; a tied copy always. With `counts` what stands in the place of the gradients of
  /// routers' biases, and nothing else; else these stay zero, as they are.
  void add_grads(std::vector<std::vector<double>>& global, bool counts = false) const {
    for (const LocalTensor& local : rank_.tensors) {
      if (plan_.tensors[local.tensor].balances != counts) continue;
      const bool replicated = plan_.tensors[local.tensor].cut == TensorCut::kReplicated;
      if (replicated && !local.sum_over_tp && rank_.at.tp != 0) continue;
      for_each_element(plan_.tensors[local.tensor], local,
                       [&](int64_t at, int64_t flat) { global[local.tensor][at] += grads_[flat]; });
    }
  }

  /// Gradients of vocabulary padding: must stay zero.
  bool padding_untouched() const {
    for (const LocalTensor& local : rank_.tensors) {
      const int64_t end = local.offset + count_elems(local.shape);
      for (int64_t i = local.offset + local.box.count_elems(); i < end; ++i) {
        if (grads_[i] != 0) return false;
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kGuardBytes = 256;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  const std::unique_ptr<Stream> stream_ = make_cpu_stream();
  const Plan& plan_;
  RankPlan rank_;
  std::vector<std::byte> weights_;
  std::vector<float> grads_;
  int64_t bytes_ = 0;
  std::unique_ptr<std::byte, Free> memory_;
  std::unique_ptr<StageModel> model_;
};

/// Two micro-batches through the whole model on one rank, forward and backward; losses of both.
inline std::vector<float> two_micro_batches(Rank& rank, const Plan& plan) {
  std::vector<float> losses;
  for (const uint64_t seed : {3, 4}) {
    const Batch batch = draw_batch(plan, seed);
    REQUIRE(rank.model().forward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr).ok());
    const auto of_batch = rank.token_losses(0);
    losses.insert(losses.end(), of_batch.begin(), of_batch.end());
    REQUIRE(rank.model().backward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr, 1.0f).ok());
  }
  return losses;
}

struct Outcome {
  std::vector<float> losses;                // [T]
  std::vector<std::vector<double>> grads;   // by tensor, global
  std::vector<std::vector<double>> counts;  // likewise: choices of experts, of routers' biases
  // [stage - 1]: gradient of the input of each stage after the first, [T, H], rows of all tp ranks in order.
  std::vector<std::vector<double>> dinputs;
};

/// Forward and backward of one micro-batch through all stages; `tp_comm(r)` makes the communicator of tp rank r, on
/// the thread that uses it. dp must be 1.
inline Outcome run(const Plan& plan, const Logical& weights, const Batch& batch,
                   const std::function<std::unique_ptr<comm::Comm>(int64_t)>& tp_comm, float loss_scale = 1.0f) {
  const int64_t tp = plan.mesh.tp(), pp = plan.mesh.pp();
  const DType dtype = plan.compute_dtype();
  const bool scattered = plan.recipe.mesh.sequence_parallel;
  std::vector<std::unique_ptr<comm::Comm>> comms(tp);
  std::vector<std::vector<std::unique_ptr<Rank>>> ranks(tp);  // [tp][pp]
  std::vector<std::vector<std::vector<std::byte>>> dinputs(tp);
  std::vector<std::string> failures(tp);

  const auto body = [&](int64_t t) {
    comms[t] = tp_comm(t);
    for (int64_t p = 0; p < pp; ++p) {
      ranks[t].push_back(std::make_unique<Rank>(plan, plan.mesh.rank({t, 0, p}), *comms[t], weights));
    }
    std::vector<std::vector<std::byte>> boundary(pp + 1);
    for (auto& b : boundary) b.resize(ranks[t][0]->model().boundary_bytes(), std::byte{0xff});
    dinputs[t] = boundary;
    const auto check = [&](const Status& status) {
      if (!status.ok() && failures[t].empty()) failures[t] = status.error().message;
    };
    for (int64_t p = 0; p < pp; ++p) {
      ranks[t][p]->model().set_dropout_keys(0, batch.dropout_keys);
      ranks[t][p]->model().set_sequences(0, {batch.positions, batch.starts, batch.ends, batch.weights});
      const bool reads = p == 0 || (p == pp - 1 && plan.recipe.model.mtp.depth > 0);
      check(ranks[t][p]->model().forward(
          0, reads ? batch.tokens.data() : nullptr, p == pp - 1 ? batch.targets.data() : nullptr,
          p == 0 ? nullptr : DevicePtr(boundary[p].data()), p == pp - 1 ? nullptr : DevicePtr(boundary[p + 1].data())));
    }
    const auto splits = [&](int64_t p) { return ranks[t][p]->plan().chunks[0].late > 0; };
    for (int64_t p = pp - 1; p >= 0; --p) {
      StageModel& model = ranks[t][p]->model();
      const int32_t* tokens = p == 0 ? batch.tokens.data() : nullptr;
      const int32_t* targets = p == pp - 1 ? batch.targets.data() : nullptr;
      const DevicePtr<std::byte> doutput = p == pp - 1 ? nullptr : DevicePtr(dinputs[t][p + 1].data());
      const DevicePtr<std::byte> dinput = p == 0 ? nullptr : DevicePtr(dinputs[t][p].data());
      check(splits(p) ? model.backward_input(0, 0, tokens, targets, doutput, dinput, loss_scale)
                      : model.backward(0, tokens, targets, doutput, dinput, loss_scale));
    }
    for (int64_t p = 0; p < pp; ++p) {  // later, in any order of the stages
      if (splits(p)) check(ranks[t][p]->model().backward_weight(0, 0));
    }
  };
  if (tp == 1) {
    body(0);
  } else {
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < tp; ++t) threads.emplace_back(body, t);
    for (std::thread& thread : threads) thread.join();
  }

  Outcome out;
  for (const TensorSpec& spec : plan.tensors) out.grads.emplace_back(count_elems(spec.shape), 0.0);
  out.counts = out.grads;
  const auto first = ranks[0].back()->token_losses(0);
  out.losses.assign(first.begin(), first.end());
  out.dinputs.resize(pp - 1);
  for (int64_t t = 0; t < tp; ++t) {
    REQUIRE_MESSAGE(failures[t].empty(), failures[t]);
    const auto losses = ranks[t].back()->token_losses(0);
    CHECK(std::equal(losses.begin(), losses.end(), out.losses.begin()));  // every tp rank has all of them
    for (const auto& rank : ranks[t]) {
      rank->add_grads(out.grads);
      rank->add_grads(out.counts, true);
      CHECK(rank->padding_untouched());
      CHECK(rank->guards_whole());
    }
    for (int64_t p = 1; p < pp && (t == 0 || scattered); ++p) {
      const auto& bytes = dinputs[t][p];
      const int64_t count = std::ssize(bytes) / dtype_size_bytes(dtype);
      for (int64_t i = 0; i < count; ++i) out.dinputs[p - 1].push_back(load(dtype, bytes.data(), i));
    }
  }
  return out;
}

inline Outcome run_alone(const Plan& plan, const Logical& weights, const Batch& batch, float loss_scale = 1.0f) {
  return run(
      plan, weights, batch, [](int64_t) { return std::make_unique<LoneComm>(); }, loss_scale);
}

/// The same with tp ranks as threads.
inline Outcome run_threads(const Plan& plan, const Logical& weights, const Batch& batch) {
  const int64_t tp = plan.mesh.tp();
  comm::ThreadWorld world(tp, {.deadline_ms = 20000});
  std::vector<std::unique_ptr<comm::Engine>> engines;
  std::vector<int64_t> members;
  for (int64_t t = 0; t < tp; ++t) {
    engines.push_back(world.engine(t));
    members.push_back(t);
  }
  return run(plan, weights, batch, [&](int64_t t) {
    auto group = engines[t]->group("tp", members);
    RT_CHECK(group.ok(), "{}", group.error().message);  // on a thread: doctest's REQUIRE would throw through it
    return std::move(group).value();
  });
}

inline double largest(const std::vector<double>& values) {
  double out = 0;
  for (const double v : values) out = std::max(out, std::abs(v));
  return out;
}
inline double largest(const std::vector<std::vector<double>>& tensors) {
  double out = 0;
  for (const auto& tensor : tensors) out = std::max(out, largest(tensor));
  return out;
}

/// Largest difference over the larger of the tensor's largest value and a hundredth of `floor` (for tensors whose
/// gradient is zero by symmetry, such as the key's bias).
inline double distance(const std::vector<double>& got, const std::vector<double>& wanted, double floor) {
  double worst = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    // Written so that a NaN is infinitely far.
    const double apart = std::abs(got[i] - wanted[i]);
    worst = apart <= worst ? worst : (std::isnan(apart) ? INFINITY : apart);
  }
  return worst / std::max(largest(wanted), 0.01 * floor);
}

}  // namespace cairn::nn::testing
