#pragma once
// A Hugging Face folder -> a committed checkpoint of any layout: weights only (kind "weight"), step 0.
//
// The folder is read a tensor at a time. The shards of all ranks lie in memory until the commit; from 1 GiB on that
// memory is an unlinked file beside the checkpoint, which the kernel may write out, so a model larger than memory
// converts (and needs its size twice on the disk while it does).

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/store/io_backend.h"
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
  bool replace = false;                        // an existing step 0; false: an error
  std::string run_name;                        // empty: the folder's name
};

struct ImportReport {
  std::filesystem::path dir;  // the committed checkpoint
  Recipe recipe;
  DType dtype = DType::kF32;  // of the weights in the folder; float in the checkpoint
  int64_t tensors = 0, parameters = 0, payload_bytes = 0, files_kept = 0, ranks = 0;
  double seconds = 0;
  std::vector<std::string> warnings;
};

/// A recipe for a model that came from elsewhere: the model, the mesh, the tokenizer if the folder has a SentencePiece
/// model, and harmless values for the rest, to be overridden by whoever trains on.
Recipe recipe_for_import(const ModelConfig& model, const MeshConfig& mesh, const std::string& name,
                         const std::filesystem::path& hf_dir);

/// Writes `checkpoints_dir`/step-00000000, atomically. The tokenizer's files, generation settings, config.json and the
/// shard index are kept in it byte for byte (kFileKind), its `state` has an object "imported".
/// Errors: those of HfFolder::open, make_plan (the layout does not fit the model) and save_checkpoint.
Result<ImportReport> import_hf(ckpt::IoBackend& io, const std::filesystem::path& hf_dir,
                               const std::filesystem::path& checkpoints_dir, const ImportOptions& options,
                               const RecipeEncoder& encode);

}  // namespace cairn::convert
