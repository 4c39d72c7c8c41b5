#pragma once
// Families of Hugging Face models: config.json <-> ModelConfig, and the closed table from Hugging Face tensor names to
// logical tensors. A family is one table; nothing else knows its names.
// Source: transformers (4.52 and 5.x), models/gpt2 and models/llama: configuration and modeling files.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

/// How a stored tensor becomes a logical one. All are permutations of bytes, so import and export are exact inverses.
struct Mapping {
  std::string logical;          // "layers.3.attn.k.weight"
  std::string stored;           // "transformer.h.3.attn.c_attn.weight"
  bool transpose = false;       // stored [in, out] (Conv1D): the logical weight is its transpose
  int64_t part = 0, parts = 1;  // the part-th of `parts` equal blocks along the output dim ([q|k|v])
};

/// Rows [logical, logical + count) of a logical tensor are rows [stored, stored + count) of the stored one, or its
/// columns where Mapping::transpose. A tensor is a matrix here, as row_count and column_count have it
/// (weights_folder.h).
struct RowRun {
  int64_t logical = 0, stored = 0, count = 0;
};
/// All rows of a logical tensor of this shape, ascending: all that import and export know of a transform.
std::vector<RowRun> row_runs(const Mapping& mapping, const Shape& logical);
/// The shape on disk of the stored tensor that a logical one of this shape is a part of.
Shape stored_shape(const Mapping& mapping, const Shape& logical);

struct Family {
  std::string_view model_type;    // config.json "model_type"
  std::string_view architecture;  // the class name in "architectures"
  std::string_view prefix;        // of the backbone: "transformer.", "model."
};

/// The family of a model_type. Errors: kUnsupported naming the families that are known.
Result<Family> find_family(std::string_view model_type);
/// The family that can hold this model. Errors: kUnsupported naming the field that fits none.
Result<Family> family_for(const ModelConfig& model);

/// Errors: kInvalidInput for a missing or ill-typed key, kUnsupported for a switch this build does not compute (rope
/// scaling, other activations, ...): refused, never dropped. Absent keys take the class default.
Result<ModelConfig> model_from_config(const nlohmann::json& config);

/// config.json in the form that both transformers lines read, every key of the family explicit.
Result<nlohmann::ordered_json> config_from_model(const ModelConfig& model, DType weights);

/// All tensors of the model, canonical order.
std::vector<Mapping> tensor_map(const Family& family, const ModelConfig& model);

/// A stored tensor that older releases wrote beside the weights (masks, inverse frequencies) and nobody needs.
bool is_ignored_tensor(const Family& family, std::string_view stored);

}  // namespace cairn::convert
