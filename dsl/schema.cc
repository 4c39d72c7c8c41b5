#include "dsl/schema.h"

#include <map>

#include "dsl/schema_words.h"
#include "runtime/config/recipe.h"
#include "runtime/core/check.h"
#include "runtime/json/json.h"

namespace cairn::dsl {
namespace {

/// JSON text that the struct keeps as it is.
Json parsed_object(const std::string& text) {
  Json out = text.empty() ? Json::object() : json_or_nothing(text);
  RT_CHECK(out.is_object(), "not a JSON object: {}", text);
  return out;
}

// --- the table
// --------------------------------------------------------------------------------------------------------

const Block& rope_block() {
  static const Block out{
      .name = "rope",
      .doc = "Which channels of a head turn and how their angles are scaled. Read only with rotary positions.",
      .fields = {
          bound("dims", &RopeConfig::dims)
              .range(0, 1 << 16)
              .otherwise(0)
              .silently()
              .says("channels of a head that turn, its first ones; 0: all", "Must be even, at most model.head_dim."),
          chosen("pairs", &RopeConfig::pairs, {"half", "interleaved"})
              .otherwise("half")
              .silently()
              .says("which channels turn together",
                    "half: (i, i + dims/2), GPT-NeoX and Llama; interleaved: (2i, 2i+1), GPT-J and GLM."),
          chosen("scaling", &RopeConfig::scaling, {"none", "linear", "dynamic", "yarn", "llama3", "longrope"})
              .otherwise("none")
              .silently()
              .says("how the angles are changed for a longer context"),
          bound("factor", &RopeConfig::factor)
              .at_least(1)
              .otherwise(1.0)
              .silently()
              .says("how much longer; read by every scaling", "longrope: for the factor of cosines and sines alone."),
          bound("original_context", &RopeConfig::original_context)
              .range(0, 1 << 24)
              .otherwise(0)
              .silently()
              .says("tokens of the context before; 0: model.context", "Read by dynamic, yarn, llama3 and longrope."),
          bound("low_freq_factor", &RopeConfig::low_freq_factor)
              .above(0)
              .otherwise(1.0)
              .silently()
              .says("llama3: wavelengths above original_context / this are scaled"),
          bound("high_freq_factor", &RopeConfig::high_freq_factor)
              .above(0)
              .otherwise(4.0)
              .silently()
              .says("llama3: wavelengths below original_context / this are not"),
          bound("beta_fast", &RopeConfig::beta_fast)
              .above(0)
              .otherwise(32.0)
              .silently()
              .says("yarn: turns in the original context above which a dimension is not scaled"),
          bound("beta_slow", &RopeConfig::beta_slow)
              .above(0)
              .otherwise(1.0)
              .silently()
              .says("yarn: turns below which it is scaled by the whole factor"),
          bound("attention_factor", &RopeConfig::attention_factor)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("yarn, longrope: factor of cosines and sines",
                    "0: yarn has 0.1 ln(factor) + 1, or what mscale and mscale_all_dim give; longrope has "
                    "sqrt(1 + ln(factor) / ln(original_context))."),
          bound("mscale", &RopeConfig::mscale)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("yarn: with mscale_all_dim, another way to the attention factor; 0: not given"),
          bound("mscale_all_dim", &RopeConfig::mscale_all_dim)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("yarn: see mscale"),
          bound("truncate", &RopeConfig::truncate)
              .otherwise(true)
              .silently()
              .says("yarn: the ends of the ramp are whole dimensions"),
          bound("short_factor", &RopeConfig::short_factor)
              .above(0)
              .otherwise(Json::array())
              .silently()
              .says("longrope: divides the frequency of each pair of channels, in samples within original_context"),
          bound("long_factor", &RopeConfig::long_factor)
              .above(0)
              .otherwise(Json::array())
              .silently()
              .says("longrope: the same, in samples that are longer"),
      }};
  return out;
}

const Block& rotary_block() {
  static const Block out{
      .name = "rotary",
      .constructors = {"rotary"},
      .doc = "Rotary positions; sets model.positions, model.rope_theta and model.rope.",
      .fields = [] {
        std::vector<Field> fields = {
            written_only("theta", Type::kNumber, "rope_theta")
                .above(0)
                .otherwise(10000.0)
                .says("base of the rotation angles"),
            written_only("fraction", Type::kNumber, "rope.dims")
                .above(0)
                .below_or_at(1)
                .otherwise(1.0)
                .says("part of a head's channels that turn", "Sets model.rope.dims to this times model.head_dim."),
        };
        for (Field field : rope_block().fields) {
          field.key = "rope." + field.key;
          field.load = nullptr;
          field.store = nullptr;
          fields.push_back(std::move(field));
        }
        return fields;
      }()};
  return out;
}

const Block& mtp_block() {
  static const Block out{
      .name = "mtp",
      .doc =
          "Multi-token prediction (DeepSeek-V3): behind the model come modules that guess one token further each. "
          "Module k joins the hidden rows of the one before with the embeddings of the tokens k ahead, and runs a "
          "layer "
          "of its own; table of embeddings and head are the model's. Training alone runs them.",
      .fields = {
          bound("depth", &MtpConfig::depth).range(0, 16).otherwise(0).silently().says("modules; 0: none"),
          bound("loss", &MtpConfig::loss)
              .at_least(0)
              .otherwise(0.3)
              .silently()
              .says("weight of their losses' mean beside the model's loss",
                    "The loss of a module is a mean over the rows that have a token so far ahead."),
      }};
  return out;
}

const Block& mla_block() {
  static const Block out{
      .name = "mla",
      .doc =
          "Multi-head latent attention (DeepSeek-V2, V3): keys and values of all heads come from one latent vector a "
          "token, which is what generation keeps of it. model.head_dim is nope_dim + rope_dim.",
      .fields = {
          bound("kv_rank", &MlaConfig::kv_rank)
              .range(0, 1 << 20)
              .otherwise(0)
              .silently()
              .says("channels of the latent vector of keys and values; 0: plain attention"),
          bound("q_rank", &MlaConfig::q_rank)
              .range(0, 1 << 20)
              .otherwise(0)
              .silently()
              .says("channels of the latent vector of queries; 0: these come from the residual stream"),
          bound("nope_dim", &MlaConfig::nope_dim)
              .range(0, 1 << 16)
              .otherwise(0)
              .silently()
              .says("channels of a head of queries and keys that do not turn"),
          bound("rope_dim", &MlaConfig::rope_dim)
              .range(0, 1 << 16)
              .otherwise(0)
              .silently()
              .says("channels behind them that turn; those of keys are the same in all heads", "Must be even."),
          bound("value_dim", &MlaConfig::value_dim)
              .range(0, 1 << 16)
              .otherwise(0)
              .silently()
              .says("channels of a head of values",
                    "At most nope_dim + rope_dim, to which values are widened with zeros where they are fewer."),
      }};
  return out;
}

const Block& moe_block() {
  static const Block out{
      .name = "moe",
      .constructors = {"moe"},
      .doc =
          "Experts instead of the MLP: a router picks top_k for each token, by softmax as in Mixtral or by sigmoids "
          "with a bias as in DeepSeek-V3. mesh.ep divides them over ranks.",
      .fields = {
          bound("experts", &MoeConfig::experts)
              .range(0, 1 << 16)
              .otherwise(0)
              .silently()
              .says("experts of a layer; 0: a dense MLP"),
          bound("ffn", &MoeConfig::ffn)
              .range(0, 1 << 22)
              .otherwise(0)
              .silently()
              .says("hidden units of an expert; 0: model.ffn", "Must be divisible by mesh.tp."),
          bound("dense_layers", &MoeConfig::dense_layers)
              .range(0, 100000)
              .otherwise(Json::array())
              .silently()
              .says("layers with an MLP of model.ffn hidden units instead of experts, counted from 0",
                    "Pipeline stages are balanced by the products of each layer then."),
          bound("top_k", &MoeConfig::top_k)
              .range(1, 1 << 10)
              .otherwise(2)
              .silently()
              .says("experts that a token goes through", "No more than model.moe.experts. No token is dropped."),
          bound("renormalise", &MoeConfig::renormalise)
              .otherwise(true)
              .silently()
              .says("the weights of the chosen experts are divided by their sum"),
          bound("aux_loss", &MoeConfig::aux_loss)
              .range(0, 100)
              .otherwise(0.0)
              .silently()
              .says("coefficient of the loss that balances the experts",
                    "experts * sum over e of f_e P_e over the tokens of a micro-batch: choices of expert e a token "
                    "(top_k in "
                    "all), times its mean probability. With sigmoids, of each score's part of the sum of all."),
          chosen("aux_scope", &MoeConfig::aux_scope, {"layer", "model"})
              .otherwise("layer")
              .silently()
              .says("where aux_loss takes its means",
                    "layer: in each layer, and the losses of all layers are added (Switch Transformer, Megatron-LM). "
                    "model: over all layers, one loss in all (transformers' Mixtral)."),
          chosen("router", &MoeConfig::router, {"softmax", "sigmoid"})
              .otherwise("softmax")
              .silently()
              .says("what makes an expert's score of its logit"),
          bound("z_loss", &MoeConfig::z_loss)
              .range(0, 100)
              .otherwise(0.0)
              .silently()
              .says("weight of the squared logarithm of the router's softmax denominator",
                    "Added to each token's loss, in the gradients alone; keeps logits small. Softmax only."),
          bound("shared_experts", &MoeConfig::shared_experts)
              .range(0, 1 << 10)
              .otherwise(0)
              .silently()
              .says("experts that every token goes through besides",
                    "As one MLP of shared_experts times the hidden units of an expert."),
          bound("shared_ffn", &MoeConfig::shared_ffn)
              .range(0, 1 << 22)
              .otherwise(0)
              .silently()
              .says("hidden units of the MLP that every token goes through besides; 0: as shared_experts says",
                    "Must be divisible by mesh.tp."),
          bound("shared_gate", &MoeConfig::shared_gate)
              .otherwise(false)
              .silently()
              .says("what that MLP puts out is multiplied by a sigmoid of the token's own (Qwen2-MoE)",
                    "Its weights are in checkpoints as moe.shared_gate."),
          bound("router_bias", &MoeConfig::router_bias)
              .otherwise(false)
              .silently()
              .says("the router's logits have biases, trained as all else (gpt-oss)",
                    "They are in checkpoints as moe.router.logit_bias; those that balance the choice are others."),
          bound("scale_input", &MoeConfig::scale_input)
              .otherwise(false)
              .silently()
              .says("an expert's weight is a factor of what it reads, not of what it puts out (Llama 4)"),
          bound("groups", &MoeConfig::groups)
              .range(1, 64)
              .otherwise(1)
              .silently()
              .says("groups of equally many experts, of which a token chooses from the best groups_per_token",
                    "Must divide model.moe.experts. With as many groups as nodes, a token goes to few of them. A group "
                    "is "
                    "as good as its best expert, with sigmoids as its two best together."),
          bound("groups_per_token", &MoeConfig::groups_per_token)
              .range(1, 64)
              .otherwise(1)
              .silently()
              .says("groups that a token may choose from"),
          bound("scale", &MoeConfig::scale)
              .above(0)
              .otherwise(1.0)
              .silently()
              .says("factor of the chosen experts' weights, after renormalise"),
          bound("choice_bias", &MoeConfig::choice_bias)
              .otherwise(false)
              .silently()
              .says("the choice of experts has biases, though bias_rate is 0: they stay as they are",
                    "A model that was trained with biases needs them."),
          bound("bias_rate", &MoeConfig::bias_rate)
              .range(0, 1)
              .otherwise(0.0)
              .silently()
              .says("step by which an expert's bias follows its share of the choices; 0: none does",
                    "Each update raises the bias of experts with fewer choices than the mean over the batch and lowers "
                    "the "
                    "others'. Biases decide which experts are chosen, not their weights; they are in checkpoints as "
                    "moe.router.bias."),
      }};
  return out;
}

const Block& vocab_block() {
  static const Block out{.name = "vocab",
                         .constructors = {"vocab"},
                         .doc = "The vocabulary. Padding to a multiple of tp is added at run time and never stored.",
                         .fields = {written_only("size", Type::kInt)
                                        .range(1, kMany)
                                        .needed()
                                        .in(Unit::kCount)
                                        .says("tokens of the tokenizer, special ones included")}};
  return out;
}

const Block& model_block() {
  static const Block out{
      .name = "model",
      .constructors = {"gpt", "llama"},
      .doc = "The decoder. T.gpt has GPT-2's defaults, T.llama has Llama's: rmsnorm, rotary, swiglu, no bias, untied.",
      .fields = {
          bound("layers", &ModelConfig::layers).range(1, 100000).needed().says("decoder blocks").like("12"),
          bound("width", &ModelConfig::width)
              .range(1, 1 << 20)
              .needed()
              .says("channels of the residual stream", "Must be divisible by model.heads unless model.head_dim is set.")
              .like("768"),
          bound("heads", &ModelConfig::heads)
              .range(1, 1 << 16)
              .needed()
              .says("query heads", "Must divide model.width and be divisible by mesh.tp.")
              .like("12"),
          bound("kv_heads", &ModelConfig::kv_heads)
              .range(1, 1 << 16)
              .derived("model.heads")
              .says("key and value heads",
                    "Fewer than model.heads is grouped-query attention: must divide it. It and mesh.tp: one divides "
                    "the other; "
                    "with more ranks than heads several ranks hold a head, and checkpoints still have it once."),
          bound("head_dim", &ModelConfig::head_dim)
              .range(1, 1 << 16)
              .derived("model.width / model.heads; with model.mla nope_dim + rope_dim")
              .says("channels of one head", "Must be even with rotary positions."),
          bound("ffn", &ModelConfig::ffn)
              .range(1, 1 << 22)
              .derived("4 * model.width; T.llama: 8/3 * model.width, rounded up to a multiple of 64")
              .says("hidden units of the MLP", "Must be divisible by mesh.tp."),
          bound("context", &ModelConfig::context)
              .range(1, 1 << 24)
              .needed()
              .in(Unit::kCount)
              .says("tokens of one sample")
              .like("1024"),
          bound("vocab", &ModelConfig::vocab)
              .range(1, kMany)
              .needed()
              .in(Unit::kCount)
              .written(Form::kVocab, {&vocab_block()})
              .says("tokens in the vocabulary",
                    "The logical size. Rows are padded to a multiple of mesh.tp at run time, so every size fits; the "
                    "padding is never stored.")
              .like("50257"),
          chosen("positions", &ModelConfig::positions, {"none", "learned", "rotary", "alibi"})
              .otherwise("learned")
              .in_llama("rotary")
              .written(Form::kPositions, {&rotary_block()})
              .says(
                  "how a token knows its place",
                  "`T.rotary { theta = 500000, fraction = 0.25 }` sets model.rope_theta and model.rope as well. alibi "
                  "adds -slope * distance to the scores, with a slope for each head.")
              .like("T.rotary { theta = 10000 }"),
          chosen("alibi", &ModelConfig::alibi, {"distance", "rounded"})
              .otherwise("distance")
              .silently()
              .says("what model.positions = \"alibi\" adds to a score",
                    "distance: -slope * distance (BLOOM, Baichuan). rounded: slope * position of the key in its "
                    "document, each factor and the product rounded to bfloat16 in any precision, and then scaled as "
                    "the score is (Falcon)."),
          bound("rope_theta", &ModelConfig::rope_theta)
              .above(0)
              .otherwise(10000.0)
              .says("base of the rotary angles", "Read only with rotary positions."),
          block("rope", &ModelConfig::rope, rope_block()).silently().says("more about rotary positions"),
          bound("position_offset", &ModelConfig::position_offset)
              .range(0, 1 << 20)
              .otherwise(0)
              .silently()
              .says("learned positions: rows of the table before the first position", "2 in OPT; they are never read."),
          bound("embed_dim", &ModelConfig::embed_dim)
              .range(0, 1 << 20)
              .otherwise(0)
              .silently()
              .says("channels of token embedding and head; 0: model.width",
                    "When it differs from model.width a projection leads in and one out (OPT-350m)."),
          bound("embedding_norm", &ModelConfig::embedding_norm)
              .otherwise(false)
              .silently()
              .says("a norm right after the embedding (BLOOM)"),
          bound("embedding_scale", &ModelConfig::embedding_scale)
              .above(0)
              .otherwise(1.0)
              .silently()
              .says("factor of the token embedding, before all else",
                    "Gemma: the root of model.width. Rounded to the precision of the run, as transformers does."),
          chosen("block", &ModelConfig::block,
                 {"pre_norm", "post_norm", "deep_norm", "parallel", "parallel_shared", "sandwich", "out_norm"})
              .otherwise("pre_norm")
              .silently()
              .says("where a layer's norms and additions stand",
                    "f is attention, then the MLP. pre_norm: x + f(norm x). post_norm: norm(x + f(x)). deep_norm: "
                    "a norm x + f(norm x), a = model.residual_scale. parallel: x + attention(norm x) + mlp(norm' x); "
                    "parallel_shared: one norm for both. sandwich: x + norm'(f(norm x)). out_norm: x + norm(f(x))."),
          bound("branch_scale", &ModelConfig::branch_scale)
              .above(0)
              .otherwise(1.0)
              .silently()
              .says("factor of what attention and MLP add to the stream",
                    "x + s f(norm x) (Granite). Not with parallel blocks."),
          bound("residual_scale", &ModelConfig::residual_scale)
              .above(0)
              .otherwise(1.0)
              .silently()
              .says("deep_norm: factor of the residual",
                    "GLM-130B: sqrt(2 * layers). 1 with deep_norm is BLOOM's "
                    "residual after the norm."),
          chosen("norm", &ModelConfig::norm, {"layernorm", "rmsnorm"})
              .otherwise("layernorm")
              .in_llama("rmsnorm")
              .says("normalisation before attention, MLP and head"),
          bound("norm_weight", &ModelConfig::norm_weight)
              .otherwise(true)
              .silently()
              .says("these norms have weights", "false: no bias either (OLMo)."),
          bound("norm_bias", &ModelConfig::norm_bias)
              .otherwise(true)
              .silently()
              .says("layernorm: they have biases", "false: weights alone (Cohere). Norms of q and k have none ever."),
          bound("norm_plus_one", &ModelConfig::norm_plus_one)
              .otherwise(false)
              .silently()
              .says("weights of norms count from 1: the factor is 1 + weight (Gemma)",
                    "Of model.qk_norm too. They begin at 0."),
          bound("norm_eps", &ModelConfig::norm_eps)
              .above(0)
              .below_or_at(1)
              .otherwise(1e-5)
              .says("added to the variance"),
          bound("final_norm", &ModelConfig::final_norm)
              .otherwise(true)
              .silently()
              .says("a norm between the last layer and the head"),
          chosen("activation", &ModelConfig::activation,
                 {"gelu_tanh", "gelu", "relu", "gelu_quick", "relu2", "silu", "swiglu", "geglu", "geglu_tanh", "reglu",
                  "quick_geglu", "reglu2", "swiglu_clamp"})
              .otherwise("gelu_tanh")
              .in_llama("swiglu")
              .says("of the MLP",
                    "gelu_tanh is GPT-2's approximation, gelu the exact one, gelu_quick x sigmoid(1.702 x); relu2 is "
                    "squared ReLU. swiglu, geglu, geglu_tanh, reglu, quick_geglu and reglu2 add a gate projection: "
                    "down(act(gate x) * up x). swiglu_clamp, of gpt-oss: down(g sigmoid(swiglu_alpha g) * (u + 1)) "
                    "with g "
                    "= min(gate x, swiglu_limit) and u = up x within +- swiglu_limit."),
          bound("swiglu_alpha", &ModelConfig::swiglu_alpha)
              .above(0)
              .otherwise(1.702)
              .silently()
              .says("swiglu_clamp: factor inside the sigmoid"),
          bound("swiglu_limit", &ModelConfig::swiglu_limit)
              .above(0)
              .otherwise(7.0)
              .silently()
              .says("swiglu_clamp: bound of what gate and up give", "No gradient goes through what was beyond it."),
          bound("bias", &ModelConfig::bias)
              .otherwise(true)
              .in_llama(false)
              .says("a bias on every projection of the layers (q, k, v, o, MLP)"),
          bound("qkv_bias", &ModelConfig::qkv_bias).derived("model.bias").silently().says("a bias on q, k and v"),
          bound("out_bias", &ModelConfig::out_bias)
              .derived("model.bias")
              .silently()
              .says("a bias on the output projection of attention"),
          bound("mlp_bias", &ModelConfig::mlp_bias)
              .derived("model.bias")
              .silently()
              .says("a bias on the projections of the MLP",
                    "With model.moe on those of each expert (gpt-oss), and of those that every token goes "
                    "through (ERNIE 4.5)."),
          bound("head_bias", &ModelConfig::head_bias).otherwise(false).silently().says("a bias on the output head"),
          bound("clip_qkv", &ModelConfig::clip_qkv)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("q, k and v are brought within +- this, behind projection and bias (OLMo); 0: not",
                    "No gradient goes through what was clipped. Not with model.qk_norm."),
          chosen("qk_norm", &ModelConfig::qk_norm,
                 {"none", "head", "whole", "head_layernorm", "l2", "shared_layernorm"})
              .otherwise("none")
              .silently()
              .says("norms of q and k before rotary",
                    "head: RMSNorm of each head (Qwen3), one weight of model.head_dim for all query heads of a layer, "
                    "one for its key heads. whole: RMSNorm of all heads together (OLMo 2), a weight for each channel; "
                    "with tp ranks add two numbers a token. head_layernorm: LayerNorm of each head, with a weight of "
                    "its own and no bias (Cohere). l2: RMSNorm of each head without weights, in layers whose q and k "
                    "turn (Llama 4). shared_layernorm: LayerNorm of each head, with one weight and one bias for all "
                    "query heads of a layer, and one for its key heads (Phi)."),
          chosen("mask", &ModelConfig::mask, {"causal", "bidirectional", "prefix"})
              .otherwise("causal")
              .silently()
              .says("which keys a query sees"),
          bound("sliding_window", &ModelConfig::sliding_window)
              .range(0, 1 << 24)
              .otherwise(0)
              .silently()
              .says("a query sees itself and window - 1 keys before it; 0: all (Mistral)"),
          bound("window_layers", &ModelConfig::window_layers)
              .range(0, 100000)
              .otherwise(Json::array())
              .silently()
              .says("layers that use model.sliding_window, counted from 0; empty: all"),
          bound("window_rope_theta", &ModelConfig::window_rope_theta)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("rotary base of the layers with a window (Gemma 3); 0: as the others",
                    "model.rope.scaling is not for them then."),
          bound("nope_layers", &ModelConfig::nope_layers)
              .range(0, 100000)
              .otherwise(Json::array())
              .silently()
              .says("layers whose q and k do not turn (SmolLM3), counted from 0"),
          bound("attention_chunk", &ModelConfig::attention_chunk)
              .range(0, 1 << 24)
              .otherwise(0)
              .silently()
              .says("a query sees itself and the keys before it in its chunk of so many tokens (Llama 4); 0: all",
                    "Chunks are counted from where the query's document begins."),
          bound("chunk_layers", &ModelConfig::chunk_layers)
              .range(0, 100000)
              .otherwise(Json::array())
              .silently()
              .says("layers that use model.attention_chunk, counted from 0; empty: all"),
          bound("temperature_scale", &ModelConfig::temperature_scale)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("the query at position p is multiplied by 1 + this * ln(1 + floor(n / temperature_floor)); 0: not"),
          bound("temperature_floor", &ModelConfig::temperature_floor)
              .range(1, 1 << 24)
              .otherwise(8192)
              .silently()
              .says("tokens from one step of that factor to the next"),
          chosen("temperature_form", &ModelConfig::temperature_form, {"llama4", "ministral3"})
              .otherwise("llama4")
              .silently()
              .says("which n and which layers",
                    "llama4: n is p + 1, in model.nope_layers. ministral3: n is p, in all layers."),
          bound("attention_sinks", &ModelConfig::attention_sinks)
              .otherwise(false)
              .silently()
              .says("each head has a trained score that stands in the softmax's denominator alone (gpt-oss)"),
          bound("attention_scale", &ModelConfig::attention_scale)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("factor of the scores; 0: 1 / sqrt(model.head_dim)"),
          bound("attention_scale_by_layer", &ModelConfig::attention_scale_by_layer)
              .otherwise(false)
              .silently()
              .says("the scores of layer i, from 0, are divided by i + 1 as well"),
          bound("score_cap", &ModelConfig::score_cap)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("scores s become score_cap tanh(s / score_cap) (Gemma 2); 0: not", "Once scaled, before the mask."),
          bound("logit_scale", &ModelConfig::logit_scale)
              .above(0)
              .otherwise(1.0)
              .silently()
              .says("factor of the logits"),
          bound("logit_cap", &ModelConfig::logit_cap)
              .at_least(0)
              .otherwise(0.0)
              .silently()
              .says("logits z become logit_cap tanh(z / logit_cap) (Gemma 2); 0: not", "Once scaled."),
          bound("top_query", &ModelConfig::top_query)
              .otherwise(false)
              .silently()
              .says("one more layer after the final norm whose queries come from a table of positions (CodeGeeX)"),
          block("mla", &ModelConfig::mla, mla_block()).silently().says("attention by latent vectors"),
          block("moe", &ModelConfig::moe, moe_block()).silently().says("experts instead of the MLP"),
          block("mtp", &ModelConfig::mtp, mtp_block()).silently().says("modules that guess further tokens"),
          bound("tied_embeddings", &ModelConfig::tied_embeddings)
              .otherwise(true)
              .in_llama(false)
              .says("the output head is the token embedding"),
          bound("embedding_dropout", &ModelConfig::embedding_dropout)
              .at_least(0)
              .under(1)
              .otherwise(0.0)
              .silently()
              .says("dropout rate of the embedded tokens",
                    "Masks are drawn from the seed and each sample's place in the run, so that they depend on no "
                    "layout."),
          bound("attention_dropout", &ModelConfig::attention_dropout)
              .at_least(0)
              .under(1)
              .otherwise(0.0)
              .silently()
              .says("dropout rate of the attention probabilities"),
          bound("residual_dropout", &ModelConfig::residual_dropout)
              .at_least(0)
              .under(1)
              .otherwise(0.0)
              .silently()
              .says("dropout rate of what attention and MLP add to the residual stream")
              .like("0.1"),
          bound("init_std", &ModelConfig::init_std)
              .above(0)
              .below_or_at(10)
              .otherwise(0.02)
              .says("standard deviation of the initial weights", "Of those that model.init does not give another one."),
          chosen("init", &ModelConfig::init, {"scaled", "plain", "small_wang", "deep_norm"})
              .otherwise("scaled")
              .silently()
              .says("rule of the initial weights, all normal",
                    "scaled: model.init_std, and for the outputs of attention and MLP that over sqrt(2 * layers) "
                    "(GPT-2, Megatron). plain: model.init_std everywhere. small_wang: sqrt(2 / (5 width)), outputs "
                    "2 / (layers sqrt(width)) (GPT-NeoX). deep_norm: Xavier, sqrt(2 / (rows + columns)), times "
                    "1 / sqrt(2 * layers) except for q and k; embeddings by model.init_std (GLM-130B)."),
      }};
  return out;
}

const Block& sentencepiece_block() {
  static const Block out{.name = "sentencepiece",
                         .constructors = {"sentencepiece"},
                         .positional = true,
                         .doc = "A SentencePiece model file: T.sentencepiece \"tokenizer.model\".",
                         .fields = {written_only("path", Type::kString).needed().says("the model file")}};
  return out;
}

const Block& hf_tokenizer_block() {
  static const Block out{.name = "hf_tokenizer",
                         .constructors = {"hf_tokenizer"},
                         .positional = true,
                         .doc = "A Hugging Face tokenizer.json: T.hf_tokenizer \"gpt2/tokenizer.json\".",
                         .fields = {written_only("path", Type::kString)
                                        .needed()
                                        .says("the file tokenizer.json",
                                              "The eos_token of a tokenizer_config.json beside it ends documents.")}};
  return out;
}

const Block& bytes_block() {
  static const Block out{.name = "bytes",
                         .constructors = {"bytes"},
                         .constant = true,
                         .doc = "Each byte of the text is a token (0 to 255). No file."};
  return out;
}

const Block& tokenizer_block() {
  static const Block out{
      .name = "tokenizer",
      .doc = "How text becomes tokens, for `cairn data tokenize`, `cairn generate` and export.",
      .fields = {
          chosen("kind", &TokenizerConfig::kind, {"none", "bytes", "sentencepiece", "hf"})
              .otherwise("none")
              .says("which tokenizer"),
          bound("path", &TokenizerConfig::path).otherwise("").says("the SentencePiece model or tokenizer.json")}};
  return out;
}

Def weight_field() {
  return written_only("weight", Type::kNumber)
      .at_least(0)
      .otherwise(1.0)
      .says("share in a blend",
            "Weights are normalised to a sum of 1. 0: opened and checked, and not drawn from until a stage or an edit "
            "gives it more; one source at least has more than 0.");
}

Def source_name_field() {
  return written_only("name", Type::kString)
      .derived("the last part of the path, without extension")
      .says("what metrics call this source");
}

Def source_tokens_field(Def field) {
  return field.range(0, 1LL << 50)
      .silently()
      .otherwise(0)
      .says("use only so many tokens of the training part, the first ones",
            "0: all. A source that grew under way began with fewer: with the number that it had, a run begins as that "
            "one did.");
}

const Block& megatron_block() {
  static const Block out{
      .name = "megatron",
      .constructors = {"megatron"},
      .doc = "A Megatron dataset: PREFIX.bin and PREFIX.idx, as `cairn data tokenize` writes them.",
      .fields = {written_only("prefix", Type::kString, "path")
                     .needed()
                     .says("path without .bin and .idx", "Relative to the working directory."),
                 written_only("split", Type::kNumberList)
                     .at_least(0)
                     .otherwise(Json::array({1.0}))
                     .says("parts for training, validation and test",
                           "Up to three numbers, normalised; by documents, or by tokens when there is one document.")
                     .like("{ 95, 5 }"),
                 weight_field(), source_name_field(), source_tokens_field(written_only("tokens", Type::kInt))}};
  return out;
}

const Block& token_files_block() {
  static const Block out{
      .name = "token_files",
      .constructors = {"token_files"},
      .doc =
          "Little-endian token files: plain, as nanoGPT writes them; with the header of llm.c's shards; or lists that "
          "numpy.save wrote.",
      .fields = {written_only("train", Type::kString, "path")
                     .needed()
                     .says("the training tokens", "Relative to the working directory."),
                 written_only("valid", Type::kString, "valid_path").otherwise("").says("the validation tokens"),
                 written_only("dtype", Type::kEnum)
                     .one_of({"uint16", "uint32"})
                     .otherwise("uint16")
                     .says("how a token is stored"),
                 weight_field(), source_name_field(), source_tokens_field(written_only("tokens", Type::kInt))}};
  return out;
}

Def overlong_field(Def field) {
  return field.one_of({"refuse", "drop", "truncate"})
      .silently()
      .otherwise("refuse")
      .says("what becomes of a conversation that is longer than a sample",
            "The start is refused, with their number; or they are left out; or their first tokens are taken.");
}

Def weigh_field(Def field) {
  return field.one_of({"token", "sample"})
      .silently()
      .otherwise("token")
      .says("what weighs alike in the loss",
            "token: every token that counts, so that long answers weigh more. sample: every conversation.");
}

const Block& instruct_block() {
  static const Block out{
      .name = "instruct",
      .constructors = {"instruct"},
      .doc =
          "Instruction data: PREFIX.bin, PREFIX.idx and PREFIX.loss, as `cairn data chat` writes them. Whole "
          "conversations are packed into samples; each sees only itself, and its answers count.",
      .fields = {
          written_only("prefix", Type::kString, "path")
              .needed()
              .says("path without .bin, .idx and .loss", "Relative to the working directory."),
          written_only("split", Type::kNumberList)
              .at_least(0)
              .otherwise(Json::array({1.0}))
              .says("parts for training, validation and test", "Up to three numbers, normalised; by conversations.")
              .like("{ 95, 5 }"),
          overlong_field(written_only("overlong", Type::kEnum)), weigh_field(written_only("weigh", Type::kEnum)),
          weight_field(), source_name_field()}};
  return out;
}

const Block& source_block() {
  static const Block out{
      .name = "source",
      .doc = "One stream of tokens.",
      .fields = {chosen("kind", &DataSource::kind, {"megatron", "token_files", "instruct"}),
                 bound("name", &DataSource::name), bound("path", &DataSource::path),
                 bound("valid_path", &DataSource::valid_path), bound("dtype", &DataSource::dtype),
                 bound("weight", &DataSource::weight).at_least(0), bound("split", &DataSource::split).at_least(0),
                 source_tokens_field(bound("tokens", &DataSource::tokens)),
                 overlong_field(chosen("overlong", &DataSource::overlong, {"refuse", "drop", "truncate"})),
                 weigh_field(chosen("weigh", &DataSource::weigh, {"token", "sample"}))}};
  return out;
}

Def data_seed_field(Def field) {
  return field.otherwise(0).says("of the order of samples", "0: the recipe's own seed.");
}

Def repeat_period_field(Def field) { return field.range(1, 1 << 16).says("tokens, at most, that are repeated"); }
Def repeat_count_field(Def field) { return field.range(2, kMany).says("times, from which on it is masked"); }

const Block& repeats_block() {
  static const Block out{.name = "repeats",
                         .constructors = {"repeats"},
                         .doc = "Text that repeats a few tokens again and again.",
                         .fields = {repeat_period_field(written_only("period", Type::kInt)).otherwise(13),
                                    repeat_count_field(written_only("count", Type::kInt)).otherwise(32)}};
  return out;
}

const Block& mask_repeats_block() {
  static const Block out{
      .name = "mask_repeats",
      .doc = "Which repeats count in no loss.",
      .fields = {repeat_period_field(bound("period", &MaskRepeats::period)).silently().at_least(0).otherwise(0),
                 repeat_count_field(bound("count", &MaskRepeats::count)).silently().at_least(0).otherwise(0)}};
  return out;
}

Def mask_repeats_field() {
  Def out = written_only("mask_repeats", Type::kBlock);
  out.block = &repeats_block();
  return out.written(Form::kPlain, {&repeats_block()})
      .silently()
      .derived("nothing is masked")
      .says("samples with such repeats count in no loss",
            "In T.instruct it masks single conversations. The order of samples stays as it is, and "
            "`masked_tokens` in metrics.jsonl says how many targets were left out.")
      .like("T.repeats { period = 13, count = 32 }");
}

const Block& blend_block() {
  static const Block out{
      .name = "blend",
      .constructors = {"blend"},
      .doc = "Several sources, drawn from by weight.",
      .fields = {written_only("sources", Type::kItems)
                     .needed()
                     .written(Form::kPlain, {&megatron_block(), &token_files_block(), &instruct_block()})
                     .says("the streams of tokens"),
                 written_only("weights", Type::kObject)
                     .at_least(0)
                     .otherwise(Json::object())
                     .says("weights by the names of sources, over those that they have themselves",
                           "For T.stage and :with: a source that is not named keeps its weight.")
                     .like("{ web = 30, code = 70 }"),
                 data_seed_field(written_only("seed", Type::kSeed)), mask_repeats_field()}};
  return out;
}

const Block& data_block() {
  static const Block out{
      .name = "data",
      .doc = "What is trained on.",
      .fields = {items("sources", &DataConfig::sources, source_block()).says("the streams of tokens"),
                 data_seed_field(bound("seed", &DataConfig::seed)),
                 block("mask_repeats", &DataConfig::mask_repeats, mask_repeats_block()).silently()}};
  return out;
}

const Block& objective_block() {
  static const Block out{
      .name = "objective",
      .doc = "How a sample's tokens become inputs and targets, where each stands and what it sees.",
      .fields = {
          chosen("kind", &ObjectiveConfig::kind, {"next_token", "prefix", "infill"})
              .otherwise("next_token")
              .silently()
              .says("what is learnt to be guessed",
                    "prefix: the first tokens of a sequence, as many as are drawn, see each other, and the loss counts "
                    "behind them. infill: GLM's blank infilling, short gaps [MASK] and one at the end [gMASK]. Both "
                    "need model.mask = \"prefix\"."),
          bound("document_end", &ObjectiveConfig::document_end)
              .range(-1, kMany)
              .otherwise(-1)
              .silently()
              .says("the token that ends a document, with kind = next_token; -1: documents are not separated",
                    "A sample holds parts of several documents.")
              .like("256"),
          bound("reset_attention", &ObjectiveConfig::reset_attention)
              .otherwise(true)
              .silently()
              .says("with document_end: no token sees an earlier document"),
          bound("reset_positions", &ObjectiveConfig::reset_positions)
              .otherwise(true)
              .silently()
              .says("with document_end: each document begins at position 0"),
          bound("document_loss", &ObjectiveConfig::document_loss)
              .otherwise(false)
              .silently()
              .says("with document_end: guessing how the next document begins counts"),
          bound("mask_token", &ObjectiveConfig::mask_token)
              .range(-1, kMany)
              .otherwise(-1)
              .silently()
              .says("infill: id of [MASK], in the place of a short gap"),
          bound("gmask_token", &ObjectiveConfig::gmask_token)
              .range(-1, kMany)
              .otherwise(-1)
              .silently()
              .says("infill: id of [gMASK], in the place of the sequence's end"),
          bound("start_token", &ObjectiveConfig::start_token)
              .range(-1, kMany)
              .otherwise(-1)
              .silently()
              .says("infill: id of the token that a guessed piece begins with (sop)"),
          bound("end_token", &ObjectiveConfig::end_token)
              .range(-1, kMany)
              .otherwise(-1)
              .silently()
              .says("infill: id of the token that ends a short gap (eop)"),
          bound("gmask_share", &ObjectiveConfig::gmask_share)
              .at_least(0)
              .below_or_at(1)
              .otherwise(0.7)
              .silently()
              .says("infill: share of the sequences with [gMASK]; the others have [MASK]"),
          bound("mask_windows", &ObjectiveConfig::mask_windows)
              .range(1, 1 << 16)
              .otherwise(1)
              .silently()
              .says("infill: windows that a sequence with [MASK] is cut into", "They do not see each other."),
      }};
  return out;
}

const Json kNoSpan = {{"unit", "steps"}, {"value", 0.0}};

const Block& ramp_block() {
  static const Block out{
      .name = "ramp",
      .constructors = {"ramp"},
      .doc = "A batch that grows: T.ramp { from = 192, by = 16, over = T.samples(9765625) }. It ends at batch.samples.",
      .fields = {
          bound("from", &BatchRamp::from)
              .range(0, kMany)
              .otherwise(0)
              .silently()
              .says("samples of the first steps", "0: no ramp."),
          bound("by", &BatchRamp::by)
              .range(0, kMany)
              .otherwise(0)
              .silently()
              .says("samples of an increment", "Must divide batch.samples - from."),
          bound("over", &BatchRamp::over)
              .at_least(0)
              .one_of({"steps", "samples", "tokens"})
              .otherwise(kNoSpan)
              .silently()
              .says("how long, from the beginning of the run", "The increments divide it evenly."),
      }};
  return out;
}

const Block& phase_block() {
  const auto of = [](Def field) { return field.otherwise(0); };
  static const Block out{
      .name = "phase",
      .constructors = {"phase"},
      .positional = true,
      .doc = "A change of the batch in the middle of the run: T.phase { T.samples(1e6), micro = 2 }.",
      .fields = {
          bound("at", &BatchPhase::at)
              .at_least(0)
              .one_of({"steps", "samples", "tokens"})
              .needed()
              .says("the amount after which it begins: T.steps(n), T.samples(n) or T.tokens(n)"),
          of(bound("samples", &BatchPhase::samples).range(0, kMany))
              .says("batch.samples from then on", "0: as before."),
          of(bound("micro", &BatchPhase::micro).range(0, kMany)).says("batch.micro from then on", "0: as before."),
          of(bound("tokens", &BatchPhase::tokens).range(0, 1 << 24)).says("batch.tokens from then on", "0: as before."),
          bound("rope_theta", &BatchPhase::rope_theta)
              .range(0, 1e12)
              .otherwise(0.0)
              .says("model.rope_theta from then on", "0: as before."),
      }};
  return out;
}

const Block& batch_block() {
  static const Block out{
      .name = "batch",
      .constructors = {"batch"},
      .doc = "The global batch is fixed; accumulation follows from the mesh: samples = micro * accumulate * dp.",
      .fields = {
          bound("samples", &BatchConfig::samples)
              .range(1, kMany)
              .needed()
              .in(Unit::kCount)
              .says("sequences a step, over all ranks", "Must be divisible by batch.micro * dp, unless uneven.")
              .like("32"),
          bound("micro", &BatchConfig::micro)
              .range(1, kMany)
              .otherwise(1)
              .says("sequences of one micro-batch on one data-parallel rank")
              .like("4"),
          bound("tokens", &BatchConfig::tokens)
              .range(0, 1 << 24)
              .otherwise(0)
              .silently()
              .in(Unit::kCount)
              .says("tokens of a sequence, when shorter than model.context",
                    "Samples are cut into sequences of so many tokens, which see nothing of each other; the "
                    "tokens of a step stay. Must divide model.context; 0: all of it. For training that begins "
                    "with short sequences: T.phase lengthens them."),
          block("ramp", &BatchConfig::ramp, ramp_block())
              .silently()
              .says("a batch that grows to batch.samples; default: none")
              .like("T.ramp { from = 8, by = 8, over = T.samples(10000) }"),
          items("phases", &BatchConfig::phases, phase_block())
              .otherwise(Json::array())
              .silently()
              .written(Form::kPlaces, {&phase_block()})
              .says("changes in the middle of the run",
                    "Each begins at the first step after the given amount; the last one that has begun counts, "
                    "field by field.")
              .like("{ T.phase { T.samples(100000), micro = 2 } }"),
          bound("uneven", &BatchConfig::uneven)
              .otherwise(false)
              .silently()
              .says("samples need not be divisible by micro * dp",
                    "In the last round of micro-batches some replicas then repeat the first sample, which counts "
                    "in no loss: as long as a whole round, and the same training as with any other dp. Not with "
                    "experts, whose balance would count it."),
          bound("skip", &BatchConfig::skip)
              .otherwise(Json::array())
              .silently()
              .says("positions of the sample order that no step takes, the first and the last of each range",
                    "`cairn data samples` prints them. The samples behind them stay the same. Positions that a run has "
                    "passed already change nothing.")
              .like("{ \"51200..51263\" }")}};
  return out;
}

Def over_field(bool needed) {
  Def out = written_only("over", Type::kSpan)
                .above(0)
                .says("how long",
                      "T.steps(n), T.samples(n), T.tokens(n), T.epochs(n) or T.fraction(x) of the recipe's stop.");
  if (needed) return out.needed();
  return out.derived("what the other stages leave of the run");
}

const Block& warmup_block() {
  static const Block out{.name = "warmup",
                         .constructors = {"warmup"},
                         .doc = "From 0 to optimizer.peak_lr, in a straight line.",
                         .fields = {over_field(true)}};
  return out;
}

Def to_field() {
  return written_only("to", Type::kNumber)
      .at_least(0)
      .needed()
      .says("the rate of the stage's last step", "With 0 the last step of a run changes no weight.");
}

const Block& cosine_block() {
  static const Block out{.name = "cosine",
                         .constructors = {"cosine"},
                         .doc = "Half a cosine from the rate so far down to `to`.",
                         .fields = {to_field(), over_field(false)}};
  return out;
}

const Block& linear_block() {
  static const Block out{.name = "linear",
                         .constructors = {"linear"},
                         .doc = "A straight line from the rate so far to `to`.",
                         .fields = {to_field(), over_field(false)}};
  return out;
}

const Block& hold_block() {
  static const Block out{
      .name = "hold", .constructors = {"hold"}, .doc = "The rate so far, unchanged.", .fields = {over_field(false)}};
  return out;
}

const Block& inverse_sqrt_block() {
  static const Block out{.name = "inverse_sqrt",
                         .constructors = {"inverse_sqrt"},
                         .doc =
                             "The rate so far, falling as 1 / sqrt(step); after a warm-up of w steps: peak_lr * "
                             "sqrt(w / step).",
                         .fields = {written_only("to", Type::kNumber).at_least(0).otherwise(0.0).says("the least rate"),
                                    over_field(false)}};
  return out;
}

const Block& exponential_block() {
  static const Block out{
      .name = "exponential",
      .constructors = {"exponential"},
      .doc = "From the rate so far to `to`, by the same factor each step.",
      .fields = {written_only("to", Type::kNumber).above(0).needed().says("the rate of the stage's last step"),
                 over_field(false)}};
  return out;
}

const Block& one_minus_sqrt_block() {
  static const Block out{.name = "one_minus_sqrt",
                         .constructors = {"one_minus_sqrt"},
                         .doc = "From the rate so far to `to` as 1 - sqrt(x): steep first. The cool-down of WSD.",
                         .fields = {to_field(), over_field(false)}};
  return out;
}

const Block& schedule_block() {
  static const Block out{.name = "schedule",
                         .constructors = {"schedule"},
                         .list = true,
                         .doc =
                             "Stages of the learning rate, one after the other. Warm-up, stable, decay (WSD): "
                             "T.schedule { T.warmup { over = T.steps(2000) }, T.hold {}, T.linear { to = 0, over = "
                             "T.fraction(0.1) } }."};
  return out;
}

const Block& stage_block() {
  static const Block out{
      .name = "stage",
      .doc = "One stage of the learning rate.",
      .fields = {chosen("kind", &LrStage::kind,
                        {"warmup", "cosine", "linear", "hold", "inverse_sqrt", "exponential", "one_minus_sqrt"}),
                 bound("over", &LrStage::over).at_least(0), bound("to", &LrStage::to).at_least(0)}};
  return out;
}

const Block& group_block() {
  static const Block out{.name = "group",
                         .constructors = {"group"},
                         .positional = true,
                         .doc = "Tensors that are trained differently: T.group { \"embed.*\", lr = 0.1 }.",
                         .fields = {
                             bound("tensors", &ParameterGroup::tensors)
                                 .needed()
                                 .says("a pattern of tensor names", "* stands for any characters and ? for one.")
                                 .like("\"embed.*\""),
                             bound("lr", &ParameterGroup::lr)
                                 .range(0, 1e6)
                                 .otherwise(1.0)
                                 .says("times the learning rate", "0 freezes the tensors."),
                             bound("weight_decay", &ParameterGroup::weight_decay)
                                 .range(-1, 10)
                                 .otherwise(-1.0)
                                 .says("their weight decay, vectors included", "Below 0: as without the group."),
                         }};
  return out;
}

const Block& optimizer_block() {
  static const Block out{
      .name = "adamw",
      .constructors = {"adamw", "lamb", "adafactor"},
      .doc =
          "AdamW with decoupled weight decay; T.lamb takes the same fields and scales each tensor's step by the ratio "
          "of the weights' norm to the step's (LAMB, for large batches). T.adafactor keeps second moments of the rows "
          "and columns of a matrix in place of its elements': 4 bytes of state a parameter, 8 with beta1, instead of "
          "12.",
      .fields = {
          chosen("kind", &OptimizerConfig::kind, {"adamw", "lamb", "adafactor"})
              .otherwise("adamw")
              .silently()
              .by_constructor()
              .says("which optimizer", "Set by the constructor: T.adamw, T.lamb or T.adafactor."),
          bound("peak_lr", &OptimizerConfig::peak_lr)
              .above(0)
              .needed()
              .says("the highest learning rate", "What T.warmup climbs to; the rate itself without a schedule.")
              .like("6e-4"),
          items("lr", &OptimizerConfig::lr, stage_block())
              .otherwise(Json::array())
              .written(Form::kStages,
                       {&schedule_block(), &warmup_block(), &cosine_block(), &linear_block(), &hold_block(),
                        &inverse_sqrt_block(), &exponential_block(), &one_minus_sqrt_block()})
              .says("the learning rate over the run", "Without it the rate is optimizer.peak_lr throughout.")
              .like("T.schedule { T.warmup { over = T.steps(100) }, T.cosine { to = T.ref \"optimizer.peak_lr\" * "
                    "0.1 } }"),
          chosen("lr_from", &OptimizerConfig::lr_from, {"start", "stage"})
              .otherwise("start")
              .silently()
              .says("where optimizer.lr counts from: the start of the run, or the start of the T.stage that sets it",
                    "stage: the schedule begins at the rate so far, and T.fraction in it is of what remains of the "
                    "run. Default in a T.stage that sets optimizer.lr: stage; T.unset there: the schedule changes and "
                    "counts on from where it began.")
              .like("\"stage\""),
          written_only("betas", Type::kNumberList)
              .range(0, 1)
              .written(Form::kBetas)
              .says("both decay rates at once: sets beta1 and beta2")
              .like("{ 0.9, 0.95 }"),
          bound("beta1", &OptimizerConfig::beta1)
              .at_least(0)
              .under(1)
              .derived("0.9; T.adafactor: 0")
              .says("decay of the first moment", "T.adafactor: of its steps; with 0 it keeps none."),
          bound("beta2", &OptimizerConfig::beta2)
              .at_least(0)
              .under(1)
              .otherwise(0.95)
              .says("decay of the second moment", "T.adafactor has decay_power instead."),
          bound("eps", &OptimizerConfig::eps)
              .above(0)
              .below_or_at(1)
              .otherwise(1e-8)
              .says("added to the root of the second moment", "Not read by T.adafactor."),
          bound("decay_power", &OptimizerConfig::decay_power)
              .above(0)
              .below_or_at(1)
              .otherwise(0.8)
              .silently()
              .says("T.adafactor: step t keeps 1 - t^-decay_power of the second moments"),
          bound("update_clip", &OptimizerConfig::update_clip)
              .range(0, kMany)
              .otherwise(1.0)
              .silently()
              .says("T.adafactor: largest root mean square of a tensor's step, before the rate; 0: any"),
          bound("scale_parameter", &OptimizerConfig::scale_parameter)
              .otherwise(true)
              .silently()
              .says("T.adafactor: the learning rate is relative to the root mean square of a tensor's weights",
                    "The paper's rate is peak_lr = 1e-2 with T.inverse_sqrt after 10,000 steps of warm-up or hold.")
              .like("false"),
          bound("least_scale", &OptimizerConfig::least_scale)
              .above(0)
              .below_or_at(1)
              .otherwise(1e-3)
              .silently()
              .says("T.adafactor: the root mean square counts as at least this", "So that zeros can move."),
          bound("weight_decay", &OptimizerConfig::weight_decay)
              .range(0, 10)
              .otherwise(0.0)
              .says("on matrices alone", "Biases and norm weights are never decayed."),
          items("groups", &OptimizerConfig::groups, group_block())
              .otherwise(Json::array())
              .silently()
              .written(Form::kPlaces, {&group_block()})
              .says("tensors with another learning rate or weight decay",
                    "Of several groups that name a tensor the last one counts.")
              .like("{ T.group { \"embed.*\", lr = 0.1, weight_decay = 0 } }"),
          bound("z_loss", &OptimizerConfig::z_loss)
              .range(0, 1)
              .otherwise(0.0)
              .silently()
              .says("weight of z-loss, the squared logarithm of the softmax's denominator",
                    "Its gradient is added; the reported loss is the cross-entropy alone. PaLM: 1e-4."),
          bound("embedding_gradient", &OptimizerConfig::embedding_gradient)
              .range(0, 1)
              .otherwise(1.0)
              .silently()
              .says("part of the gradient that reaches the token embedding through the input",
                    "Embedding-gradient shrink; GLM-130B: 0.1."),
          bound("ema", &OptimizerConfig::ema)
              .at_least(0)
              .under(1)
              .otherwise(0.0)
              .silently()
              .says("decay of an average of the weights that is kept beside them; 0: none",
                    "After each update average = ema * average + (1 - ema) * weights, in fp32; it begins at the "
                    "weights that the run begins with. In checkpoints as kind ema; export, eval and generate take it "
                    "with --ema. 4 bytes a parameter, split over dp.")
              .like("0.999"),
          bound("qk_clip", &OptimizerConfig::qk_clip)
              .range(0, kMany)
              .otherwise(0.0)
              .silently()
              .says("largest attention score that a head may have; 0: any (QK clip, as in MuonClip)",
                    "When the largest score S of a head in a step, before the softmax, is above this, its scores are "
                    "scaled by qk_clip / S: after the update the rows of q and k of the head are multiplied by the "
                    "root of that each. Query heads that share a key head: k takes the root of the smallest factor, "
                    "each q what is left. Not with model.qk_norm, which undoes it, nor model.top_query.")
              .like("100"),
          bound("offload", &OptimizerConfig::offload)
              .otherwise("")
              .silently()
              .says("folder on a disk that holds the optimizer state and its snapshots instead of shared memory",
                    "Best on a local NVMe disk. The update streams through it, so memory holds some 100 MB of it a "
                    "rank, and a step takes as long more as reading and writing 12 bytes a parameter each. The same "
                    "bits; a killed rank resumes from it as from shared memory. The folder must be there, and is "
                    "relative to the working directory.")
              .like("\"/mnt/nvme/cairn\""),
          bound("clip", &OptimizerConfig::clip)
              .range(0, kMany)
              .otherwise(0.0)
              .says("largest global gradient norm", "Over the whole mesh; 0 turns clipping off."),
          bound("zero", &OptimizerConfig::zero)
              .range(0, 3)
              .otherwise(0)
              .says("what is split over dp: 1 optimizer states, 2 and gradients, 3 and weights",
                    "ZeRO-2 keeps sums of gradients as shards and reduces after each micro-batch: less memory, more "
                    "traffic. ZeRO-3 also gathers the weights of a layer before it is used, one layer ahead."),
          bound("bucket", &OptimizerConfig::bucket)
              .range(0, 1e12)
              .otherwise(0)
              .silently()
              .says("elements reduced or gathered at once",
                    "0: 8 Mi, or 1 Mi for each data-parallel rank when that is more."),
          bound("overlap", &OptimizerConfig::overlap)
              .otherwise(true)
              .silently()
              .says("gradients are reduced beside backward, weights gathered beside forward",
                    "By a thread of each rank. The same bits either way.")
              .like("false"),
          bound("keep_after_forward", &OptimizerConfig::keep_after_forward)
              .otherwise(false)
              .silently()
              .says("weights gathered for forward stay until the end of the step",
                    "For zero = 3: each layer is gathered once a step, and all are held.")
              .like("true"),
      }};
  return out;
}

const Block& loss_scale_block() {
  static const Block out{
      .name = "loss_scale",
      .constructors = {"loss_scale"},
      .doc = "The dynamic loss scale of fp16. A step whose gradients overflow is skipped, and its samples with it.",
      .fields = {
          bound("initial", &LossScaleConfig::initial)
              .range(1, 0x1p40)
              .otherwise(65536.0)
              .silently()
              .says("the scale of the first step", "Powers of two keep gradients exact."),
          bound("window", &LossScaleConfig::window)
              .range(0, kMany)
              .otherwise(1000)
              .silently()
              .says("steps in a row without overflow before it doubles", "0: it never grows."),
          bound("hysteresis", &LossScaleConfig::hysteresis)
              .range(1, kMany)
              .otherwise(2)
              .silently()
              .says("overflows before it halves", "The count restarts when the scale doubles."),
          bound("min", &LossScaleConfig::min)
              .above(0)
              .below_or_at(0x1p40)
              .otherwise(1.0)
              .silently()
              .says("the smallest scale", "An overflow there stops the run with exit code 76."),
      }};
  return out;
}

const Block& mesh_block() {
  static const Block out{
      .name = "mesh",
      .constructors = {"mesh"},
      .doc = "How the ranks are arranged: world = tp * cp * pp * dp. Data-parallel ranks may divide experts: mesh.ep.",
      .fields = {
          bound("tp", &MeshConfig::tp).range(1, 1 << 16).otherwise(1).says("tensor-parallel ranks"),
          bound("pp", &MeshConfig::pp).range(1, 1 << 16).otherwise(1).says("pipeline stages"),
          bound("dp", &MeshConfig::dp)
              .range(0, 1 << 20)
              .otherwise(0)
              .says("data-parallel replicas", "0: what remains of the world, world / (tp * cp * pp)."),
          chosen("order", &MeshConfig::order, {"tp", "dp", "pp", "cp"})
              .otherwise(Json::array({"tp", "dp", "pp"}))
              .says("which axis neighbouring ranks share, fastest first", "cp need not be named: it comes after tp."),
          bound("ep", &MeshConfig::ep)
              .range(1, 1 << 16)
              .otherwise(1)
              .silently()
              .says("data-parallel ranks that divide the experts among them",
                    "Must divide dp and model.moe.experts. Each holds 1 / ep of every layer's experts, and the rows of "
                    "tokens go to them and back. Neighbours in dp where the ranks are placed."),
          bound("cp", &MeshConfig::cp)
              .range(1, 1 << 16)
              .otherwise(1)
              .silently()
              .says("ranks that divide the tokens of every sequence among them",
                    "Context parallelism: of 2 cp chunks, which a sequence's tokens must divide into, rank r has "
                    "chunks r "
                    "and 2 cp - 1 - r, so that a causal mask gives all equally many keys. Keys and values are gathered "
                    "for attention. ZeRO splits over dp x cp.")
              .like("2"),
          bound("shard", &MeshConfig::shard)
              .range(0, 1 << 20)
              .otherwise(0)
              .silently()
              .says("data-parallel ranks that optimizer.zero splits over",
                    "Neighbours in dp x cp; must divide it. The groups of so many ranks hold the same and add their "
                    "shards up. 0: all of dp x cp.")
              .like("8"),
          bound("sequence_parallel", &MeshConfig::sequence_parallel)
              .otherwise(false)
              .says("norms and residuals are split over tp along the sequence",
                    "Needs tp > 1, and batch.micro * model.context / cp divisible by tp."),
          bound("virtual_stages", &MeshConfig::virtual_stages)
              .range(1, 1 << 10)
              .otherwise(1)
              .newer()
              .says("pipeline stages of a rank",
                    "More than one needs schedule = \"interleaved\"; \"zb-v\" has exactly 2.")
              .like("2"),
          bound("stages", &MeshConfig::stages)
              .at_least(1)
              .otherwise(Json::array())
              .says("layers of each pipeline stage",
                    "Must have pp * virtual_stages entries that sum to model.layers; empty: balanced.")
              .like("{ 3, 4, 4, 3 }"),
          bound("embedding_weight", &MeshConfig::embedding_weight)
              .range(0, 1e6)
              .otherwise(0.0)
              .silently()
              .says("layers that the embedding counts as when stages are balanced",
                    "1 gives the first stage one layer less where that is even: [emb 5] [6] ... for 70 layers on 12 "
                    "stages with head_weight 1. Not with mesh.stages.")
              .like("1"),
          bound("head_weight", &MeshConfig::head_weight)
              .range(0, 1e6)
              .otherwise(0.0)
              .silently()
              .says("layers that the final norm and head count as when stages are balanced",
                    "By arithmetic about vocab / (12 * width) and more. Not with mesh.stages.")
              .like("1"),
          bound("micro_batch_group", &MeshConfig::micro_batch_group)
              .range(0, kMany)
              .otherwise(0)
              .silently()
              .says("micro-batches that pass a stage before the rank's next stage takes its turn",
                    "Interleaved schedule only. Each group, the last one too, has at least pp. Larger groups overlap "
                    "more messages and hold more activations. 0: mesh.pp.")
              .like("4"),
      }};
  return out;
}

const Block& recompute_block() {
  static const Block out{
      .name = "recompute",
      .doc =
          "Activations that the backward pass computes again instead of keeping them: memory for time, the same bits.",
      .fields = {
          chosen("mode", &RecomputeConfig::mode, {"none", "selective", "full"})
              .otherwise("none")
              .silently()
              .says("what is computed again",
                    "selective: the attention core, from the queries, keys and values kept. full: whole layers, of "
                    "which only the input is kept."),
          bound("layers", &RecomputeConfig::layers)
              .range(0, 100000)
              .otherwise(0)
              .silently()
              .says("how many layers of each stage, from its first", "0: all of them."),
          bound("distribute", &RecomputeConfig::distribute)
              .otherwise(false)
              .silently()
              .says("the inputs kept are split over tp",
                    "With mode = \"full\"; costs an all-gather a layer. mesh.sequence_parallel has them split "
                    "already.")}};
  return out;
}

const Block& every_block() {
  static const Block out{
      .name = "every",
      .constructors = {"every"},
      .doc = "A rhythm: one of steps, seconds, minutes or hours.",
      .fields = {
          written_only("steps", Type::kInt).range(1, kMany).derived("not by steps").says("optimizer steps"),
          written_only("seconds", Type::kNumber).above(0).derived("not by time").in(Unit::kSeconds).says("wall time"),
          written_only("minutes", Type::kNumber).above(0).derived("not by time").says("wall time"),
          written_only("hours", Type::kNumber).above(0).derived("not by time").says("wall time")}};
  return out;
}

const Block& every_stored_block() {
  static const Block out{
      .name = "every",
      .doc = "A rhythm.",
      .fields = {bound("steps", &Every::steps).range(0, kMany), bound("seconds", &Every::seconds).range(0, kMany)}};
  return out;
}

const Block& last_block() {
  static const Block out{.name = "last",
                         .constructors = {"last"},
                         .positional = true,
                         .doc = "The newest n: T.last(3).",
                         .fields = {written_only("count", Type::kInt).range(1, kMany).needed().says("how many")}};
  return out;
}

const Block& best_block() {
  static const Block out{
      .name = "best",
      .constructors = {"best"},
      .doc = "The best by a metric: T.best { metric = \"valid_loss\", count = 2 }.",
      .fields = {written_only("metric", Type::kString)
                     .needed()
                     .says("of the step that was saved",
                           "loss, valid_loss, valid_source_loss/SOURCE, or eval/TASK/NUMBER as eval/facts/acc. An "
                           "evaluation has to run at that very step: let eval.at divide the rhythm of "
                           "checkpoint.save. Losses, perplexities and bits are better when lower, all others when "
                           "higher.")
                     .like("\"valid_loss\""),
                 written_only("count", Type::kInt).range(1, kMany).otherwise(1).says("how many")}};
  return out;
}

const Block& at_block() {
  static const Block out{.name = "at",
                         .constructors = {"at"},
                         .doc = "The first checkpoint at or behind each of these steps: T.at { steps = { 85000 } }.",
                         .fields = {written_only("steps", Type::kIntList).range(1, kMany).needed().says("the steps")}};
  return out;
}

const Block& within_block() {
  static const Block out{
      .name = "within",
      .constructors = {"within"},
      .doc = "All that are at most this much older than the newest: one of seconds, minutes or hours.",
      .fields = {
          written_only("seconds", Type::kNumber).above(0).derived("one of the three").in(Unit::kSeconds).says("age"),
          written_only("minutes", Type::kNumber).above(0).derived("one of the three").says("age"),
          written_only("hours", Type::kNumber).above(0).derived("one of the three").says("age")}};
  return out;
}

const Block& fractions_block() {
  static const Block out{
      .name = "fractions",
      .constructors = {"fractions"},
      .positional = true,
      .doc = "The first at or behind each nth part of the run: T.fractions(10) keeps ten over the whole run.",
      .fields = {written_only("count", Type::kInt).range(1, kMany).needed().says("parts")}};
  return out;
}

const Block& keep_block() {
  static const Block out{
      .name = "keep",
      .doc = "One rule of retention.",
      .fields = {chosen("kind", &Keep::kind, {"last", "every", "at", "best", "within", "fractions"}),
                 bound("metric", &Keep::metric), bound("count", &Keep::count).range(0, kMany),
                 bound("steps", &Keep::steps).range(0, kMany), bound("seconds", &Keep::seconds).range(0, kMany),
                 bound("at", &Keep::at).range(1, kMany)}};
  return out;
}

const Block& place_block() {
  static const Block out{
      .name = "place",
      .constructors = {"place"},
      .positional = true,
      .doc = "A second place for checkpoints: T.place { \"s3://bucket/prefix\", keep_last = 5 }.",
      .fields = {
          bound("path", &CopyTo::path)
              .needed()
              .says("a directory or s3://bucket/prefix",
                    "The name of the run's folder is added, so runs may share it. A directory is relative to the "
                    "working directory. S3 credentials come from the environment or ~/.aws/credentials, never from a "
                    "recipe.")
              .like("\"/mnt/shared/checkpoints\""),
          bound("every", &CopyTo::every_steps, "every_steps")
              .range(0, kMany)
              .otherwise(0)
              .written(Form::kEveryStep, {&every_block()})
              .says("how often",
                    "One checkpoint of each such window of steps goes, and the last of the run. Default: all, or when "
                    "the place is slower than the saves, the newest each time.")
              .like("T.every { steps = 5000 }"),
          bound("keep_last", &CopyTo::keep_last)
              .range(0, kMany)
              .otherwise(0)
              .says("newest ones that stay there", "0: all."),
          bound("keep_every", &CopyTo::keep_every)
              .range(0, kMany)
              .otherwise(0)
              .says("besides, the oldest of each window of so many steps stays for ever", "0: none does."),
          bound("max_mb_per_s", &CopyTo::max_mb_per_s)
              .range(0, 1e6)
              .otherwise(0.0)
              .says("not faster than so many 10^6 bytes a second, in either direction", "0: as fast as it goes."),
          bound("read_back", &CopyTo::read_back)
              .otherwise(true)
              .says("read every byte back and compare, before a copy counts",
                    "Without it the place's own word is taken: checksums of what it received, or an fsync."),
          bound("endpoint", &CopyTo::endpoint)
              .otherwise("")
              .says("of an S3 store that is not Amazon's", "Default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL.")
              .like("\"https://minio.example.org:9000\""),
          bound("region", &CopyTo::region).otherwise("").says("of the S3 bucket", "Default: AWS_REGION, us-east-1."),
          bound("ca_file", &CopyTo::ca_file)
              .otherwise("")
              .silently()
              .says("certificates (PEM) of the authorities that an https endpoint's own is signed by",
                    "For a store with a certificate of its own making. Relative to the working directory. Default: "
                    "AWS_CA_BUNDLE, or those that the system trusts. A certificate is always verified.")
              .like("\"/etc/ssl/minio-ca.pem\""),
          bound("timeout", &CopyTo::timeout_s, "timeout_s")
              .range(1, 86400)
              .otherwise(60.0)
              .in(Unit::kSeconds)
              .says("without a byte moving, before a try is given up", "Failed tries are repeated with growing waits.")
              .like("\"2min\""),
          bound("finish", &CopyTo::finish_s, "finish_s")
              .range(0, 86400 * 7)
              .otherwise(300.0)
              .in(Unit::kSeconds)
              .says("how long the end of the run waits for copies",
                    "What is not there then is copied by the next start of the run. A signal ends the wait.")
              .like("\"10min\""),
      }};
  return out;
}

const Block& checkpoint_block() {
  static const Block out{
      .name = "checkpoint",
      .constructors = {"checkpoint"},
      .doc = "When the state is kept. The end of the run and a signal always save.",
      .fields = {
          items("save", &CheckpointConfig::save, every_stored_block())
              .otherwise(Json::array())
              .written(Form::kEveryList, {&every_block()})
              .says("when to write to disk", "Any rhythm that is due saves. Empty: at the end and on a signal alone.")
              .like("{ T.every { steps = 100 }, T.every { minutes = 10 } }"),
          bound("snapshot", &CheckpointConfig::snapshot_steps, "snapshot_steps")
              .range(0, kMany)
              .otherwise(1)
              .written(Form::kEveryStep, {&every_block()})
              .says("which steps a killed rank can restart from",
                    "They stay in shared memory where training left them; that costs nothing, so the default is every "
                    "step. On CUDA they are copied there, as often as copies end.")
              .like("T.every { steps = 1 }"),
          bound("replicate", &CheckpointConfig::replicate_steps, "replicate_steps")
              .range(0, kMany)
              .otherwise(0)
              .silently()
              .written(Form::kEveryStep, {&every_block()})
              .says("which steps another host keeps in its memory",
                    "For runs over several hosts: each copies its part of the state to the host half the way round, "
                    "beside training. A spare that takes a lost host's place gets it from there, and the run goes back "
                    "by no more than that many steps and the one under way. A step that is due while the copy before "
                    "is under way is left out for the next. Costs the bytes of the state over the network each time, "
                    "two more banks and two copies of another host's part in memory: `cairn plan` counts them. Where "
                    "other hosts keep the same state (ZeRO 0, groups of shards that repeat) nothing is sent, and every "
                    "snapshot has its copy. On one host it does nothing. Default: never.")
              .like("T.every { steps = 1 }"),
          chosen("snapshot_by", &CheckpointConfig::snapshot_by, {"auto", "banks", "copy"})
              .otherwise("auto")
              .silently()
              .says(
                  "how a step gets into shared memory",
                  "banks: the optimizer state lies there, and an update goes from one bank into another; nothing is "
                  "copied. copy: the state is each rank's own, updated in place, and after the step it is copied "
                  "beside the next forward and backward; the next update waits for what it overwrites, tensor by "
                  "tensor. The same bits. A killed rank restarts from the newest step whose copy is complete, at most "
                  "one before the last. On CUDA a step that is due while the copy before is under way is left out, so "
                  "it may be more. Costs the memory of the state once more, and time: it is for devices whose "
                  "memory no other process can read, not for CPUs. Not with optimizer.offload. auto: banks on a CPU, "
                  "copy on CUDA, where banks is refused."),
          items("keep", &CheckpointConfig::keep, keep_block())
              .otherwise(Json::array())
              .written(Form::kKeep,
                       {&last_block(), &every_block(), &best_block(), &at_block(), &within_block(), &fractions_block()})
              .says("which complete checkpoints stay",
                    "One stays when any of the rules keeps it. The newest, the newest good one and the next that may "
                    "prove good always do. T.every keeps the first at or behind each multiple of its steps, or the "
                    "first of each such period of time. Default: all.")
              .like("{ T.last(3), T.every { steps = 10000 }, T.best { metric = \"loss\", count = 2 } }"),
          chosen("on_failure", &CheckpointConfig::on_failure, {"continue", "stop"})
              .otherwise("continue")
              .newer()
              .says(
                  "when a save fails",
                  "continue: it is reported once, and the next save tries again. stop: the run saves and leaves, with "
                  "exit code 74."),
          chosen("space", &CheckpointConfig::space, {"refuse", "warn"})
              .otherwise("refuse")
              .newer()
              .says("when the disk cannot hold what `keep` leaves lying at once",
                    "Looked at before the run starts; each save looks again before it writes."),
          items("copy_to", &CheckpointConfig::copy_to, place_block())
              .otherwise(Json::array())
              .newer()
              .written(Form::kPlaces, {&place_block()})
              .says("where else complete checkpoints go",
                    "A process beside the training copies them, and a run whose folder has no checkpoint begins with "
                    "the newest one there.")
              .like("{ T.place { \"s3://bucket/prefix\", keep_last = 5 } }"),
          chosen("compress", &CheckpointConfig::compress, {"off", "zstd"})
              .otherwise("off")
              .newer()
              .says("smaller checkpoints for more CPU time",
                    "zstd: byte planes split, then zstd, as HDF5's filters shuffle and 32015; some 15 % smaller. Pays "
                    "where storage is slower than some 1 GB/s for each core that is free, or dear. "
                    "`cairn ckpt reshard --compress zstd` does the same to a checkpoint that is there."),
          bound("incremental", &CheckpointConfig::incremental)
              .otherwise(false)
              .newer()
              .says("write only what changed since the save before",
                    "Tensors that did not change become references to the earlier step, which stays as long as another "
                    "one needs it. Of use when parts of the model are frozen."),
          bound("in_flight", &CheckpointConfig::in_flight)
              .range(0, 6)
              .otherwise(1)
              .silently()
              .says("saves that may be on their way to the disk at once",
                    "Each has a bank of the whole state in shared memory until it is done (two more are for training) "
                    "and up to 64 MiB of the agent. A save that is due while so many are under way waits for the next "
                    "step at which one has ended. Whichever ends last, the newest complete checkpoint is the one to go "
                    "on from. More than one pays where one writer does not fill the storage, or where the time between "
                    "saves is at times shorter than a save. 0, which needs snapshot_by = \"copy\": one slot in all. "
                    "No snapshot is taken while a save is under way, and a rank that is killed while a snapshot is "
                    "copied resumes from the newest checkpoint."),
          bound("direct_io", &CheckpointConfig::direct_io)
              .otherwise(true)
              .says("O_DIRECT through io_uring", "Where the system refuses it, plain writes of the same bytes."),
      }};
  return out;
}

const Block& init_block() {
  const auto patterns = [](const char* name, std::vector<std::string> InitConfig::*member) {
    return bound(name, member).otherwise(Json::array());
  };
  static const Block out{
      .name = "init_from",
      .constructors = {"init_from"},
      .doc =
          "What a run begins with when it has no checkpoint of its own. Without options everything is taken, the "
          "step, the moments and the place in the data too, and the tensors must be the model's, each one.",
      .fields = {
          bound("path", &InitConfig::path)
              .otherwise("")
              .says("run folder (its newest complete checkpoint), checkpoint, imported weights or Hugging Face folder",
                    "Relative to the working directory. `--init-from` says it on the command line.")
              .like("\"runs/base\""),
          bound("weights_only", &InitConfig::weights_only)
              .otherwise(false)
              .says("take weights alone: a new run from step 0, with moments of zero",
                    "Otherwise the run continues at the checkpoint's step; tensors that are initialised have moments "
                    "of zero."),
          patterns("only", &InitConfig::only)
              .says("patterns of the model's tensors to load; the others are initialised",
                    "In a pattern * stands for any characters and ? for one. Empty: all.")
              .like("{ \"layers.*\", \"embed.*\" }"),
          patterns("except", &InitConfig::except)
              .says("patterns of the model's tensors to initialise, even if the checkpoint has them")
              .like("{ \"head.*\" }"),
          patterns("allow_missing", &InitConfig::allow_missing)
              .says("patterns of the model's tensors to initialise if the checkpoint lacks them"),
          patterns("allow_extra", &InitConfig::allow_extra)
              .says("patterns of the checkpoint's tensors that the model may lack"),
      }};
  return out;
}

/// Another way to write init_block(): the resolver turns it into that (Resolver::apply_field).
const Block& hf_block() {
  static const Block out{
      .name = "hf",
      .constructors = {"hf"},
      .positional = true,
      .doc =
          "Begins with the weights of a Hugging Face folder: T.hf \"llama-1b\", or T.hf { \"llama-1b\", except = {...} "
          "}. The model must be the one of its config.json; the run starts at step 0 with moments of "
          "zero. The same as T.init_from with weights_only = true.",
      .fields = {written_only("path", Type::kString).needed().says("folder with config.json and the weights"),
                 written_only("only", Type::kStringList).otherwise(Json::array()).says("as in T.init_from"),
                 written_only("except", Type::kStringList).otherwise(Json::array()).says("as in T.init_from"),
                 written_only("allow_missing", Type::kStringList).otherwise(Json::array()).says("as in T.init_from"),
                 written_only("allow_extra", Type::kStringList).otherwise(Json::array()).says("as in T.init_from")}};
  return out;
}

const Block& task_block() {
  static const Block out{
      .name = "task",
      .constructors = {"task"},
      .positional = true,
      .doc = "A file of items that the run answers while it trains: T.task { \"facts.jsonl\", shots = 2 }.",
      .fields = {
          bound("file", &EvalTask::file)
              .needed()
              .says("JSON lines or a .yaml task",
                    "Choices, probes, contrasts, next tokens and texts; what has to be generated is for cairn eval. "
                    "Relative to the working directory.")
              .like("\"facts.jsonl\""),
          bound("shots", &EvalTask::shots)
              .range(-1, 1000)
              .otherwise(-1)
              .says("other items with their answers before each item", "-1: the file's own number."),
          bound("limit", &EvalTask::limit).range(0, kMany).otherwise(0).says("items, which `seed` draws", "0: all."),
          bound("seed", &EvalTask::seed).range(0, kMany).otherwise(0).says("of what is drawn"),
          bound("transforms", &EvalTask::transforms)
              .otherwise(Json::array())
              .says("make other items of each, in order: shuffle, rename, others_wrong, none_right, statements, single")
              .like("{ \"shuffle\" }")}};
  return out;
}

const Block& eval_block() {
  static const Block out{.name = "eval",
                         .constructors = {"eval"},
                         .doc = "Measurements during the run: loss on validation data, tasks.",
                         .fields = {bound("at", &EvalConfig::every_steps, "every_steps")
                                        .range(0, kMany)
                                        .otherwise(0)
                                        .written(Form::kEveryStep, {&every_block()})
                                        .says("when", "Default: never.")
                                        .like("T.every { steps = 50 }"),
                                    bound("steps", &EvalConfig::steps)
                                        .range(1, kMany)
                                        .otherwise(10)
                                        .says("validation batches of batch.samples each"),
                                    items("tasks", &EvalConfig::tasks, task_block())
                                        .otherwise(Json::array())
                                        .silently()
                                        .written(Form::kPlaces, {&task_block()})
                                        .says("files of items that the model answers",
                                              "Their numbers are in the metrics of the step. They change nothing in "
                                              "what is trained, but for watch.early_stop.")
                                        .like("{ T.task { \"facts.jsonl\" } }"),
                                    bound("tasks_at", &EvalConfig::tasks_steps, "tasks_steps")
                                        .range(0, kMany)
                                        .otherwise(0)
                                        .silently()
                                        .written(Form::kEveryStep, {&every_block()})
                                        .says("when the tasks are evaluated", "Default: as `at`.")
                                        .like("T.every { steps = 1000 }"),
                                    bound("budget", &EvalConfig::budget)
                                        .range(0, 1)
                                        .otherwise(0.0)
                                        .silently()
                                        .says("largest part of the run's time that the tasks may take",
                                              "An evaluation that would exceed it is left out, and the step's metrics "
                                              "say eval_left_out. 0: any part.")
                                        .like("0.02")}};
  return out;
}

const Block& hook_block() {
  Def events =
      bound("events", &Hook::events)
          .needed()
          .otherwise(Json::array())
          .one_of({"started", "saved", "copied", "evaluated", "outlier", "divergence", "rolled_back", "recovered",
                   "failed", "sdc", "ended", "best"})
          .says("the events, one or several",
                "started: ranks begin, at a start, at a stage or after a roll back. best: a checkpoint became "
                "the one that the first T.best of checkpoint.keep keeps. failed: ranks ended, whether they start "
                "again or not. sdc: silent data corruption was found.")
          .like("\"saved\"");
  events.type = Type::kEnumList;
  static const Block out{
      .name = "on",
      .constructors = {"on"},
      .positional = true,
      .doc = "A command and its events: T.on { \"saved\", run = { \"tools/upload\", \"{step}\", \"{dir}\" } }.",
      .fields = {
          std::move(events),
          bound("run", &Hook::run)
              .needed()
              .says("program and arguments; no shell reads them",
                    "{step}, {dir} and {run} in an argument become the event's step, its checkpoint folder and the run "
                    "folder. A program without a slash is looked for in PATH, another path is relative to the working "
                    "directory.")
              .like("{ \"tools/upload\", \"{step}\", \"{dir}\" }"),
          bound("timeout", &Hook::timeout_s, "timeout_s")
              .above(0)
              .below_or_at(86400 * 7)
              .otherwise(600.0)
              .in(Unit::kSeconds)
              .says("how long the command may take",
                    "Then its process group gets SIGTERM, and SIGKILL as much later, at most 5 s. The end of the run "
                    "waits no longer than this either.")
              .like("\"10min\""),
          bound("at_most", &Hook::at_most)
              .range(0, kMany)
              .otherwise(0)
              .says("how many times it runs within `within`", "0: any number. The newest event then waits."),
          bound("within", &Hook::within_s, "within_s")
              .range(0, 86400 * 365)
              .otherwise(0.0)
              .in(Unit::kSeconds)
              .says("the span of time that at_most counts in")
              .like("\"1h\""),
      }};
  return out;
}

Def tracker_finish() {
  return bound("finish", &Tracker::finish_s, "finish_s")
      .range(0, 86400 * 7)
      .otherwise(60.0)
      .in(Unit::kSeconds)
      .says("how long the end of the run waits for what is not sent yet",
            "The next start of the run, or `cairn track RUN`, sends the rest. A signal ends the wait.")
      .like("\"5min\"");
}

const Block& tracker_block() {
  static const Block out{
      .name = "tracker",
      .doc = "A tracker as it is stored.",
      .fields = {chosen("kind", &Tracker::kind, {"wandb", "mlflow", "prometheus", "otlp"}),
                 bound("to", &Tracker::to).otherwise(""), bound("project", &Tracker::project).otherwise(""),
                 bound("entity", &Tracker::entity).otherwise(""),
                 bound("tags", &Tracker::tags).otherwise(Json::array()), tracker_finish()}};
  return out;
}

const Block& wandb_block() {
  static const Block out{
      .name = "wandb",
      .constructors = {"wandb"},
      .positional = true,
      .doc = "Weights & Biases, by the files of an offline run: T.wandb { \"project\" }.",
      .fields = {bound("project", &Tracker::project)
                     .needed()
                     .says("the project there", "`wandb sync FOLDER` sends the run; Cairn itself sends nothing to W&B.")
                     .like("\"llm\""),
                 bound("entity", &Tracker::entity).otherwise("").says("the user or team that has the project"),
                 bound("tags", &Tracker::tags).otherwise(Json::array()).says("tags of the run").like("{ \"base\" }"),
                 bound("dir", &Tracker::to, "to").otherwise("").says("where the files go", "Default: RUN/wandb."),
                 tracker_finish()}};
  return out;
}

const Block& mlflow_block() {
  static const Block out{
      .name = "mlflow",
      .constructors = {"mlflow"},
      .positional = true,
      .doc = "An MLflow server, by its REST API: T.mlflow { \"http://host:5000\" }.",
      .fields = {
          bound("url", &Tracker::to, "to")
              .needed()
              .says("the server, http:// or https://",
                    "The environment has secrets: MLFLOW_TRACKING_TOKEN, and MLFLOW_TRACKING_SERVER_CERT_PATH for "
                    "a certificate of one's own making.")
              .like("\"https://mlflow.example.org\""),
          bound("project", &Tracker::project).otherwise("").says("the experiment", "Default: the run folder's name."),
          tracker_finish()}};
  return out;
}

const Block& prometheus_block() {
  static const Block out{
      .name = "prometheus",
      .constructors = {"prometheus"},
      .positional = true,
      .doc = "A file for the textfile collector of Prometheus' node exporter: T.prometheus \"/var/lib/.../run.prom\".",
      .fields = {bound("file", &Tracker::to, "to")
                     .needed()
                     .says("a file whose name ends in .prom, which is replaced at once each time")
                     .like("\"/var/lib/node_exporter/cairn.prom\""),
                 tracker_finish()}};
  return out;
}

const Block& otlp_block() {
  static const Block out{
      .name = "otlp",
      .constructors = {"otlp"},
      .positional = true,
      .doc = "An OpenTelemetry collector, by OTLP/HTTP with JSON: T.otlp \"http://localhost:4318\".",
      .fields = {
          bound("url", &Tracker::to, "to")
              .needed()
              .says("the collector, http:// or https://; /v1/metrics is added",
                    "The environment has secrets: OTEL_EXPORTER_OTLP_HEADERS, and OTEL_EXPORTER_OTLP_CERTIFICATE "
                    "for a certificate of one's own making.")
              .like("\"http://localhost:4318\""),
          tracker_finish()}};
  return out;
}

const Block& log_block() {
  static const Block out{
      .name = "log",
      .constructors = {"log"},
      .doc = "What is written down while training.",
      .fields = {
          bound("at", &LogConfig::every_steps, "every_steps")
              .range(0, kMany)
              .otherwise(1)
              .written(Form::kLogSteps, {&every_block()})
              .says("at which steps a log gets a line",
                    "Without it a log gets a line a minute, with a few more in the first one. `T.every { steps = 1 }` "
                    "gives each step one. A terminal has one live line.")
              .like("T.every { steps = 10 }"),
          bound("tensorboard", &LogConfig::tensorboard).otherwise(true).says("also write TensorBoard event files"),
          items("trackers", &LogConfig::trackers, tracker_block())
              .otherwise(Json::array())
              .silently()
              .written(Form::kPlaces, {&wandb_block(), &mlflow_block(), &prometheus_block(), &otlp_block()})
              .says("services that get each step",
                    "A process beside the training reads metrics.jsonl and events.jsonl for each, so nothing is lost "
                    "while "
                    "a service is away. `cairn track` does the same for a run that has ended.")
              .like("{ T.wandb { \"llm\" }, T.otlp \"http://localhost:4318\" }")}};
  return out;
}

const Block& roll_back_block() {
  static const Block out{
      .name = "roll_back",
      .constructors = {"roll_back"},
      .doc =
          "How a guard rolls back: to a good checkpoint before the trouble, from where the run continues without the "
          "samples of the steps in trouble. A further try at the same place takes an older checkpoint and skips more.",
      .fields = {bound("at_most", &RollBackConfig::at_most).range(1, 1000).otherwise(4).silently().says("tries"),
                 bound("within", &RollBackConfig::within)
                     .range(1, kMany)
                     .otherwise(20'000)
                     .silently()
                     .says("steps among which at_most counts"),
                 bound("lead", &RollBackConfig::lead)
                     .range(0, 100'000)
                     .otherwise(8)
                     .silently()
                     .says("steps before the trouble whose samples are skipped too",
                           "Twice as many at each further "
                           "try.")}};
  return out;
}

const Block& skip_block() {
  static const Block out{
      .name = "skip",
      .constructors = {"skip"},
      .doc = "How often a guard leaves the update of an outlier out.",
      .fields = {bound("at_most", &SkipConfig::at_most).range(1, 64).otherwise(3).silently().says("updates"),
                 bound("within", &SkipConfig::within)
                     .range(1, kMany)
                     .otherwise(1000)
                     .silently()
                     .says("steps among which at_most counts")}};
  return out;
}

const Block& compute_again_block() {
  static const Block out{
      .name = "compute_again",
      .constructors = {"compute_again"},
      .doc = "How often a guard computes an outlier again.",
      .fields = {bound("at_most", &ComputeAgainConfig::at_most).range(1, 64).otherwise(3).silently().says("steps"),
                 bound("within", &ComputeAgainConfig::within)
                     .range(1, kMany)
                     .otherwise(10'000)
                     .silently()
                     .says("steps among which at_most counts")}};
  return out;
}

const Block& lower_lr_block() {
  static const Block out{
      .name = "lower_lr",
      .constructors = {"lower_lr"},
      .doc = "How a guard lowers the learning rate: from the next start of the ranks, which it makes, on.",
      .fields = {
          bound("by", &LowerLrConfig::by)
              .above(0)
              .under(1)
              .otherwise(0.5)
              .silently()
              .says("times the rate of the schedule"),
          bound("over", &LowerLrConfig::over).range(0, kMany).otherwise(500).silently().says("steps at that rate"),
          bound("back", &LowerLrConfig::back)
              .range(0, kMany)
              .otherwise(500)
              .silently()
              .says("steps of the linear way back"),
          bound("at_most", &LowerLrConfig::at_most).range(1, 1000).otherwise(2).silently().says("times"),
          bound("within", &LowerLrConfig::within)
              .range(1, kMany)
              .otherwise(20'000)
              .silently()
              .says("steps among which at_most counts")}};
  return out;
}

const Block& lowered_block() {
  static const Block out{
      .name = "lowered",
      .constructors = {"lowered"},
      .positional = true,
      .doc = "A rate that was lowered: T.lowered { 155, by = 0.5, over = 500, back = 500 }.",
      .fields = {
          bound("at", &LoweredRate::at).range(0, kMany).needed().says("the step behind which it is").like("155"),
          bound("by", &LoweredRate::by).above(0).under(1).otherwise(0.5).says("times the rate of the schedule"),
          bound("over", &LoweredRate::over).range(0, kMany).otherwise(500).says("steps at that rate"),
          bound("back", &LoweredRate::back).range(0, kMany).otherwise(500).says("steps of the linear way back")}};
  return out;
}

Def guard_field(std::string name, std::vector<GuardAction> WatchConfig::*member) {
  return chosen(std::move(name), member, {"roll_back", "stop", "skip", "lower_lr", "recompute"})
      .otherwise(Json::array())
      .silently();
}

const Block& patience_block() {
  static const Block out{
      .name = "patience",
      .constructors = {"patience"},
      .doc = "When a run ends early: T.patience { metric = \"valid_loss\", evaluations = 5 }.",
      .fields = {bound("metric", &PatienceConfig::metric)
                     .otherwise("")
                     .silently()
                     .says("of its evaluations", "valid_loss, valid_source_loss/SOURCE, or eval/TASK/NUMBER."),
                 bound("evaluations", &PatienceConfig::evaluations)
                     .range(0, kMany)
                     .otherwise(0)
                     .silently()
                     .says("in a row without a better value, after which the run ends"),
                 bound("least", &PatienceConfig::least)
                     .range(0, kMany)
                     .otherwise(0.0)
                     .silently()
                     .says("by how much a value has to be better to count")}};
  return out;
}

const Block& watch_block() {
  static const Block out{
      .name = "watch",
      .constructors = {"watch"},
      .doc =
          "What is looked for in loss and gradient norm, to tell good checkpoints from others, and what is done of it. "
          "Without actions and skip_steps it changes nothing in what is trained.",
      .fields = {
          bound("window", &WatchConfig::window)
              .range(32, 256)
              .otherwise(128)
              .silently()
              .says("clean steps that a new one is compared with",
                    "By median and median absolute deviation; more than 6 deviations above are an outlier."),
          bound("proof", &WatchConfig::proof)
              .range(1, 100000)
              .otherwise(32)
              .silently()
              .says("clean steps behind a checkpoint that make it good", "The newest good one is never removed."),
          bound("forensics", &WatchConfig::forensics)
              .otherwise(false)
              .silently()
              .says("write a state with ruined weights to RUN/forensics",
                    "For inspection; no command resumes from it."),
          guard_field("on_outlier", &WatchConfig::on_outlier)
              .says(
                  "what to do of a single step whose loss or gradient norm is an outlier: recompute, skip",
                  "recompute runs forward and backward again: an error of the machine that has passed is put right. "
                  "skip leaves the update out: weights and moments stay, and the step's samples count as passed over. "
                  "All ranks decide by numbers that are the same in each layout.")
              .like("{ \"recompute\", \"skip\" }"),
          block("early_stop", &WatchConfig::early_stop, patience_block())
              .silently()
              .says("end the run when a metric has not become better for some evaluations",
                    "The run then is done, with exit code 0, and its last step is saved.")
              .like("T.patience { metric = \"valid_loss\", evaluations = 5 }"),
          block("recompute", &WatchConfig::recompute, compute_again_block())
              .silently()
              .says("how many outliers may be computed again")
              .like("T.compute_again { at_most = 1 }"),
          bound("audit", &WatchConfig::audit_steps, "audit_steps")
              .range(0, kMany)
              .otherwise(0)
              .silently()
              .written(Form::kEveryStep, {&every_block()})
              .says("at which steps forward and backward run twice, to find errors of the machine",
                    "Each rank's sums of losses and of squared gradients are compared bit for bit. A third run decides "
                    "which result is used. Default: never.")
              .like("T.every { steps = 1000 }"),
          bound("replicas", &WatchConfig::replica_steps, "replica_steps")
              .range(0, kMany)
              .otherwise(0)
              .silently()
              .written(Form::kEveryStep, {&every_block()})
              .says("at which steps ranks that hold the same weights compare them, to find errors of the machine",
                    "Bit for bit, by hashes. Ranks outside the majority are named. ZeRO-3 divides weights over its "
                    "shard groups, so equal parts of two groups are compared. Default: never.")
              .like("T.every { steps = 1000 }"),
          guard_field("on_sdc", &WatchConfig::on_sdc)
              .says(
                  "what to do when an audit or a comparison of replicas finds an error of the machine: roll_back, stop",
                  "roll_back returns to the newest checkpoint from before the last one that found none, and leaves "
                  "out no sample; stop ends the run with exit code 76. Saves since then are suspect in any case.")
              .like("{ \"roll_back\", \"stop\" }"),
          block("skip", &WatchConfig::skip, skip_block())
              .silently()
              .says("how many updates may be left out")
              .like("T.skip { at_most = 1 }"),
          bound("skip_steps", &WatchConfig::skip_steps)
              .range(1, kMany)
              .otherwise(Json::array())
              .silently()
              .says("steps whose update is left out",
                    "A run whose guard has left them out is done again by this. Steps that the run has passed stay as "
                    "they were.")
              .like("{ 14 }"),
          block("lower_lr", &WatchConfig::lower_lr, lower_lr_block())
              .silently()
              .says("how to lower the rate")
              .like("T.lower_lr { by = 0.3, over = 200 }"),
          items("lowered_rates", &WatchConfig::lowered_rates, lowered_block())
              .otherwise(Json::array())
              .silently()
              .written(Form::kPlaces, {&lowered_block()})
              .says("rates that were lowered",
                    "A run whose guard has lowered its rate is done again by this. Overlapping factors multiply.")
              .like("{ T.lowered { 155, by = 0.5, over = 500 } }"),
          guard_field("on_divergence", &WatchConfig::on_divergence)
              .says("what to do when losses or gradient norms are outliers upwards in four of eight steps",
                    "Guards take the first that can be done of roll_back, while it has tries and a good checkpoint; "
                    "lower_lr, "
                    "while it has tries; and stop, with exit code 76. Empty: a warning.")
              .like("{ \"roll_back\", \"stop\" }"),
          guard_field("on_drop", &WatchConfig::on_drop)
              .says("the same when losses are outliers downwards, as on data that repeat")
              .like("{ \"roll_back\" }"),
          guard_field("on_not_finite", &WatchConfig::on_not_finite)
              .says("the same when a loss or gradient norm is not finite", "At its end the run stops with 76.")
              .like("{ \"roll_back\" }"),
          block("roll_back", &WatchConfig::roll_back, roll_back_block())
              .silently()
              .says("how to roll back")
              .like("T.roll_back { at_most = 2 }")}};
  return out;
}

const Block& run_stage_block() {
  static const Block out{
      .name = "stage",
      .constructors = {"stage"},
      .recipe_fields = true,
      .doc =
          "A change in the middle of the run: T.stage { at = T.tokens \"800B\", batch = { samples = 512 } }. Besides "
          "`at` it takes fields of the recipe and merges them as :with does, over the recipe and the stages before: "
          "batch, optimizer, data, objective, precision, loss_scale, deterministic, checkpoint, eval, recompute, "
          "rotary angles and dropout rates. Shapes, seed, tokenizer, mesh and name stay.",
      .fields = {written_only("at", Type::kSpan)
                     .above(0)
                     .needed()
                     .says("the amount after which it begins, at the first step behind it",
                           "T.fraction is of `stop` as it is in the stage before.")
                     .like("T.tokens \"800B\"")}};
  return out;
}

const Block& run_stage_stored_block() {
  Def changes = written_only("changes", Type::kObject);
  changes.load = [](const void* object) { return parsed_object(static_cast<const RecipeStage*>(object)->changes); };
  changes.store = [](void* object, const Json& value) {
    static_cast<RecipeStage*>(object)->changes = json_text(value);
  };
  static const Block out{.name = "stage",
                         .doc = "A change in the middle of the run.",
                         .fields = {bound("at", &RecipeStage::at).above(0), changes}};
  return out;
}

const Block& restart_block() {
  static const Block out{
      .name = "restart",
      .constructors = {"restart"},
      .doc = "What happens when a rank dies or hangs.",
      .fields = {bound("max_restarts", &RestartConfig::max_restarts)
                     .range(0, kMany)
                     .otherwise(3)
                     .says("tries in a row", "The count restarts after each completed checkpoint or 100 steps."),
                 bound("backoff", &RestartConfig::backoff_s, "backoff_s")
                     .range(0, 86400)
                     .otherwise(0.0)
                     .in(Unit::kSeconds)
                     .says("wait before the second restart in a row", "Doubles each time.")
                     .like("\"5s\""),
                 bound("deadline", &RestartConfig::deadline_s, "deadline_s")
                     .above(0)
                     .below_or_at(86400 * 7)
                     .otherwise(60.0)
                     .in(Unit::kSeconds)
                     .says("longest wait of any rank for another", "A rank that waits longer gives up with a report.")
                     .like("\"2min\"")}};
  return out;
}

}  // namespace

const Block& recipe_block() {
  static const Block out{
      .name = "recipe",
      .constructors = {"recipe"},
      .doc = "A whole recipe; what the file returns.",
      .fields = {
          bound("name", &Recipe::name)
              .needed()
              .says("of the run and its folder", "Letters, digits, - _ and dots.")
              .like("\"tiny\""),
          bound("seed", &Recipe::seed).otherwise(0).says("of initial weights and the order of samples"),
          bound("stop", &Recipe::stop)
              .above(0)
              .needed()
              .one_of({"steps", "samples", "tokens"})
              .says("how long to train")
              .like("T.steps(2000)"),
          block("model", &Recipe::model, model_block()).needed().says("the network"),
          block("tokenizer", &Recipe::tokenizer, tokenizer_block())
              .written(Form::kTokenizer, {&bytes_block(), &sentencepiece_block(), &hf_tokenizer_block()})
              .says("how text becomes tokens",
                    "Not needed to train on tokens; `cairn data tokenize` and `cairn generate` use it.")
              .like("T.bytes"),
          block("data", &Recipe::data, data_block())
              .needed()
              .written(Form::kData, {&megatron_block(), &token_files_block(), &instruct_block(), &blend_block()})
              .says("what to train on", "Paths are relative to the working directory.")
              .like("T.megatron { prefix = \"data/text_document\", split = { 95, 5 } }"),
          block("objective", &Recipe::objective, objective_block())
              .silently()
              .says("how samples become inputs and targets; default: each next token"),
          block("batch", &Recipe::batch, batch_block()).needed().says("how many samples a step takes"),
          block("optimizer", &Recipe::optimizer, optimizer_block()).needed().says("how the weights move"),
          chosen("device", &Recipe::device, {"auto", "cpu", "cuda"})
              .otherwise("auto")
              .silently()
              .says(
                  "where ranks compute",
                  "auto: CUDA where the machine has an NVIDIA device, else the CPU. A device that is there and cannot "
                  "be used is an error, not a reason to take the CPU: `cairn doctor` says what is missing. `--device` "
                  "of `cairn train` goes before this field. What has run on a device: docs/gpu.md."),
          chosen("precision", &Recipe::precision, {"fp32", "bf16", "fp16"})
              .otherwise("fp32")
              .says("of the arithmetic",
                    "bf16 and fp16 keep fp32 master weights and accumulate products and gradients in fp32; fp16 scales "
                    "the loss."),
          block("loss_scale", &Recipe::loss_scale, loss_scale_block())
              .silently()
              .says("how fp16 scales the loss", "Read only with precision = \"fp16\"."),
          chosen("deterministic", &Recipe::deterministic, {"run", "layout"})
              .otherwise("run")
              .silently()
              .says(
                  "what gives the same bits",
                  "run: the same recipe in the same layout. layout: also another dp, tp, cp, pp, ep, schedule, ZeRO "
                  "stage, accumulation or recomputation, with sequence parallelism and without, from the first step or "
                  "from a checkpoint; only batch.micro stays. It costs a reduction of gradients after each "
                  "micro-batch, as ZeRO-2 does, with tied embeddings a second copy of the embedding where one rank has "
                  "both ends of the model, and with tp reductions of activations in float (twice the bytes in bf16): a "
                  "fifth of a step of GPT-2 124M on one rank, about as much with tp = 2 and a seventh with cp = 2. "
                  "tp may be a power of two up to 8 that leaves key/value heads whole and 16 channels on each rank, cp "
                  "one "
                  "that leaves multiples of 256 tokens of a sequence on each; with experts or a top query layer both "
                  "must be 1. Not with zb-h1, zb-v or T.adafactor, with several replicas not with zero = 0 or a "
                  "mesh.shard below dp x cp, and sequence parallelism not with model.embed_dim or parallel_shared."),
          chosen("sums", &Recipe::sums, {"ranked", "nccl"})
              .otherwise("ranked")
              .silently()
              .says(
                  "how sums over ranks are added up on CUDA",
                  "ranked: in the order of ranks, by Cairn's kernels. nccl: as NCCL adds, in an order that follows "
                  "from "
                  "its version, the machines and the layout; bf16 and fp16 are rounded at each rank on the way. That "
                  "gives up the bits of ranks that communicate through the host or by another version of NCCL; a run "
                  "and its restarts on the same machines repeat theirs. It spares the memory in which ranks sum. Where "
                  "ranks do not communicate by NCCL a start of several is refused. Maxima stay Cairn's. Not with "
                  "deterministic = \"layout\"."),
          block("mesh", &Recipe::mesh, mesh_block()).says("how the ranks are arranged; default: data parallel alone"),
          chosen("schedule", &Recipe::schedule, {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"})
              .otherwise("1f1b")
              .says("order of micro-batches in the pipeline",
                    "Read only with mesh.pp > 1. interleaved is 1F1B over mesh.virtual_stages stages a rank: a smaller "
                    "bubble, more messages and activations. zb-h1 and zb-v compute the gradients of the weights apart "
                    "from those of the activations, in what would be idle time: a third and a sixth of 1F1B's bubble. "
                    "zb-v has two stages a rank (mesh.virtual_stages = 2), and the first and the last on rank 0."),
          block("recompute", &Recipe::recompute, recompute_block())
              .silently()
              .says("activations computed again in backward instead of kept"),
          block("checkpoint", &Recipe::checkpoint, checkpoint_block()).says("when the state is kept"),
          block("init", &Recipe::init, init_block())
              .newer()
              .written(Form::kPlain, {&init_block(), &hf_block()})
              .says("what the run begins with; default: weights drawn from the seed"),
          block("eval", &Recipe::eval, eval_block()).says("loss on validation data"),
          block("log", &Recipe::log, log_block()).says("what is written down"),
          block("restart", &Recipe::restart, restart_block()).says("what happens when a rank dies"),
          block("watch", &Recipe::watch, watch_block())
              .silently()
              .says("what is looked for in the numbers of the steps"),
          items("hooks", &Recipe::hooks, hook_block())
              .otherwise(Json::array())
              .silently()
              .written(Form::kPlaces, {&hook_block()})
              .says("commands that the agent runs when something happens",
                    "Only a start with --hooks runs them. Each runs once at a time, at nice 10, with the event as JSON "
                    "on "
                    "stdin and its output in RUN/logs/hook-N.log; ranks never wait for one.")
              .like("{ T.on { \"saved\", run = { \"tools/upload\", \"{dir}\" } } }"),
          items("stages", &Recipe::stages, run_stage_stored_block())
              .otherwise(Json::array())
              .silently()
              .written(Form::kSegments, {&run_stage_block()})
              .says("from given positions on, other values",
                    "In the order of their beginnings. --set and --with change the recipe below the stages: a value "
                    "that a stage gives wins from there on.")
              .like("{ T.stage { at = T.steps(500), batch = { samples = 32 } } }"),
      }};
  return out;
}

const Field* Block::find(std::string_view wanted) const {
  for (const Field& field : fields)
    if (field.name == wanted) return &field;
  return nullptr;
}

const Field* Block::find_key(std::string_view wanted) const {
  for (const Field& field : fields)
    if (field.stored() && field.key == wanted) return &field;
  return nullptr;
}

const std::vector<std::pair<std::string, const Block*>>& constructors() {
  static const auto out = [] {
    std::map<std::string, const Block*> found;
    const std::function<void(const Block&)> add = [&](const Block& from) {
      for (const std::string& name : from.constructors) found[name] = &from;
      for (const Field& field : from.fields) {
        if (field.block != nullptr) add(*field.block);
        for (const Block* accepted : field.accepts)
          if (accepted != field.block) add(*accepted);
      }
    };
    add(recipe_block());
    for (const Block* root : cluster_blocks()) add(*root);
    return std::vector<std::pair<std::string, const Block*>>(found.begin(), found.end());
  }();
  return out;
}

const Block* find_constructor(std::string_view name) {
  for (const auto& [known, block] : constructors())
    if (known == name) return block;
  return nullptr;
}

const Field* find_source_field(const std::string& kind, std::string_view key) {
  for (const Field& field : find_constructor(kind)->fields)
    if (field.key == key) return &field;
  return nullptr;
}

void visit_fields(const std::function<void(const std::string&, const Field&)>& visit, const Block& root) {
  const std::function<void(const std::string&, const Block&)> walk = [&](const std::string& prefix, const Block& in) {
    for (const Field& field : in.fields) {
      const std::string path = prefix.empty() ? field.name : prefix + "." + field.name;
      visit(path, field);
      if (field.type == Type::kBlock && field.form == Form::kPlain) walk(path, *field.block);
    }
  };
  walk("", root);
}

const Field* find_field(std::string_view path, const Block& root) {
  const Block* in = &root;
  while (true) {
    const size_t dot = path.find('.');
    const Field* field = in->find(path.substr(0, dot));
    if (field == nullptr || dot == std::string_view::npos) return field;
    if (field->type != Type::kBlock || field->form != Form::kPlain) return nullptr;
    in = field->block;
    path.remove_prefix(dot + 1);
  }
}

std::optional<Json> derived_default(const std::string& path, bool llama,
                                    const std::function<std::optional<Json>(const std::string&)>& get) {
  const auto integer = [&](const char* of) -> std::optional<int64_t> {
    const std::optional<Json> value = get(of);
    if (!value || !value->is_number_integer()) return std::nullopt;
    return value->get<int64_t>();
  };
  if (path == "optimizer.beta1") {
    const std::optional<Json> kind = get("optimizer.kind");
    return Json(kind && *kind == "adafactor" ? 0.0 : 0.9);
  }
  if (path == "model.kv_heads") {
    if (const auto heads = integer("model.heads")) return Json(*heads);
  } else if (path == "model.head_dim") {
    const auto nope = integer("model.mla.nope_dim"), turning = integer("model.mla.rope_dim");
    if (integer("model.mla.kv_rank").value_or(0) > 0 && nope && turning && *nope + *turning > 0) {
      return Json(*nope + *turning);
    }
    const auto width = integer("model.width"), heads = integer("model.heads");
    if (width && heads && *heads > 0 && *width / *heads > 0) return Json(*width / *heads);
  } else if (path == "model.ffn") {
    const auto width = integer("model.width");
    if (width) return Json(llama ? ((8 * *width + 2) / 3 + 63) / 64 * 64 : 4 * *width);
  }
  return std::nullopt;
}

}  // namespace cairn::dsl
