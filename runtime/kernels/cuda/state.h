#pragma once
// What is done to training state besides update rules, for CUDA: experts' biases and counts
// (state_copies.h), checksums of what was written (runtime/core/word_sums.h), with the CPU's bits.

#include <cstdint>

#include "runtime/core/word_sums.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/cuda/queue.h"

namespace cairn::kernels::cuda {

void balance_bias(Queue& on, float rate, float mean, const Clip* clip, const float* choices, const float* from,
                  float* to, int64_t count);

/// Blocks that a sum over an array is cut into at most, and numbers of 8 bytes that it needs for them.
constexpr int64_t kSumBlocks = 1024;
/// sum [1] = word_sums() of the elements of x, the first of which stands at index `first`, added to what is there
/// unless `first` is 0. Where `clip` is given and not finite, nothing. partials: [kSumBlocks].
void add_word_sums(Queue& on, const float* x, int64_t count, int64_t first, const Clip* clip, uint64_t* partials,
                   uint64_t* sum);
/// sums [count] = word_sums() of each run, in two launches. The table lies on the device, with `chunks` chunks in all,
/// in order. partials: [chunks]. Gives a cudaError_t, for callers that are not linked to kernels.
int sum_runs(CUstream_st* stream, const WordRun* runs, int64_t count, int64_t chunks, uint64_t* partials,
             uint64_t* sums);
/// counts [1] += elements of x that are NaN or infinite. partials: [kSumBlocks].
void count_not_finite(Queue& on, const float* x, int64_t count, int64_t* partials, int64_t* counts);
/// fill_doubles() of runtime/kernels/state_copies.h.
void fill_doubles(Queue& on, double value, double* numbers, int64_t count);
/// note_not_finite() of runtime/kernels/rows.h, by one block.
void note_not_finite(Queue& on, const float* x, int64_t count, bool first, double* found);

}  // namespace cairn::kernels::cuda
