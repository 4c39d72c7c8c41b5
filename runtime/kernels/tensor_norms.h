#pragma once
// Squares of whole tensors, as rules want them that scale each tensor's step: added up block by block in exact sums
// (runtime/core/exact_sum.h).

#include <span>

#include "runtime/core/exact_sum.h"
#include "runtime/device/op_dims.h"
#include "runtime/kernels/state_arrays.h"

namespace cairn::kernels {

/// Words of an ExactSum of a tensor's weights, then of one of its step's elements. Empty: no norms are wanted.
struct TensorNorms {
  static constexpr int64_t kWords = 2 * ExactSum::kWords;

  std::span<double> words = {};
  bool wanted() const { return !words.empty(); }
  ExactSum weight() const { return ExactSum::from(words.first<ExactSum::kWords>()); }
  ExactSum step() const { return ExactSum::from(words.last<ExactSum::kWords>()); }

  /// For kernels.
  void add(ExactSum more_weight, ExactSum more_step) const;
};
inline void add_dims(OpDims& /*to*/, const TensorNorms& /*of*/) {}

/// Chunks of a run: its norms are added up in parts, each of a chunk.
constexpr int64_t norm_chunks(int64_t count) { return (count + kStateChunk - 1) / kStateChunk; }

/// A run whose parts lie behind those of the run before.
struct NormRun {
  int64_t count = 0, tensor = 0;
};
inline void add_dims(OpDims& to, std::span<const NormRun> of) { to.add(std::ssize(of)); }
/// words [tensors, TensorNorms::kWords]: to those of its tensor each run adds its parts of `partials` [chunks of all
/// runs, TensorNorms::kWords]. Runs of one tensor follow one another.
void add_norms_of_runs(std::span<const NormRun> runs, const double* partials, double* words);

}  // namespace cairn::kernels
