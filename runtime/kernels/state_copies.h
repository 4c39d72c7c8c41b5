#pragma once
// What is done to training state besides update rules: copies, first weights, the weights that forward and backward
// read, checksums, squares of gradients, counts. By all threads, since one alone does not fill the memory's bandwidth.

#include <cstdint>
#include <span>

#include "runtime/core/dtype.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/state_arrays.h"
#include "runtime/kernels/views.h"

namespace cairn::kernels {

/// The arrays do not overlap.
void copy_state(const float* from, float* to, int64_t count);
/// The same with the sums of `to`; `to` may be `from`, which is summed alone.
void copy_summed(const float* from, float* to, int64_t count, const BlockSums& sums);

/// weights [count], of type `dtype`, become the masters, rounded. dtype: kF32, kBf16, kF16.
void put_weights(const float* master, int64_t count, DType dtype, void* weights);
/// The same into memory that is shared and that this process may not have touched.
void put_first_weights(const float* master, int64_t count, DType dtype, void* weights);

/// A box of a tensor before any training, [rows, width] one row after another: element (r, c) is number
/// first + r * stride + c of the tensor, and of normal numbers the one of that number (runtime/core/random.h).
struct FirstWeights {
  enum class Kind { kZeros, kOnes, kNormal } kind = Kind::kZeros;
  uint64_t key = 0;
  float std = 0;
  int64_t rows = 0, width = 0, first = 0, stride = 0;
};
inline void add_dims(OpDims& to, const FirstWeights& of) {
  to.add(of.rows);
  to.add(of.width);
}
void draw_weights(const FirstWeights& box, float* out);

/// A step of `rate` for each expert's bias towards as many choices as `mean`: up where there are fewer. Where `clip` is
/// given and not finite, nothing.
void balance_bias(float rate, float mean, const Clip* clip, const float* choices, const float* from, float* to,
                  int64_t count);

/// words [ExactSum::kWords] = the squares of `run_count` runs of x, as an ExactSum's. A run begins at a multiple of 16
/// elements: inside it blocks of so many are added in double first, so cuts at such multiples change no bit.
void add_squares_of_runs(const float* x, const ElemRun* runs, int64_t run_count, double* words);

/// Each of them becomes `value`.
void fill_doubles(double value, double* numbers, int64_t count);

/// Numbers that the device has made, for the host.
void doubles_to_host(const double* from, std::span<double> host);

/// counts[0] += elements of x that are NaN or infinite.
void count_not_finite(const float* x, int64_t count, std::span<int64_t> counts);

}  // namespace cairn::kernels
