#pragma once
// The weights of a checkpoint as those of a model with other layers or another vocabulary, streamed: layers left out,
// moved or repeated, rows added to embedding and head. Every kept weight has the same bits.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/store/io_backend.h"
#include "ckpt/tensors/stats.h"
#include "runtime/config/model.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::ckpt {

enum class NewRows {
  kMean,  // each new row of a table is the mean of its old rows
  kZero,
};

struct ModelEdit {
  std::vector<int64_t> layers;  // layers of the source, from 0, in the order of the result; empty: all
  int64_t vocab = 0;            // rows of embedding and head; 0: as many as the source has
  NewRows new_rows = NewRows::kMean;
};

/// The model that comes out. Lists of layers (experts, windows, positions) move with their layers.
/// Errors: kInvalidInput: a layer that the model has not; kUnsupported: a model whose layers compute by their number.
Result<ModelConfig> edited_model(const ModelConfig& model, const ModelEdit& edit);

struct EditOptions {
  int64_t memory_bytes = int64_t{256} << 20;
  bool replace_existing = false;
  const std::atomic<bool>* cancel = nullptr;
  StreamProgress progress;
  IoBackend* source_io = nullptr;  // reads ahead; null: `io` reads, in turns
};

struct EditReport {
  std::filesystem::path dir;
  Manifest manifest;  // as written
  int64_t tensors = 0, new_rows = 0;
  double seconds = 0;
};

/// Writes `checkpoints_dir`/step-N, N as in the source: weights of `target`, whose model is edited_model() of the
/// source's. No moments, no position. Files that an import kept come along, but for config.json and the index of
/// shards. Errors: those of reading and saving, and kInvalidInput: a weight that the source does not have, or has in
/// another shape; a step that exists.
Result<EditReport> edit_checkpoint(IoBackend& io, const std::filesystem::path& source_dir,
                                   const std::filesystem::path& checkpoints_dir, const ModelEdit& edit,
                                   const Plan& target, RunText run, const EditOptions& options);

}  // namespace cairn::ckpt
