#pragma once
// The two movements of tensor parallelism over row-major [T, H] buffers. Without sequence parallelism every rank has
// all rows and partial results are all-reduced; with it rank r has rows [r R, (r + 1) R) outside the projections:
// reducing scatters them, and they are gathered before the next column-cut projection. In backward the two change
// places, so one class serves both directions. With tp 1 nothing moves.
//
// Where no layout may show in a sum (StageDims::all_parts > 1) a rank's partial result is the root of a subtree of the
// sum's parts, in float; the tree goes on over the ranks, and its root is rounded.

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "runtime/comm/comm.h"
#include "runtime/comm/side_sums.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/nn/tree_sum.h"
#include "runtime/plan/activations.h"

namespace cairn::nn {

/// Where a product goes that is to be summed over the ranks, and how its own sum is taken.
struct PartialSum {
  DevicePtr<void> data;
  DType dtype = DType::kF32;
  bool tree = false;
  int64_t parts = 1;  // of this rank
};

template <typename Real>
class TensorParallel {
 public:
  /// `sums`: of [T, H] floats, where "scratch.sums" is in the plan.
  TensorParallel(const kernels::Exec<Real>& on, comm::Comm& comm, const StageDims& dims, bool sequence_parallel,
                 DevicePtr<float> sums = nullptr)
      : on_(on),
        comm_(comm),
        sums_(sums),
        tree_(dims.all_parts > 1),
        parts_(dims.parts),
        local_rows_(dims.local_rows),
        rows_(dims.rows),
        all_elems_(dims.rows * dims.width),
        local_elems_(dims.local_rows * dims.width),
        scattered_(sequence_parallel && comm.size() > 1),
        side_(dynamic_cast<comm::SideSums*>(&comm)) {}

  /// The same for rows of another width.
  TensorParallel with_width(int64_t width) const {
    TensorParallel out = *this;
    out.all_elems_ = rows_ * width;
    out.local_elems_ = local_rows_ * width;
    return out;
  }

  comm::Comm& comm() const { return comm_; }
  /// Sums are the same in every layout.
  bool tree() const { return tree_; }
  /// How sums of floats over the ranks are taken.
  comm::ReduceOp sum_op() const { return tree_ ? comm::ReduceOp::kTreeSum : comm::ReduceOp::kSum; }

  /// The first of this rank's rows in the flat token order.
  int64_t first_row() const { return scattered_ ? comm_.rank() * local_rows_ : 0; }

  /// This rank's rows [R, H] of a [T, H] buffer.
  DevicePtr<Real> local(DevicePtr<Real> all_TH) const {
    return scattered_ ? all_TH + comm_.rank() * local_elems_ : all_TH;
  }

  /// Before a column cut: every rank's local() rows of `all_TH` become everyone's.
  Status gather(DevicePtr<Real> all_TH, std::string_view what) const {
    if (!scattered_) return {};
    return comm_.all_gather(local(all_TH), all_TH, local_elems_ * sizeof(Real), what);
  }

  /// The same from rows that lie elsewhere; `all_TH` is touched only with sequence parallelism.
  Status gather_from(DevicePtr<const Real> local_RH, DevicePtr<Real> all_TH, DevicePtr<const Real>* gathered_TH,
                     std::string_view what) const {
    *gathered_TH = scattered_ ? all_TH : local_RH;
    if (!scattered_) return {};
    return comm_.all_gather(local_RH, all_TH, local_elems_ * sizeof(Real), what);
  }

  /// Where the summands of reduce_sum(all_TH) go, from row `row` on.
  PartialSum partial(DevicePtr<Real> all_TH, int64_t row = 0) const {
    const int64_t at = row * (all_elems_ / rows_);
    if (apart()) return {sums_ + at, DType::kF32, true, parts_};
    return {all_TH + at, DTypeOf<Real>::value, tree_, parts_};
  }

  /// After a row cut: sums over the ranks what they have put at partial(all_TH); the result is in `all_TH`'s local()
  /// rows.
  Status reduce_sum(DevicePtr<Real> all_TH, std::string_view what) const {
    if constexpr (DTypeOf<Real>::value != DType::kF32) {
      if (apart()) {
        const DevicePtr<float> mine = sums_ + (scattered_ ? comm_.rank() * local_elems_ : 0);
        RT_TRY(scattered_ ? comm_.reduce_scatter(sums_, mine, local_elems_, DType::kF32, sum_op(), what)
                          : comm_.all_reduce(sums_, all_elems_, DType::kF32, sum_op(), what));
        on_.from_floats(mine, local(all_TH), scattered_ ? local_elems_ : all_elems_);
        return {};
      }
    }
    return reduce(all_TH, what);
  }

  /// reduce_sum() of what product(first row, rows) puts at partial(all_TH, first row), a row from a row. Where the
  /// group can, and chunks of rows are large enough, a chunk is summed while the next one is multiplied.
  template <typename Product>
  Status sum_of_rows(DevicePtr<Real> all_TH, std::string_view what, const Product& product) const {
    const int64_t chunk = chunk_rows(), width = all_elems_ / rows_;
    if (chunk >= rows_) {
      product(0, rows_);
      return reduce_sum(all_TH, what);
    }
    for (int64_t row = 0; row < rows_; row += chunk) {
      const int64_t rows = std::min(chunk, rows_ - row);
      product(row, rows);
      RT_TRY(side_->sum_beside(all_TH + row * width, rows * width, DTypeOf<Real>::value, what));
    }
    return side_->join_sums();
  }

  /// The same for summands that lie in `all_TH`.
  Status reduce(DevicePtr<Real> all_TH, std::string_view what) const {
    if (comm_.size() == 1) return {};
    constexpr DType dtype = DTypeOf<Real>::value;
    if (!scattered_) return comm_.all_reduce(all_TH, all_elems_, dtype, sum_op(), what);
    return comm_.reduce_scatter(all_TH, local(all_TH), local_elems_, dtype, sum_op(), what);
  }

 private:
  static constexpr int64_t kMostChunks = 4;    // each further one makes products smaller, and slower
  static constexpr int64_t kChunkAlign = 128;  // rows, of long chunks: what kernels of products divide them into
  static constexpr int64_t kPackBytes = 16;    // at whose multiples a sum begins

  /// Rows of a chunk; all rows: the sum is taken at once.
  int64_t chunk_rows() const {
    const int64_t least =
        side_ != nullptr && !scattered_ && !tree_ && comm_.size() > 1 ? side_->least_chunk_bytes() : 0;
    if (least == 0) return rows_;
    const int64_t bytes = all_elems_ * static_cast<int64_t>(sizeof(Real));
    const int64_t chunks = std::clamp<int64_t>(bytes / least, 1, kMostChunks);
    int64_t out = (rows_ + chunks - 1) / chunks;
    if (out > kChunkAlign) out = (out + kChunkAlign - 1) / kChunkAlign * kChunkAlign;
    return out * (bytes / rows_) % kPackBytes == 0 ? out : rows_;
  }
  /// Summands are floats of their own.
  bool apart() const { return tree_ && comm_.size() > 1 && DTypeOf<Real>::value != DType::kF32; }

  const kernels::Exec<Real>& on_;
  comm::Comm& comm_;
  DevicePtr<float> sums_;
  bool tree_ = false;
  int64_t parts_ = 1;
  int64_t local_rows_ = 0;
  int64_t rows_ = 0;
  int64_t all_elems_ = 0;
  int64_t local_elems_ = 0;
  bool scattered_ = false;
  comm::SideSums* side_ = nullptr;  // the group, where it can
};

}  // namespace cairn::nn
