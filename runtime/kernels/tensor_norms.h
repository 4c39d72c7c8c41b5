#pragma once
// Squares of whole tensors, as rules want them that scale each tensor's step: added up block by block in exact sums
// (runtime/core/exact_sum.h), for the host.

#include <span>

#include "runtime/core/exact_sum.h"
#include "runtime/device/op_dims.h"

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

/// Numbers for the host begin at zero.
void clear_numbers(std::span<double> numbers);

}  // namespace cairn::kernels
