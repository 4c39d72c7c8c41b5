// Gemma: Llama with norm weights that count from 1, a scaled embedding and a GELU gate. Source: transformers
// models/gemma.
#include "converters/gemma_like.h"

namespace cairn::convert {
namespace {

/// Both classes read hidden_act, neither hidden_activation. "gelu", as first published, is meant as the tanh form:
/// transformers 5 takes it so, 4.x takes erf.
ConfigKey gate() {
  ConfigKey out = activation("hidden_act", "gelu_pytorch_tanh", gated_activations());
  out.names.push_back("hidden_activation");
  out.read = [known = out.read](ConfigReader& in, ModelConfig& m) {
    known(in, m);
    if (in.text("hidden_act", "") != "gelu") return;
    m.activation = Activation::kGeGluTanh;
    in.note(
        "hidden_act = \"gelu\" is taken as gelu_pytorch_tanh, as the model was trained and transformers 5 reads "
        "it; 4.x computes the exact form");
  };
  out.write = gemma_gate("hidden_act").write;
  out.may_keep = [](std::string_view, const nlohmann::json& value) { return value.is_string() && value != "gelu"; };
  return out;
}

}  // namespace

Family gemma_family() {
  static const std::vector<ConfigKey> kKeys = gemma_like_keys(
      {.vocab = 256000, .width = 3072, .ffn = 24576, .layers = 28, .heads = 16, .kv_heads = 16, .context = 8192},
      gate(), rope({.old_type_counts = false}), {});
  return llama_like(
      {.model_type = "gemma", .architecture = "GemmaForCausalLM", .base = gemma_like_base, .keys = kKeys});
}

}  // namespace cairn::convert
