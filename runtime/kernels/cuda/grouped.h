#pragma once
// Products of groups of rows whose counts only the device knows (runtime/kernels/group_rows.h): each expert's rows by
// its own matrix, in one launch for all experts. A launch has blocks for as many rows as there may be; those that find
// no rows end at once. Sums are float, over k in order: bits depend neither on how many rows a group has nor on the
// others.
//
// T is bf16 or f16, by tensor cores, which add 16 of k at a time: matrices lie at multiples of 16 bytes, and their rows
// are multiples of 8 elements long. Or it is float (grouped_floats.cu): tensor cores would round the factors.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/group_rows.h"

namespace cairn::kernels::cuda {

/// Groups [begin, end) of groups [end + 1 at least]; `tiles`: of all their rows, at most.
struct Groups {
  const GroupRows* rows = nullptr;
  int64_t begin = 0, end = 0, tiles = 0;
};

/// For each group's rows c [rows, n] = a [rows, k] op(b) [k, n] + bias, or c += . Group `begin + i` has b + i * b_step.
/// Stored [n, k] where `transposed`, else [k, n].
template <typename T>
struct RowProducts {
  Groups groups;
  const T* a = nullptr;
  int64_t lda = 0;
  const T* b = nullptr;
  int64_t b_step = 0, ldb = 0;
  bool transposed = false;
  T* c = nullptr;
  int64_t ldc = 0, n = 0, k = 0;
  bool accumulate = false;
  const T* bias = nullptr;  // [n], of group `begin`; the next one's is bias_step behind it. Null: none
  int64_t bias_step = 0;
};
template <typename T>
void multiply_rows_of_groups(Queue& on, const RowProducts<T>& of);

/// For each group c [m, n] = the sum over its rows of a [rows, m]^T b [rows, n], or c += . Group `begin + i` has
/// c + i * c_step. Without rows it is 0.
template <typename T>
struct SumProducts {
  Groups groups;
  const T* a = nullptr;
  int64_t lda = 0;
  const T* b = nullptr;
  int64_t ldb = 0;
  float* c = nullptr;
  int64_t c_step = 0, ldc = 0, m = 0, n = 0;
  bool accumulate = false;
};
template <typename T>
void multiply_over_rows_of_groups(Queue& on, const SumProducts<T>& of);

}  // namespace cairn::kernels::cuda
