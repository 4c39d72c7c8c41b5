// Baichuan and Baichuan 2, as published with code of their own: Llama with q, k and v in one projection. Models of 7B
// turn positions, those of 13B have ALiBi. A model goes out as `llama` where that holds it. Source: the published
// modeling_baichuan.py; vLLM model_executor/models/baichuan.py; llama.cpp convert_hf_to_gguf.py.
#include <fmt/format.h>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

// Baichuan 2's code divides the rows of the head by their lengths; nothing but the vocabulary's size says so.
constexpr int64_t kUnitHeadVocab = 125696;
constexpr int64_t kTurningWidth = 4096;  // of the 7B models, where no key says what positions are

constexpr auto kTensors = with_llama_rows({{"layers.*.attn.{q,k,v}.*", "model.layers.*.self_attn.W_pack.*"}});

/// The code of the 7B models has max_position_embeddings, that of the 13B ones model_max_length alone.
ConfigKey positions() {
  constexpr std::string_view kTurning = "max_position_embeddings", kAlibi = "model_max_length";
  return {{kTurning, kAlibi},
          [=](ConfigReader& in, M& m) {
            const bool turns = in.find(kTurning) != nullptr || (in.find(kAlibi) == nullptr && m.width == kTurningWidth);
            m.positions = turns ? Positions::kRotary : Positions::kAlibi;
            m.context = read_size(in, turns ? kTurning : kAlibi, &M::context, 4096);
          },
          [=](const M& m, ordered_json& out) {
            out[std::string(m.positions == Positions::kAlibi ? kAlibi : kTurning)] = m.context;
          }};
}

ConfigKey tied() {
  ConfigKey key = flag("tie_word_embeddings", &M::tied_embeddings, false);
  key.read = [read = key.read](ConfigReader& in, M& m) {
    read(in, m);
    if (m.tied_embeddings && m.vocab == kUnitHeadVocab) {
      in.unsupported(
          fmt::format("tie_word_embeddings = true with vocab_size = {}: the head's rows would be divided by "
                      "their lengths, and the embedding's would not",
                      m.vocab));
    }
  };
  return key;
}

}  // namespace

Family baichuan_family() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 64000),
      size("hidden_size", &M::width, 4096),
      size("intermediate_size", &M::ffn, 11008),
      size("num_hidden_layers", &M::layers, 32),
      size("num_attention_heads", &M::heads, 32),
      divided_heads(),
      activation("hidden_act", "silu", gated_activations()),
      positions(),
      number("rms_norm_eps", &M::norm_eps, 1e-6),
      tied(),
      number("initializer_range", &M::init_std, 0.02),
      unread({"z_loss_weight", "gradient_checkpointing", "user_token_id", "assistant_token_id"}),
  };
  return llama_like({.model_type = "baichuan",
                     .architecture = "BaichuanForCausalLM",
                     .keys = kKeys,
                     .tensors = kTensors,
                     .own_code = true,
                     .unit_head_vocab = kUnitHeadVocab});
}

}  // namespace cairn::convert
