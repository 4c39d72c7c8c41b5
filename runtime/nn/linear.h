#pragma once
// Linear projections with weights [out, in], and groups of them that read the same input.

#include <cstdint>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/nn/parameters.h"

namespace cairn::nn {

/// y [rows, out] = x [rows, in] W^T (+ bias). Row strides in elements.
template <typename Real>
struct Linear {
  Parameter<Real> weight;
  Parameter<Real> bias;  // may be absent
  int64_t out = 0, in = 0;

  /// `accumulate`: y += instead.
  Status forward(const Real* x, Real* y, int64_t y_stride, int64_t rows, bool accumulate = false) const;
  /// dx (+)= dy W.
  Status backward_input(const Real* dy, int64_t dy_stride, Real* dx, bool accumulate, int64_t rows) const;
  /// dW += dy^T x, or = where nothing was written (Parameter::unwritten).
  Status backward_weight(const Real* dy, int64_t dy_stride, const Real* x, int64_t rows) const;
};

/// Column-cut projections of one input whose outputs lie side by side in one row, or in a part of it: q, k, v and gate,
/// up. Neighbours whose parameters touch in memory become one product.
template <typename Real>
class ColumnGroup {
 public:
  explicit ColumnGroup(const std::vector<Linear<Real>>& parts);
  /// The outputs begin at column `first` of rows y, dy that are `stride` long.
  ColumnGroup(const std::vector<Linear<Real>>& parts, int64_t first, int64_t stride);

  Status forward(const Real* x, Real* y, int64_t rows) const;
  /// dx is overwritten, or added to.
  Status backward_input(const Real* dy, Real* dx, int64_t rows, bool accumulate = false) const;
  /// Gradients are added to, or as Linear does. dbias_scratch [stride] float; may be null without biases.
  Status backward_weight(const Real* dy, const Real* x, float* dbias_scratch, int64_t rows) const;

 private:
  std::vector<Linear<Real>> parts_;
  std::vector<uint8_t*> merged_;  // Parameter::unwritten of weights that a part before them took in
  int64_t first_ = 0, stride_ = 0;
};

}  // namespace cairn::nn
