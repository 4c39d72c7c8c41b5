#pragma once
// What a family's table is made of; included by families/*.cc only. docs/adding-a-family.md shows how to write one.
//
// A key of config.json works both ways: `read` takes it into a model, `write` says it from a model. So the table that
// imports is the table that exports, and whether a family can hold a model is asked by writing and reading again.

#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "converters/family.h"

namespace cairn::convert {

/// Typed access to config.json: an absent key takes the default; the first wrong one is remembered.
class ConfigReader {
 public:
  explicit ConfigReader(const nlohmann::json& config) : config_(config) {}

  /// The value of a key, null for an absent one and for a JSON null.
  const nlohmann::json* find(std::string_view key) const;
  bool contains(std::string_view key) const { return config_.contains(key); }
  int64_t integer(std::string_view key, int64_t fallback);
  double number(std::string_view key, double fallback);
  bool boolean(std::string_view key, bool fallback);
  std::string text(std::string_view key, std::string_view fallback);

  void invalid(std::string message);
  void unsupported(std::string message);
  /// Something a person should know that stops nothing.
  void note(std::string text) { notes_.push_back(std::move(text)); }
  const std::vector<std::string>& notes() const { return notes_; }
  /// The line of transformers that wrote the folder, by transformers_version: 4, 5; 0: it does not say.
  int64_t line() const;
  Status status() const { return status_; }
  const nlohmann::json& config() const { return config_; }

 private:
  void wrong(std::string_view key, std::string_view expected, const nlohmann::json& found);
  const nlohmann::json& config_;
  Status status_;
  std::vector<std::string> notes_;
};

struct ConfigKey {
  std::vector<std::string_view> names;  // what `read` looks at
  std::function<void(ConfigReader&, ModelConfig&)> read;
  std::function<void(const ModelConfig&, nlohmann::ordered_json&)> write;
  // Whether an export may keep what the source has under this name, where it says the same; null: it may, but for a
  // null in the place of a value. Else the table's own spelling goes out.
  std::function<bool(std::string_view name, const nlohmann::json& value)> may_keep = nullptr;
};

// --- keys: read in the order of the table, so a later one may count on what an earlier one has set ---------------

using Size = int64_t ModelConfig::*;
/// What a size may be: as the recipe's schema bounds it, since an imported model becomes a recipe (dsl/schema.cc).
struct SizeBound {
  Size field;
  std::string_view name;
  int64_t most;
};
inline constexpr SizeBound kSizeBounds[] = {{&ModelConfig::vocab, "vocabulary", 1'000'000'000},
                                            {&ModelConfig::width, "width", 1 << 20},
                                            {&ModelConfig::layers, "layers", 100'000},
                                            {&ModelConfig::heads, "heads", 1 << 16},
                                            {&ModelConfig::kv_heads, "kv heads", 1 << 16},
                                            {&ModelConfig::head_dim, "head_dim", 1 << 16},
                                            {&ModelConfig::ffn, "ffn", 1 << 22},
                                            {&ModelConfig::context, "context", 1 << 24}};
ConfigKey size(std::string_view name, Size field, int64_t absent);
/// The same, under either of two names; the first is written.
ConfigKey size(std::string_view name, std::string_view alias, Size field, int64_t absent);
/// Absent or null: as the function says. Always written.
ConfigKey size(std::string_view name, Size field, int64_t (*absent)(const ModelConfig&));
/// The value of a size within its bounds, for keys of a family's own.
int64_t read_size(ConfigReader& in, std::string_view name, Size field, int64_t absent);
/// num_key_value_heads: an absent one is `absent`, or as many as heads when that is 0; null is as many as heads.
ConfigKey kv_heads(int64_t absent);
ConfigKey number(std::string_view name, double ModelConfig::*field, double absent);
/// A number above 0.
ConfigKey factor(std::string_view name, double ModelConfig::*field, double absent);
/// A number above 0, or null: not. An absent one is `absent`, 0 for null.
ConfigKey bound(std::string_view name, double ModelConfig::*field, double absent);
/// The field is one divided by the number.
ConfigKey reciprocal(std::string_view name, double ModelConfig::*field, double absent);
/// query_pre_attn_scalar: scores are divided by its root.
ConfigKey query_scalar(double absent);
ConfigKey flag(std::string_view name, bool ModelConfig::*field, bool absent);
/// One switch for the biases of several groups of projections.
enum Projections { kQkv = 1, kOut = 2, kMlp = 4 };
ConfigKey biases(std::string_view name, int projections, bool absent);
/// head_dim: an absent one is `absent`, or width / heads when that is 0; null is width / heads, whatever the class
/// makes of it. Written as a number, with `if_unusual` only where it is not width / heads (a class that has no such
/// key).
ConfigKey head_dim(int64_t absent, bool if_unusual = false);
/// head_dim = width / heads, for a class that has no key for it: another number in the file is refused.
ConfigKey divided_head_dim();
/// The same, and a key/value head for each head.
ConfigKey divided_heads();

/// An activation by the class's names for it; the first that fits is written.
using ActivationName = std::pair<std::string_view, Activation>;
ConfigKey activation(std::string_view name, std::string_view absent, std::vector<ActivationName> known);
/// All plain ones that transformers has and that are computed here, and the gated ones by the name of their inner part.
std::vector<ActivationName> plain_activations();
std::vector<ActivationName> gated_activations();

/// Scores divided by sqrt(head_dim), or not at all (GPT-2's scale_attn_weights).
ConfigKey scaled_attention();

/// Experts behind Mixtral's router, all layers the same: how many, how many a token takes, and the loss that balances
/// them, which counts where output_router_logits is true. `name` is the number's key in files; transformers 5 takes
/// num_experts and num_local_experts for one another.
ConfigKey experts(std::string_view name, int64_t absent, int64_t absent_top_k, double absent_loss = 0.001);
/// norm_topk_prob: the weights of a token's experts are divided by their sum, or left as the softmax gave them.
ConfigKey renormalised_experts(bool absent = false);
/// The same of other classes, whose keys have other names.
struct ExpertKeys {
  std::string_view count, alias, top_k = "num_experts_per_tok";  // alias: of count; empty: none
  int64_t absent = 0, absent_top_k = 0;
  double absent_loss = -1;  // router_aux_loss_coef; below 0: the class has none
};
ConfigKey experts(ExpertKeys keys);
/// Hidden units of an expert. `unused`: what intermediate_size, the size of dense layers, is written as where all have
/// experts; 0: that of an expert.
ConfigKey expert_width(std::string_view name, int64_t absent, int64_t unused);
/// decoder_sparse_step and mlp_only_layers of Qwen's classes: the layers without experts.
ConfigKey sparse_steps();
/// A count of first layers without experts.
ConfigKey first_dense(std::string_view name, int64_t absent);
/// Experts that every token goes through, each as wide as the others.
ConfigKey shared_experts(std::string_view name, int64_t absent);
/// Layers behind the model's that predict further tokens (model.mtp); none where the key is absent.
ConfigKey further_tokens(std::string_view name);
/// n_group, topk_group, routed_scaling_factor of DeepSeek's router, which chooses by sigmoids and biases. Absent ones:
struct GroupedRouter {
  int64_t groups = 1, groups_per_token = 1;
  double scale = 1.0;
};
std::vector<ConfigKey> grouped_router(GroupedRouter absent = {});

/// A key with the one value that is computed here: written, and refused when it is something else.
ConfigKey only(std::string_view name, nlohmann::json value);
/// The same, not written.
ConfigKey refuse_unless(std::string_view name, nlohmann::json value);
/// A rate of dropout: written from the model, not read, as how to train is the recipe's business.
ConfigKey dropout(std::string_view name, double ModelConfig::*field);
/// A key that matters for training or for speed alone: written so, not read.
ConfigKey constant(std::string_view name, nlohmann::json value);
/// Keys that may be there and mean nothing here.
ConfigKey unread(std::initializer_list<std::string_view> names);

/// Rotary positions in the 4.x form (base and, if named, partial at top level, rope_scaling) and in the 5.x one
/// (rope_parameters); the 4.x form is written, which both lines read. Where the lines read a file differently
/// (rope_theta or partial_rotary_factor inside rope_scaling, original_max_position_embeddings beside it, a type and a
/// rope_type that disagree) the reading is that of the line that wrote it, with a note; refused where
/// transformers_version does not say.
struct RopeKeys {
  std::string_view base = "rope_theta", partial = "";
  double absent_base = 10000.0, absent_partial = 1.0;
  double absent_base_5 = 0;      // what transformers 5 takes for an absent base, where that is another; 0: the same
  int64_t longrope_context = 0;  // Phi-3's: no scaling but longrope, which extends a context that stands at the top
                                 // level, this one where it is absent. 0: the others
  bool old_type_counts = true;   // transformers 4 copies rope_scaling.type over rope_type before it reads that
  bool own_spelling = false;     // transformers 4 takes rope_scaling in one spelling, which is written
};
ConfigKey rope(RopeKeys keys = {});
/// The same of a class whose layers with a window turn by a base of their own, without scaling: in the 4.x form under
/// `window_base`, in the 5.x form as rope_parameters.sliding_attention beside .full_attention.
struct WindowRope {
  std::string_view window_base = "";  // empty: transformers 4 has no key and takes rope_theta
  double absent = 0;
  double fixed_5 = 0;  // what transformers 5 takes of the 4.x form, whatever it says; 0: what 4.x takes
};
ConfigKey rope(RopeKeys keys, WindowRope window);
/// no_rope_layers: 1 for a layer that turns, 0 for one that does not. Absent: all but every no_rope_layer_interval-th
/// turn. An empty list fails, or says nothing.
ConfigKey turning_layers(bool may_be_empty = false);
/// rotary_dim of GPT-J and CodeGen: a number of channels, base fixed at 10000.
ConfigKey rotary_dim(int64_t absent);

/// sliding_window of Mistral and Mixtral: of all layers, null for none. absent = 0: none.
ConfigKey sliding_window(int64_t absent);
/// sliding_window and layer_types, which say by layer what has the window. Absent layer_types: all but every
/// `every`-th layer, or as many as the key `pattern` says.
struct WindowPattern {
  int64_t window = 4096, every = 4;
  std::string_view pattern = "";
  bool may_be_null = false;   // sliding_window: no windows then
  bool full_is_nope = false;  // layers without the window do not turn q and k; with a null window all turn
};
ConfigKey windows_by_pattern(WindowPattern pattern);
/// sliding_window, use_sliding_window, max_window_layers and layer_types of Qwen2 and Qwen3.
ConfigKey windowed_layers();

// --- tensors ----------------------------------------------------------------------------------------------------

/// How the logical tensors in braces lie along the output dim of the stored one: so many groups of rows, in each an
/// equal part of the first tensor, of the second, ...
enum class Fuse {
  kBlocks,       // 1 group: [q|k|v], [gate|up]
  kPerKvHead,    // a group for each key/value head: its query heads, its k, its v. [n, 3, d] where all heads have their
                 // own
  kFourBlocks,   // CodeGen: 4 groups, whatever the model's size
  kInterleaved,  // gpt-oss: a group for each row: a row of the first, a row of the second, ...
};

/// A row of the table. `*` is any one part of a name between dots, the same in both; {a,b,c} in `logical` are several
/// logical tensors that one stored tensor holds. `#` in `logical` is the number of an expert: the stored tensor is a
/// stack, with one more dim in front, [experts, rows, columns], or of vectors [experts, elements]. `#` in `stored` is
/// the number of a row: each row of the logical matrix is a stored vector.
struct TensorRow {
  std::string_view logical;
  std::string_view stored;
  Fuse fuse = Fuse::kBlocks;
  bool transpose = false;                      // matrices are stored [in, out]
  bool (*when)(const ModelConfig&) = nullptr;  // the row is of such models only; null: of all
  bool one_row = false;                        // a vector is stored as a matrix of one row
};

}  // namespace cairn::convert
