#pragma once
// Queries that come from a table of positions instead of the residual stream: those of the top query layer (CodeGeeX,
// arXiv 2303.17568, section 2.2). Row r asks with the table's row of its position, which no norm has gone through.
// Every tp rank has the whole table, so nothing moves before the column cut.

#include <cstdint>

#include "runtime/nn/linear.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

template <typename Real>
class PositionQueries {
 public:
  PositionQueries(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims,
                  const TensorParallel<Real>& tp, const Scratch<Real>& scratch);

  /// The q part of qkv [T, QKV]. scratch.partial is overwritten.
  void forward(DevicePtr<Real> qkv) const;
  /// Adds to the gradients of the projection and the table, from that of q in dqkv [T, QKV]; those of the table are of
  /// this rank's rows. scratch.partial is overwritten.
  Status backward(DevicePtr<const Real> dqkv) const;

 private:
  /// Of the rows from `first` on in the flat token order of the micro-batch at work.
  kernels::RowPositions positions(int64_t first) const;
  /// scratch.partial [T, H]: the table's row of each row's position.
  void look_up() const;

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  Parameter<Real> table_;  // [S, H]
  ColumnGroup<Real> q_;
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
};

}  // namespace cairn::nn
