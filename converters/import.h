#pragma once
// A Hugging Face folder -> a committed checkpoint of any layout: weights only (kind "weight"), step 0. A training state
// of another program (foreign_state.h) -> one with moments and position, at the step that it was saved at.
//
// Bounded memory whatever the model's size: the shards of all ranks are made from the folder on their way to the disk,
// the next window while this one is written. Nothing temporary is written. Killed at any instant, the checkpoints
// folder has no half-made step; the same import, started again, takes over the files that were durable (when each byte
// of them holds), as resharding does. Files are cut so that no more than some GiB are ever made twice.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "converters/foreign_state.h"
#include "converters/hf_folder.h"
#include "runtime/config/recipe.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"

namespace cairn::convert {

struct RecipeText {
  std::string json, hash;
};
/// A recipe as manifests hold it (dsl::encode_recipe, dsl::recipe_hash).
using RecipeEncoder = std::function<RecipeText(const Recipe&)>;

struct ImportOptions {
  MeshConfig mesh{.tp = 1, .pp = 1, .dp = 1};  // dp must be set
  bool untie = false;                          // HfOptions::untie
  bool drop_mtp = false;                       // HfOptions::drop_mtp
  bool weights_only = false;                   // of a training state: no moments, no position, step 0
  std::filesystem::path config;                // folder with config.json and tokenizer; empty: the source itself
  bool replace = false;                        // an existing step of that number; false: an error
  std::string run_name;                        // empty: the folder's name
  int64_t memory_bytes = int64_t{192} << 20;   // for weights on their way
  int64_t file_bytes = int64_t{4} << 30;       // of a checkpoint's file, about
  const std::atomic<bool>* cancel = nullptr;   // when true it ends with kStopped, and may be gone on with
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // may be empty
};

struct ImportReport {
  std::filesystem::path dir;  // the committed checkpoint
  Recipe recipe;
  DType dtype = DType::kF32;  // of the weights in the folder; float in the checkpoint
  int64_t tensors = 0, parameters = 0, payload_bytes = 0, files_kept = 0, ranks = 0;
  int64_t taken_files = 0, taken_bytes = 0;  // that an earlier import, cut off, had written
  std::vector<std::string> cleaned;          // work directories of dead ones that were removed
  double seconds = 0;
  std::vector<std::string> warnings;
  // A training state only:
  int64_t step = 0, samples = 0, tokens = 0, adam_step = 0;
  bool moments = false;
  std::string from;               // "DeepSpeed 0.19.8, ZeRO-2"
  std::vector<std::string> lost;  // what did not come along, for people
};

/// A recipe for a model that came from elsewhere: the model, the mesh, the tokenizer if the folder has a SentencePiece
/// model, and harmless values for the rest, to be overridden by whoever trains on.
Recipe recipe_for_import(const ModelConfig& model, const MeshConfig& mesh, const std::string& name,
                         const std::filesystem::path& hf_dir);

/// Whether import_state() takes what is in `state`, else import_hf().
bool is_imported_state(const TrainingState& state, bool weights_only);

/// A state of look_at_training_state(), opened with its model: everything that can be known before a byte is written.
struct OpenedState {
  ForeignState state;                                      // its tensors are in the folders below
  std::unique_ptr<HfFolder> weights, exp_avg, exp_avg_sq;  // the last two null: only weights
};
/// Compares masters with the model's copy too. Errors: those of open_deepspeed(), open_dist_state(),
/// open_megatron_state(), check_masters() and HfFolder::open.
Result<OpenedState> open_state(const TrainingState& state, const std::filesystem::path& config,
                               const ImportOptions& options);

/// Writes `checkpoints_dir`/step-N of a training state: weights, moments and position, which `cairn train` resumes;
/// with weights_only step 0. No sampler: the recipe's own order of the data begins. `state` of the manifest has
/// "imported", and in it "foreign": what the other program's files said, for people. Errors: those of open_state() and
/// import_hf().
Result<ImportReport> import_state(ckpt::IoBackend& io, const TrainingState& state, const std::filesystem::path& source,
                                  const std::filesystem::path& checkpoints_dir, const ImportOptions& options,
                                  const RecipeEncoder& encode);

/// Writes `checkpoints_dir`/step-00000000, atomically. The tokenizer's files, generation settings, config.json and the
/// shard index are kept in it byte for byte (kFileKind), its `state` has an object "imported".
/// Errors: those of HfFolder::open, make_plan (the layout does not fit the model) and save_checkpoint.
Result<ImportReport> import_hf(ckpt::IoBackend& io, const std::filesystem::path& hf_dir,
                               const std::filesystem::path& checkpoints_dir, const ImportOptions& options,
                               const RecipeEncoder& encode);

}  // namespace cairn::convert
