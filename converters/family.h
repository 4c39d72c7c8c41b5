#pragma once
// Families of Hugging Face models: config.json <-> ModelConfig, and from tensor names to logical tensors. A family is
// one file in families/, a table (family_table.h says of what); nothing else knows its names.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/model.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

struct ConfigKey;
struct TensorRow;

/// How the parts that tensor-parallel ranks keep become a stored tensor (sharded_files.h).
enum class Join {
  kWhole,      // each rank has all of it
  kRows,       // one rank's rows after the other's
  kVocabRows,  // the same, and what is beyond the vocabulary is padding
  kColumns,    // one rank's columns after the other's
  kGatedRows,  // the MLP's first projection: with a gate each rank has a part of one half, then of the other
};
struct JoinRow {
  std::string_view stored;  // a pattern of names (runtime/core/glob.h)
  Join join;
};
/// An older spelling of a part of a name.
struct Rename {
  std::string_view from, to;
};

/// A table. Small: copies share the rows, which live as long as the program.
struct Family {
  std::string_view model_type;      // config.json "model_type"
  std::string_view architecture;    // the class name in "architectures"; empty: import only, no class of transformers
  std::string_view prefix;          // of the backbone: "transformer.", "model."
  ModelConfig (*base)() = nullptr;  // what the class fixes and no key says
  std::span<const ConfigKey> keys;
  std::span<const TensorRow> tensors;
  std::span<const TensorRow> also;  // other names, read and never written: those of transformers 5's memory
  // What the names of layers begin with, where those behind the model's own predict further tokens (model.mtp).
  std::string_view later_layers;
  bool block_fp8 = false;       // published in blocks of eight bits, which export can write too (block_fp8.h)
  bool last_choice = false;     // its models go out as another family where that holds them too, unless they came as it
  bool own_code = false;        // no class of transformers: its models go out as another family where one holds them
  int64_t unit_head_vocab = 0;  // > 0: with so many tokens the head's rows are read divided by their lengths
  std::span<const std::string_view> ignored;  // patterns of tensors that nobody needs: masks, inverse frequencies
  std::string_view passed_over;  // in the names of tensors that both lines of transformers pass over; empty: none
  // transformers 4, which exports are written for:
  bool since_5 = false;                                   // it has no class
  std::string (*beyond_4)(const ModelConfig&) = nullptr;  // what it does otherwise with this model; empty: nothing
  // Of formats with a file for each rank, read only:
  std::span<const JoinRow> joins;  // the first that fits; none: whole
  std::span<const Rename> renames;
  // Of torch.distributed.checkpoint (dist_files.h):
  std::span<const Rename> dist_renames;
  std::string_view stacked;  // what the names of tensors that hold all layers begin with: "decoder.layers."
};

/// Where the rows of a logical tensor lie in a stored one, which may hold several tensors, or a row of one. A
/// permutation of elements, so import and export are exact inverses.
struct Mapping {
  std::string logical;          // "layers.3.attn.k.weight"
  int64_t tensor = 0;           // the same, by its place in model_tensors(model)
  std::string stored;           // "transformer.h.3.attn.c_attn.weight"
  Shape shape;                  // of the stored tensor, on disk
  bool transpose = false;       // stored [in, out] (Conv1D): the logical tensor's rows are its columns
  int64_t first = 0;            // stored row of logical row 0
  int64_t run = 0, stride = 0;  // `run` rows lie together, the next ones `stride` further; 0: all lie together
  int64_t line = 0;             // transpose: stored row of logical column 0
  int64_t only_row = -1;        // what is stored is this row of the logical tensor, as a vector; -1: all rows
};

/// Rows [logical, logical + count) of a logical tensor are rows stored, stored + stride, ... of the stored one, or its
/// columns where Mapping::transpose. A tensor is a matrix here, as row_count and column_count have it
/// (weights_folder.h).
struct RowRun {
  int64_t logical = 0, stored = 0, count = 0, stride = 1;
  /// Stored rows from the first to the last.
  int64_t span() const { return (count - 1) * stride + 1; }
};
/// All rows of a logical tensor of this shape, ascending: all that import and export know of a transform.
std::vector<RowRun> row_runs(const Mapping& mapping, const Shape& logical);

/// All families, by model_type.
const std::vector<Family>& families();
/// The family of a model_type. Errors: kUnsupported naming the families that are known.
Result<Family> find_family(std::string_view model_type);
/// The family that can hold this model: `preferred` (a model_type) if it can, else the first one whose config.json,
/// written and read again, is this model; those of last_choice after the others. Errors: kUnsupported naming what the
/// nearest family lacks.
Result<Family> family_for(const ModelConfig& model, std::string_view preferred = "");

/// Errors: kInvalidInput for a missing or ill-typed key, kUnsupported for a switch this build does not compute or
/// a switch that is on and that the family does not have: refused, never dropped. Absent keys take the class default.
/// `notes`: of a key that the two lines of transformers read differently, which reading was taken.
Result<ModelConfig> model_from_config(const nlohmann::json& config, std::vector<std::string>* notes = nullptr);

/// config.json in the form that both transformers lines read, every key of the family explicit. Values of `original`,
/// an object or null, stay as they are wherever they say the same.
nlohmann::ordered_json config_from_model(const Family& family, const ModelConfig& model, DType weights,
                                         const nlohmann::json& original);

/// The line of transformers that opens an export of the model and computes it, and what the other does; empty: the
/// same.
struct WrittenFor {
  std::string_view version;
  std::string warning;
};
WrittenFor written_for(const Family& family, const ModelConfig& model);

/// All tensors of the model, canonical order: one for each of model_tensors(model), or one for each of its rows. The
/// model is one that the family can hold: from model_from_config or checked by family_for.
std::vector<Mapping> tensor_map(const Family& family, const ModelConfig& model);

/// By the family's other names, one for each tensor of the model; nothing where it has no other. Read only.
std::vector<std::optional<Mapping>> other_map(const Family& family, const ModelConfig& model);

/// The stored name of the head's weight, which a file of a tied model may hold too.
std::string head_name(const Family& family);

/// Whether programs put this part into names around a model of theirs: torch.compile's _orig_mod, module, app, ...
bool is_wrapper(std::string_view part);
/// A name without such parts.
std::string without_wrappers(std::string_view stored);

/// The name in the table that a folder's name means: without what wrappers put in (torch.compile's _orig_mod, module,
/// _fsdp_wrapped_module, app, a second model.), with or without the backbone's prefix, and the head by the name that
/// transformers 5 has in memory. Empty: none of `known`.
std::string known_name(const Family& family, const std::set<std::string>& known, std::string_view stored);

/// Of a folder in the names of a family with Family::own_code.
std::string own_code_warning(const Family& family);

/// A tensor that both lines of transformers pass over by a part of its name (Family::passed_over).
bool is_passed_over(const Family& family, std::string_view stored);
/// A stored tensor that older releases wrote beside the weights (masks, inverse frequencies) and nobody needs.
bool is_ignored_tensor(const Family& family, std::string_view stored);
/// Of a tensor of a layer behind the model's own (Family::later_layers), which of these layers it is, from 0; else -1.
int64_t later_layer(const Family& family, const ModelConfig& model, std::string_view stored);

}  // namespace cairn::convert
