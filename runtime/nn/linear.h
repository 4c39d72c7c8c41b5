#pragma once
// Linear projections with weights [out, in], and groups of them that read the same input.

#include <cstdint>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/nn/parameters.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// y [rows, out] = x [rows, in] W^T (+ bias). Row strides in elements.
template <typename Real>
struct Linear {
  Parameter<Real> weight;
  Parameter<Real> bias;  // may be absent
  int64_t out = 0, in = 0;
  const kernels::Exec<Real>* on = nullptr;

  /// `accumulate`: y += instead.
  void forward(DevicePtr<const Real> x, DevicePtr<Real> y, int64_t y_stride, int64_t rows,
               bool accumulate = false) const;
  /// y = base + x W^T (+ bias), rows one behind the other, rounded once. y may be base.
  void forward_added(DevicePtr<const Real> x, DevicePtr<const Real> base, DevicePtr<Real> y, int64_t rows) const;
  /// pre = x W^T (+ bias) and y = gelu_tanh(pre), rows one behind the other.
  void forward_gelu(DevicePtr<const Real> x, DevicePtr<Real> pre, DevicePtr<Real> y, int64_t rows) const;
  /// x W^T of this rank's part of `in`, [rows, out], as `y` says.
  void forward_partial(DevicePtr<const Real> x, const PartialSum& y, int64_t rows) const;
  /// dx (+)= dy W.
  void backward_input(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<Real> dx, bool accumulate,
                      int64_t rows) const;
  /// dx = dy W gelu_tanh'(pre), rows one behind the other.
  void backward_input_gelu(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<Real> pre, DevicePtr<Real> dx,
                           int64_t rows) const;
  /// dy W of this rank's part of `out`, [rows, in], as `dx` says.
  void backward_input_partial(DevicePtr<const Real> dy, int64_t dy_stride, const PartialSum& dx, int64_t rows) const;
  /// The products of the two above, for Exec::matmul_groups().
  kernels::MatmulArgs forward_product(DevicePtr<const Real> x, DevicePtr<Real> y, int64_t y_stride, int64_t rows) const;
  kernels::MatmulArgs backward_input_product(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<Real> dx,
                                             bool accumulate, int64_t rows) const;
  kernels::MatmulArgs backward_weight_product(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<const Real> x,
                                              int64_t rows, int64_t parts = 1) const;
  /// dW += dy^T x, or = where nothing was written (Parameter::unwritten). In parts (kernels::MatmulArgs::parts) only
  /// the latter.
  void backward_weight(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<const Real> x, int64_t rows,
                       int64_t parts = 1) const;
  /// backward_weight() and the bias' gradient, from rows dy without gaps, in one product where the device has such
  /// (kernels::Ops::fuses_products). `scratch` [out]: for sums that are added to others; null: a kernel of their own
  /// adds them.
  void backward_both(DevicePtr<const Real> dy, DevicePtr<const Real> x, int64_t rows, DevicePtr<float> scratch) const;
  /// sum [out, in] = dy^T x.
  void weight_sum(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<const Real> x, int64_t rows, int64_t parts,
                  DevicePtr<float> sum) const;
};

/// Column-cut projections of one input whose outputs lie side by side in one row, or in a part of it: q, k, v and gate,
/// up. Neighbours whose parameters touch in memory become one product.
template <typename Real>
class ColumnGroup {
 public:
  explicit ColumnGroup(const std::vector<Linear<Real>>& parts);
  /// The outputs begin at column `first` of rows y, dy that are `stride` long.
  ColumnGroup(const std::vector<Linear<Real>>& parts, int64_t first, int64_t stride);

  void forward(DevicePtr<const Real> x, DevicePtr<Real> y, int64_t rows) const;
  /// From a row y, dy to the next.
  int64_t stride() const { return stride_; }
  /// Whether one product makes all of a row.
  bool is_one() const { return parts_.size() == 1 && parts_.front().out == stride_; }
  /// Linear's, where is_one().
  void forward_gelu(DevicePtr<const Real> x, DevicePtr<Real> pre, DevicePtr<Real> y, int64_t rows) const;
  /// dx is overwritten, or added to.
  void backward_input(DevicePtr<const Real> dy, DevicePtr<Real> dx, int64_t rows, bool accumulate = false) const;
  void backward_input_partial(DevicePtr<const Real> dy, const PartialSum& dx, int64_t rows) const;

  /// The products of forward(), backward_input() and, without biases, backward_weight() join the others.
  void forward_products(DevicePtr<const Real> x, DevicePtr<Real> y, int64_t rows,
                        std::vector<kernels::MatmulArgs>* out) const;
  void backward_input_products(DevicePtr<const Real> dy, DevicePtr<Real> dx, int64_t rows, bool accumulate,
                               std::vector<kernels::MatmulArgs>* out) const;
  void backward_weight_products(DevicePtr<const Real> dy, DevicePtr<const Real> x, int64_t rows, int64_t parts,
                                std::vector<kernels::MatmulArgs>* out) const;

  /// Of backward_weight() the gradients of biases alone.
  void backward_bias(DevicePtr<const Real> dy, DevicePtr<float> dbias_scratch, int64_t rows,
                     const TreeParts& parts = {}) const;
  /// Gradients of biases, at their columns of a row dy.
  struct BiasGradient {
    int64_t first = 0, count = 0;
    DevicePtr<float> grad;
  };
  std::vector<BiasGradient> bias_gradients() const;
  /// Gradients are added to, or as Linear does. dbias_scratch [stride] float; may be null without biases. Sums over
  /// rows are trees of `parts`, where it has memory.
  void backward_weight(DevicePtr<const Real> dy, DevicePtr<const Real> x, DevicePtr<float> dbias_scratch, int64_t rows,
                       const TreeParts& parts = {}) const;

 private:
  const kernels::Exec<Real>& on() const { return *parts_.front().on; }
  /// Calls body(part, its first column).
  template <typename Body>
  void for_parts(const Body& body) const;

  std::vector<Linear<Real>> parts_;
  std::vector<kernels::MatmulStretch> weights_;  // as they were given: a sum must not show what touches
  std::vector<uint8_t*> merged_;                 // Parameter::unwritten of weights that a part before them took in
  int64_t first_ = 0, stride_ = 0;
};

}  // namespace cairn::nn
