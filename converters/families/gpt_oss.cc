// gpt-oss: attention sinks, clamped gates, experts and a router with biases, every other layer with a window. Source:
// transformers models/gpt_oss.
#include <fmt/format.h>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::json;
using nlohmann::ordered_json;

ModelConfig base() {
  M m = llama_like_base();
  m.bias = true;
  m.attention_sinks = true;
  m.moe.router_bias = true;
  return m;
}

/// The experts have one activation, whatever hidden_act says. Its numbers are read by transformers 5 alone.
ConfigKey clamped_gates() {
  return {{"hidden_act", "swiglu_alpha", "swiglu_limit"},
          [](ConfigReader& in, M& m) {
            m.activation = Activation::kSwiGluClamp;
            const M usual;
            m.swiglu_alpha = in.number("swiglu_alpha", usual.swiglu_alpha);
            m.swiglu_limit = in.number("swiglu_limit", usual.swiglu_limit);
            for (const auto& [name, value, fixed] : {std::tuple("swiglu_alpha", m.swiglu_alpha, usual.swiglu_alpha),
                                                     {"swiglu_limit", m.swiglu_limit, usual.swiglu_limit}}) {
              if (!(value > 0)) in.invalid(fmt::format("{} = {} must be above 0", name, value));
              if (value != fixed) in.note(fmt::format("{} = {}: transformers 4 takes {}", name, value, fixed));
            }
          },
          [](const M& m, ordered_json& out) {
            out["hidden_act"] = "silu";
            out["swiglu_alpha"] = m.swiglu_alpha;
            out["swiglu_limit"] = m.swiglu_limit;
          }};
}

std::string beyond_4(const M& m) {
  const M usual;
  if (m.swiglu_alpha == usual.swiglu_alpha && m.swiglu_limit == usual.swiglu_limit) return "";
  return fmt::format("4.x computes gates with {} and {}, whatever swiglu_alpha = {} and swiglu_limit = {} say",
                     usual.swiglu_alpha, usual.swiglu_limit, m.swiglu_alpha, m.swiglu_limit);
}

/// Both lines take yarn where nothing is said, and of a rope_scaling that is null transformers 5 alone.
ConfigKey yarn_unless_said() {
  ConfigKey out = rope({.absent_base = 150000.0});
  const auto read = out.read;
  const auto write = out.write;
  out.read = [=](ConfigReader& in, M& m) {
    read(in, m);
    if (in.find("rope_scaling") != nullptr || in.find("rope_parameters") != nullptr) return;
    if (in.contains("rope_scaling")) {
      return in.unsupported(
          "rope_scaling = null: transformers 4 takes no scaling, 5.x yarn; say {\"rope_type\": \"default\"} or the "
          "scaling that is meant");
    }
    m.rope.scaling = RopeScaling::kYarn;
    m.rope.factor = 32;
    m.rope.original_context = 4096;
    m.rope.truncate = false;
  };
  out.write = [=](const M& m, ordered_json& config) {
    write(m, config);
    if (m.rope.scaling == RopeScaling::kNone) config["rope_scaling"] = {{"rope_type", "default"}};
  };
  return out;
}

/// What an absent coefficient is, to the line that wrote the folder.
ConfigKey absent_loss() {
  return {
      {"router_aux_loss_coef"},
      [](ConfigReader& in, M& m) {
        if (m.moe.aux_loss > 0 && in.line() == 4) {
          in.note(
              "output_router_logits = true: transformers 4 takes that loss of the weights of choices, not of logits");
        }
        if (m.moe.aux_loss > 0 && in.find("router_aux_loss_coef") == nullptr && in.line() == 5) {
          m.moe.aux_loss = 0.001;
        }
      },
      nullptr};
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.attn.sinks", "model.layers.*.self_attn.sinks"},
    {"layers.*.moe.router.logit_bias", "model.layers.*.mlp.router.bias"},
    {"layers.*.moe.router.weight", "model.layers.*.mlp.router.weight"},
    {.logical = "layers.*.moe.experts.#.{gate,up}.weight",
     .stored = "model.layers.*.mlp.experts.gate_up_proj",
     .fuse = Fuse::kInterleaved,
     .transpose = true},
    {.logical = "layers.*.moe.experts.#.{gate,up}.bias",
     .stored = "model.layers.*.mlp.experts.gate_up_proj_bias",
     .fuse = Fuse::kInterleaved},
    {.logical = "layers.*.moe.experts.#.down.weight",
     .stored = "model.layers.*.mlp.experts.down_proj",
     .transpose = true},
    {"layers.*.moe.experts.#.down.bias", "model.layers.*.mlp.experts.down_proj_bias"},
});

/// As published, in blocks of four bits: what these become has an expert's rows as rows, [experts, out, in].
constexpr TensorRow kAlso[] = {
    {.logical = "layers.*.moe.experts.#.{gate,up}.weight",
     .stored = "model.layers.*.mlp.experts.gate_up_proj_blocks",
     .fuse = Fuse::kInterleaved},
    {"layers.*.moe.experts.#.down.weight", "model.layers.*.mlp.experts.down_proj_blocks"},
};

}  // namespace

Family gpt_oss_family() {
  static const std::vector<ConfigKey> kKeys = [] {
    std::vector<ConfigKey> keys =
        llama_like_keys({.vocab = 201088,
                         .width = 2880,
                         .ffn = 2880,
                         .layers = 36,
                         .heads = 64,
                         .kv_heads = 8,
                         .head_dim = 64,
                         .context = 131072,
                         .norm_eps = 1e-5},
                        {clamped_gates(), only("attention_bias", true), windows_by_pattern({.window = 128, .every = 2}),
                         experts("num_local_experts", 128, 4, 0.9), absent_loss(),
                         // Of the published files: other names of numbers that are there.
                         unread({"experts_per_token", "initial_context_length"})});
    for (ConfigKey& key : keys) {
      if (key.names.front() == "rope_theta") key = yarn_unless_said();
    }
    return keys;
  }();
  return llama_like({.model_type = "gpt_oss",
                     .architecture = "GptOssForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kAlso,
                     .beyond_4 = beyond_4});
}

}  // namespace cairn::convert
