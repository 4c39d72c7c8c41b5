#pragma once
// The recipe's `model`. runtime/config/recipe.h says how it is filled.

#include <cstdint>
#include <optional>
#include <vector>

namespace cairn {

enum class Positions { kNone, kLearned, kRotary, kAlibi };
enum class AlibiForm { kDistance, kRounded };
enum class NormKind { kLayerNorm, kRmsNorm };
enum class Activation {  // the second line has a gate projection: down(act(gate x) * up x)
  kGeluTanh,
  kGeluErf,
  kRelu,
  kGeluQuick,
  kRelu2,
  kSilu,
  kSwiGlu,
  kGeGlu,
  kGeGluTanh,
  kReGlu,
  kQuickGeGlu,
  kReGlu2,
  kSwiGluClamp  // down(gate sigmoid(swiglu_alpha gate) * (up + 1)), both within model.swiglu_limit (gpt-oss)
};
enum class BlockKind { kPreNorm, kPostNorm, kDeepNorm, kParallel, kParallelShared, kSandwich, kOutNorm };
enum class QkNorm { kNone, kHead, kWhole, kHeadLayerNorm, kL2, kSharedLayerNorm };
enum class Mask { kCausal, kBidirectional, kPrefix };
enum class TemperatureForm { kLlama4, kMinistral3 };
enum class RotaryPairs { kHalf, kInterleaved };
enum class RopeScaling { kNone, kLinear, kDynamic, kYarn, kLlama3, kLongRope };
enum class RouterKind { kSoftmax, kSigmoid };
enum class AuxScope { kLayer, kModel };
enum class WeightInit { kScaled, kPlain, kSmallWang, kDeepNorm };

/// Which channels of a head turn and how fast; model.rope_theta is the base. Read only with rotary positions.
struct RopeConfig {
  int64_t dims = 0;                        // the first channels of a head that turn, the others pass; 0: all
  RotaryPairs pairs = RotaryPairs::kHalf;  // (x_i, x_{i + dims/2}), or (x_2i, x_{2i+1})
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;                               // all scalings
  int64_t original_context = 0;                      // all but linear: trained on; 0: model.context
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  double attention_factor = 0;                       // yarn, longrope: of cos and sin; 0: from the factor (and mscales)
  double mscale = 0, mscale_all_dim = 0;             // yarn; 0: not given
  bool truncate = true;                              // yarn: ramp bounds are rounded to whole dimensions
  // longrope: what each pair's frequency is divided by, where a text stays within original_context and where it does
  // not
  std::vector<double> short_factor, long_factor;
  bool operator==(const RopeConfig&) const = default;
};

/// Experts instead of the MLP: softmax over all of them, the top_k largest are computed (Mixtral); or sigmoids, with a
/// bias that balances the choice (DeepSeek-V3).
struct MoeConfig {
  int64_t experts = 0;  // 0: a dense MLP
  int64_t top_k = 2;
  bool renormalise = true;  // the top_k weights are divided by their sum
  double aux_loss = 0;      // coefficient of the load-balancing loss
  RouterKind router = RouterKind::kSoftmax;
  double z_loss = 0;                         // coefficient of the squared log of the softmax's denominator
  int64_t shared_experts = 0;                // that every token goes through, as one MLP of so many times ffn units
  int64_t ffn = 0;                           // hidden units of an expert; 0: model.ffn
  std::vector<int64_t> dense_layers;         // layers, from 0, with an MLP of model.ffn units instead of experts
  int64_t shared_ffn = 0;                    // hidden units of that MLP by itself; 0: from shared_experts
  bool shared_gate = false;                  // its output is times a sigmoid of the token's own (Qwen2-MoE)
  bool router_bias = false;                  // the logits have trained biases (gpt-oss)
  bool scale_input = false;                  // a choice's weight is a factor of what the expert reads (Llama 4)
  int64_t groups = 1, groups_per_token = 1;  // the experts of a token are of the best groups_per_token of the groups
  double scale = 1.0;                        // of the routed experts' weights, after renormalising
  bool choice_bias = false;                  // the choice has biases, though nothing moves them
  double bias_rate = 0;                      // a step of the biases that balance the choice; 0: they stay
  AuxScope aux_scope = AuxScope::kLayer;
  bool operator==(const MoeConfig&) const = default;
};

/// Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one latent vector a token, and the
/// channels of a key that turn are one vector for all heads. model.head_dim is nope_dim + rope_dim then.
struct MlaConfig {
  int64_t kv_rank = 0;    // channels of the latent vector of keys and values; 0: plain attention
  int64_t q_rank = 0;     // of that of queries; 0: these come from the stream
  int64_t nope_dim = 0;   // channels of a head of queries and keys that do not turn
  int64_t rope_dim = 0;   // and behind them those that do
  int64_t value_dim = 0;  // of a head of values
  bool operator==(const MlaConfig&) const = default;
};

/// Multi-token prediction (DeepSeek-V3): behind the model, `depth` modules that guess one token further each. Module k
/// joins the hidden rows of the one before with the embeddings of the tokens k ahead, and runs a layer of its own.
struct MtpConfig {
  int64_t depth = 0;  // modules; 0: none
  double loss = 0.3;  // weight of the mean of their losses beside the model's own
  bool operator==(const MtpConfig&) const = default;
};

/// Options that GPT-2 and Llama lack are off as they stand here, and then they are not in the canonical JSON either.
struct ModelConfig {
  int64_t layers = 0;
  int64_t width = 0;     // H, the residual stream
  int64_t heads = 0;     // query heads
  int64_t kv_heads = 0;  // key/value heads; == heads without grouped-query attention
  int64_t head_dim = 0;  // width / heads unless set
  int64_t ffn = 0;       // F, hidden units of the MLP
  int64_t context = 0;   // S, tokens a sample
  int64_t vocab = 0;     // V, logical; the padded size depends on tp and is never stored
  Positions positions = Positions::kLearned;
  AlibiForm alibi = AlibiForm::kDistance;  // rounded: what is added has 16 bits and the scale of the scores (Falcon)
  int64_t position_offset = 0;  // learned: the table has context + offset rows, a token reads row position + offset
  double rope_theta = 10000.0;  // rotary only
  RopeConfig rope;
  int64_t embed_dim = 0;         // E, of token embedding and head, with projections to and from width; 0: width
  bool embedding_norm = false;   // a norm between embedding and the first layer
  double embedding_scale = 1.0;  // factor of the token embedding, before all else
  BlockKind block = BlockKind::kPreNorm;
  double residual_scale = 1.0;  // deep_norm: the factor of the residual, which there is the norm's output
  double branch_scale = 1.0;    // factor of what attention and MLP add to the stream
  NormKind norm = NormKind::kLayerNorm;
  bool norm_weight = true;     // the norms of the stream have a weight, LayerNorm then a bias too
  bool norm_bias = true;       // LayerNorm's; read with norm_weight
  bool norm_plus_one = false;  // norm weights count from 1, those of q and k too: the factor is 1 + weight
  double norm_eps = 1e-5;
  bool final_norm = true;
  Activation activation = Activation::kGeluTanh;
  double swiglu_alpha = 1.702, swiglu_limit = 7;  // of swiglu_clamp alone
  bool bias = true;  // on every projection of the layers (q, k, v, o, MLP), GPT-2; none in Llama
  std::optional<bool> qkv_bias, out_bias, mlp_bias;  // of these projections, experts' too; unset: as `bias`
  bool head_bias = false;                            // on the head, tied or not
  double clip_qkv = 0;                               // q, k and v are clamped to +- this; 0: not
  QkNorm qk_norm = QkNorm::kNone;                    // of q and of k, before rotary
  Mask mask = Mask::kCausal;
  int64_t sliding_window = 0;          // a query sees itself and window - 1 keys before it; 0: all
  std::vector<int64_t> window_layers;  // layers that use the window, from 0; empty: all
  double window_rope_theta = 0;        // rotary base of the layers with the window, without scaling; 0: as others
  std::vector<int64_t> nope_layers;    // layers, from 0, in which q and k do not turn
  int64_t attention_chunk = 0;         // a query sees the keys before it in its chunk of so many tokens; 0: all
  std::vector<int64_t> chunk_layers;   // layers that use the chunks, from 0; empty: all
  double temperature_scale = 0;        // q at position p is times 1 + this ln(1 + floor(n / floor)); 0: not
  int64_t temperature_floor = 8192;    // llama4: n is p + 1, where q and k do not turn; ministral3: p, in all layers
  TemperatureForm temperature_form = TemperatureForm::kLlama4;
  bool attention_sinks = false;           // a trained score of each head in the softmax's denominator alone (gpt-oss)
  double attention_scale = 0;             // of the scores; 0: 1 / sqrt(head_dim)
  bool attention_scale_by_layer = false;  // and divided by layer + 1 (GPT-2's option)
  double score_cap = 0;                   // scores s become cap tanh(s / cap), before the mask; 0: not
  double logit_scale = 1.0;
  double logit_cap = 0;    // the same of logits, after logit_scale
  bool top_query = false;  // one more layer after final_norm whose queries come from a table of positions (CodeGeeX)
  MlaConfig mla;
  MoeConfig moe;
  MtpConfig mtp;
  bool tied_embeddings = true;
  double embedding_dropout = 0, attention_dropout = 0, residual_dropout = 0;  // rates; residual: each branch's output
  double init_std = 0.02;                                                     // of N(0, std)
  WeightInit init = WeightInit::kScaled;  // scaled: residual outputs (attn.o, mlp.down) get std / sqrt(2 layers)
};

}  // namespace cairn
