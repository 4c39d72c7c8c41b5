#include "converters/gemma_like.h"

#include <cmath>

namespace cairn::convert {
namespace {

using M = ModelConfig;

/// No key says it: the embedding is multiplied with the root of the width.
ConfigKey scaled_embedding() {
  return {{}, [](ConfigReader&, M& m) { m.embedding_scale = std::sqrt(static_cast<double>(m.width)); }, nullptr};
}

}  // namespace

std::vector<ConfigKey> gemma_like_keys(const GemmaDefaults& absent, ConfigKey gate, ConfigKey rotary,
                                       const std::vector<ConfigKey>& own) {
  std::vector<ConfigKey> out = {
      size("vocab_size", &M::vocab, absent.vocab),
      size("hidden_size", &M::width, absent.width),
      scaled_embedding(),
      size("intermediate_size", &M::ffn, absent.ffn),
      size("num_hidden_layers", &M::layers, absent.layers),
      size("num_attention_heads", &M::heads, absent.heads),
      kv_heads(absent.kv_heads),
      head_dim(256),
      std::move(gate),
      size("max_position_embeddings", &M::context, absent.context),
      number("rms_norm_eps", &M::norm_eps, 1e-6),
      std::move(rotary),
  };
  out.insert(out.end(), own.begin(), own.end());
  out.push_back(biases("attention_bias", kQkv | kOut, false));
  out.push_back(dropout("attention_dropout", &M::attention_dropout));
  out.push_back(flag("tie_word_embeddings", &M::tied_embeddings, true));
  out.push_back(number("initializer_range", &M::init_std, 0.02));
  return out;
}

ConfigKey gemma_gate(std::string_view name) {
  std::vector<ActivationName> known = gated_activations();
  known.insert(known.begin(), {"gelu_pytorch_tanh", Activation::kGeGluTanh});
  return activation(name, "gelu_pytorch_tanh", known);
}

ModelConfig gemma_like_base() {
  M m = llama_like_base();
  m.norm_plus_one = true;
  return m;
}

}  // namespace cairn::convert
