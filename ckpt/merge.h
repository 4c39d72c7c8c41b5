#pragma once
// The weights of several checkpoints merged into a checkpoint of its own, streamed: each value is computed in double
// precision by a rule (merge_rule.h) and rounded once. The last source gives everything else: layout, step, recipe,
// files kept by an import. The moving average of the weights (kEma) goes with the moments: it is dropped, or the last
// source's, never merged.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/merge_rule.h"
#include "ckpt/store/io_backend.h"
#include "ckpt/tensors/stats.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

enum class Moments {
  kDrop,  // only weights, and no position of a trainer: a model to start from, to evaluate, to export
  kLast,  // the last source's, and its position: training goes on from the merged weights
};

struct MergeOptions {
  MergeRule rule;              // no weights: all the same
  std::filesystem::path base;  // where the rule takes task vectors from one
  Moments moments = Moments::kDrop;
  int64_t memory_bytes = int64_t{256} << 20;
  bool replace_existing = false;
  std::string run_id, run_name;  // of the new run; an empty name is the last source's
  const std::atomic<bool>* cancel = nullptr;
  StreamProgress progress;
  /// A backend for each source, so that all are read ahead; empty: `io` reads, in turns.
  std::function<std::unique_ptr<IoBackend>()> make_io;
};

struct NotFinite {
  std::string tensor;
  std::vector<std::filesystem::path>
      sources;  // that have elements which are not finite where the result has; may be none
};

struct MergeReport {
  std::filesystem::path dir;
  Manifest manifest;  // as written
  int64_t merged_tensors = 0;
  std::vector<NotFinite> not_finite;  // merged tensors with such elements, in the order of the manifest
  double seconds = 0;
};

/// Writes `checkpoints_dir`/step-N, where N is the last source's step. Lineage: parents are the last source's, then the
/// runs of all sources and of the base; Manifest::origin names the rule and each source with its weight.
/// Errors: those of reading and saving, and kInvalidInput: the sources do not have the same weights (each tensor
/// named); those of check_merge_rule(); a base that the rule needs and has not, or has and does not need; kLast and the
/// last source has no moments; memory_bytes is too small for their chunks; a step that exists.
Result<MergeReport> merge_checkpoints(IoBackend& io, std::span<const std::filesystem::path> sources,
                                      const std::filesystem::path& checkpoints_dir, const MergeOptions& options);

}  // namespace cairn::ckpt
