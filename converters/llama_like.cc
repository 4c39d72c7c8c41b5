#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

constexpr std::string_view kIgnored[] = {"model.layers.*.self_attn.rotary_emb.inv_freq"};

}  // namespace

std::vector<ConfigKey> llama_like_keys(const LlamaDefaults& absent, const std::vector<ConfigKey>& own,
                                       const std::vector<ConfigKey>& last) {
  std::vector<ConfigKey> out = {
      size("vocab_size", &M::vocab, absent.vocab),
      size("hidden_size", &M::width, absent.width),
      size(absent.ffn_key, &M::ffn, absent.ffn),
      size("num_hidden_layers", &M::layers, absent.layers),
      size("num_attention_heads", &M::heads, absent.heads),
      kv_heads(absent.kv_heads),
      absent.has_head_dim == HeadDim::kDivided ? divided_head_dim()
                                               : head_dim(absent.head_dim, absent.has_head_dim == HeadDim::kIfUnusual),
      activation("hidden_act", absent.activation, absent.gated ? gated_activations() : plain_activations()),
      size("max_position_embeddings", &M::context, absent.context),
      number(absent.norm_eps_key, &M::norm_eps, absent.norm_eps),
      rope(absent.rope),
  };
  out.insert(out.end(), own.begin(), own.end());
  if (absent.has_dropout) out.push_back(dropout("attention_dropout", &M::attention_dropout));
  out.push_back(flag("tie_word_embeddings", &M::tied_embeddings, absent.tied));
  out.push_back(number("initializer_range", &M::init_std, absent.init_std));
  out.insert(out.end(), last.begin(), last.end());
  return out;
}

ModelConfig llama_like_base() {
  M m;
  m.norm = NormKind::kRmsNorm;
  m.bias = false;
  return m;
}

Family llama_like(Family own) {
  own.prefix = "model.";
  own.ignored = kIgnored;
  if (own.base == nullptr) own.base = llama_like_base;
  if (own.tensors.empty()) own.tensors = kLlamaRows;
  return own;
}

}  // namespace cairn::convert
