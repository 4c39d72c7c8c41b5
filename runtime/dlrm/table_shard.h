#pragma once
// The rows of a shard in this rank's memory: pooled look-ups and the sparse update.
//
// Both take bags of all samples in their order. The update first adds the gradients of equal rows in the order of the
// samples, then applies the rule once a row; so its bits do not depend on threads or on how many ranks sent the bags.
// Sources: optim/rwsadagrad.py of the reference implementation.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/config/dlrm.h"

namespace cairn::dlrm {

/// The rows that a sample reads in one shard, counted from the shard's first.
struct Bag {
  const int32_t* rows = nullptr;
  int32_t count = 0;
};

/// How an update is done: of one step.
struct RowUpdate {
  DlrmRule rule = DlrmRule::kSgd;
  double lr = 0, eps = 0;
};

template <typename T>
class ShardRows {
 public:
  ShardRows(int64_t rows, int64_t width, DlrmRule rule);

  int64_t rows() const { return rows_; }
  int64_t width() const { return width_; }
  std::span<T> weights() { return weights_; }          // [rows, width]
  std::span<T> square_sums() { return square_sums_; }  // [rows] with kRowAdagrad, else empty

  /// to[s] [width] becomes (or, with `adds`, gets added) the sum of the rows of bags[first + s], for each s of `to`.
  void pool(std::span<const Bag> bags, T* to, int64_t stride, bool adds) const;

  /// gradients[s] is the address of the gradient [width] of what pool() gave for bags[s].
  void update(const RowUpdate& how, std::span<const Bag> bags, std::span<const T* const> gradients);

  /// The same from the gradient of each row, [rows, width]. A row whose gradient is zero stays as it is.
  void update_all(const RowUpdate& how, const T* gradients);

  /// sums [rows, width] += the gradients of each row.
  void add_gradients(std::span<const Bag> bags, const T* gradients, int64_t stride, T* sums) const;

 private:
  void apply(const RowUpdate& how, int64_t row, const T* gradient);

  int64_t rows_, width_;
  std::vector<T> weights_, square_sums_;
  std::vector<uint64_t> entries_;  // row << 32 | sample
  std::vector<int64_t> starts_;    // of each distinct row among them
};

}  // namespace cairn::dlrm
