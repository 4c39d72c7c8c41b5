#pragma once
// The weighted mean of the weights of several checkpoints as a checkpoint of its own, streamed. Sums are in double
// precision and rounded once. The last source gives everything else: layout, step, recipe, files kept by an import. The
// moving average of the weights (kEma) goes with the moments: it is dropped, or the last source's, never averaged.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/store/io_backend.h"
#include "ckpt/tensors/stats.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct AverageSource {
  std::filesystem::path dir;
  double weight = 1;
};

enum class Moments {
  kDrop,  // weights alone, and no position of a trainer: a model to start from, to evaluate, to export
  kLast,  // the last source's, and its position: training goes on from the averaged weights
};

struct AverageOptions {
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
  std::vector<size_t> sources;  // that have elements which are not finite where the mean has, ascending
};

struct AverageReport {
  std::filesystem::path dir;
  Manifest manifest;  // as written
  int64_t averaged_tensors = 0;
  std::vector<NotFinite> not_finite;  // averaged tensors with such elements, in the order of the manifest
  double seconds = 0;
};

/// Writes `checkpoints_dir`/step-N, where N is the last source's step. Weights are divided by their sum. Lineage:
/// parents are the last source's, then the runs of all sources; Manifest::origin names each with its share.
/// Errors: those of reading and saving, and kInvalidInput: the sources do not have the same weights (each tensor
/// named); fewer than two are given; a weight is no positive number; kLast and the last source has no moments;
/// memory_bytes is too small for their chunks; the step is there already.
Result<AverageReport> average_checkpoints(IoBackend& io, std::span<const AverageSource> sources,
                                          const std::filesystem::path& checkpoints_dir, const AverageOptions& options);

}  // namespace cairn::ckpt
