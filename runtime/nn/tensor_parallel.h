#pragma once
// The two movements of tensor parallelism over row-major [T, H] buffers. Without sequence parallelism every rank has
// all rows and partial results are all-reduced; with it rank r has rows [r R, (r + 1) R) outside the projections:
// reducing scatters them, and they are gathered before the next column-cut projection. In backward the two change
// places, so one class serves both directions. With tp 1 nothing moves.

#include <cstdint>
#include <string_view>

#include "runtime/comm/comm.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/plan/activations.h"

namespace cairn::nn {

template <typename Real>
class TensorParallel {
 public:
  TensorParallel(comm::Comm& comm, const StageDims& dims, bool sequence_parallel)
      : comm_(comm),
        local_rows_(dims.local_rows),
        rows_(dims.rows),
        all_elems_(dims.rows * dims.width),
        local_elems_(dims.local_rows * dims.width),
        scattered_(sequence_parallel && comm.size() > 1) {}

  /// The same for rows of another width.
  TensorParallel with_width(int64_t width) const {
    TensorParallel out = *this;
    out.all_elems_ = rows_ * width;
    out.local_elems_ = local_rows_ * width;
    return out;
  }

  comm::Comm& comm() const { return comm_; }

  /// The first of this rank's rows in the flat token order.
  int64_t first_row() const { return scattered_ ? comm_.rank() * local_rows_ : 0; }

  /// This rank's rows [R, H] of a [T, H] buffer.
  Real* local(Real* all_TH) const { return scattered_ ? all_TH + comm_.rank() * local_elems_ : all_TH; }

  /// Before a column cut: every rank's local() rows of `all_TH` become everyone's.
  Status gather(Real* all_TH, std::string_view what) const {
    if (!scattered_) return {};
    return comm_.all_gather(local(all_TH), all_TH, local_elems_ * sizeof(Real), what);
  }

  /// The same from rows that lie elsewhere; `all_TH` is touched only with sequence parallelism.
  Status gather_from(const Real* local_RH, Real* all_TH, const Real** gathered_TH, std::string_view what) const {
    *gathered_TH = scattered_ ? all_TH : local_RH;
    if (!scattered_) return {};
    return comm_.all_gather(local_RH, all_TH, local_elems_ * sizeof(Real), what);
  }

  /// After a row cut: sums `all_TH` over the ranks; the result is in its local() rows.
  Status reduce(Real* all_TH, std::string_view what) const {
    if (comm_.size() == 1) return {};
    constexpr DType dtype = DTypeOf<Real>::value;
    if (!scattered_) return comm_.all_reduce(all_TH, all_elems_, dtype, comm::ReduceOp::kSum, what);
    return comm_.reduce_scatter(all_TH, local(all_TH), local_elems_, dtype, comm::ReduceOp::kSum, what);
  }

 private:
  comm::Comm& comm_;
  int64_t local_rows_ = 0;
  int64_t rows_ = 0;
  int64_t all_elems_ = 0;
  int64_t local_elems_ = 0;
  bool scattered_ = false;
};

}  // namespace cairn::nn
