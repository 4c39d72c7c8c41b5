#pragma once
// Statistics of tensors, streamed.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ckpt/persist/read.h"
#include "ckpt/tensors/box_stream.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct TensorStats {
  int64_t elements = 0, nans = 0, infs = 0, zeros = 0;
  // Over the finite elements; 0 when there are none. `std` of the population.
  long double min = 0, max = 0;  // exact of every dtype
  double mean = 0, std = 0;
  int64_t finite() const { return elements - nans - infs; }
};

/// Takes elements in any number of pieces. Means and variances of the pieces are joined (Chan, Golub, LeVeque 1979), so
/// that large tensors lose no digits.
class StatsSum {
 public:
  void add(std::span<const double> values) { add_piece(values); }
  void add(std::span<const long double> values) { add_piece(values); }  // of a dtype that outgrows_double
  TensorStats result() const;

 private:
  template <typename Value>
  void add_piece(std::span<const Value> values);

  TensorStats sum_;                     // but for mean and std
  long double mean_ = 0, squares_ = 0;  // of deviations from the mean
};

using StreamProgress = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

/// Of `tensors` (indices into the reader's manifest), in their order. Every chunk is verified on the way.
Result<std::vector<TensorStats>> tensor_stats(CheckpointReader& reader, std::span<const int64_t> tensors,
                                              const StreamOptions& options, const StreamProgress& progress = {});

}  // namespace cairn::ckpt
