#pragma once
// The kernel that adds up the words of whole tensors (update.h). For .cu files.

#include "runtime/kernels/cuda/exact.h"
#include "runtime/kernels/cuda/update.h"

namespace cairn::kernels::cuda {

constexpr int kWordAdders = 32, kWordThreads = kWordAdders * 16;  // threads that share a word's chunks; of a block

/// A block for each run, of which the first of a tensor's adds the chunks of all of them. A sum over chunks is below
/// 2^52 until it is carried: a tensor has fewer than 2^28 blocks of terms. One thread calls behind(tensor, its words).
template <typename Behind>
__global__ void __launch_bounds__(kWordThreads)
    words_of_tensors(const double* partials, UpdateTables tables, double* words, Behind behind) {
  RT_SHARED(double, room, 2 * kWordAdders * kExactWords);
  const int32_t tensor = tables.runs[blockIdx.x].tensor;
  if (blockIdx.x > 0 && tables.runs[blockIdx.x - 1].tensor == tensor) return;
  int64_t next = static_cast<int64_t>(blockIdx.x) + 1;  // run of another tensor
  while (next < tables.run_count && tables.runs[next].tensor == tensor) ++next;
  const int64_t first = tables.runs[blockIdx.x].first_chunk;
  const int64_t end = next < tables.run_count ? tables.runs[next].first_chunk : tables.chunks;
  const int word = static_cast<int>(threadIdx.x) % 16, adder = static_cast<int>(threadIdx.x) / 16;
  if (word < kExactWords) {
    double weight = 0, step = 0;
#pragma unroll 4
    for (int64_t chunk = first + adder; chunk < end; chunk += kWordAdders) {
      weight += partials[chunk * 2 * kExactWords + word];
      step += partials[(chunk * 2 + 1) * kExactWords + word];
    }
    room[adder * kExactWords + word] = weight;
    room[(kWordAdders + adder) * kExactWords + word] = step;
  }
  __syncthreads();
  const int sum = adder;
  double* const to = words + (static_cast<int64_t>(tensor) * 2 + sum) * kExactWords;
  if (sum < 2 && word < kExactWords) {
    double* const mine = room + sum * kWordAdders * kExactWords + word;
    double all = to[word];
    for (int a = 0; a < kWordAdders; ++a) all += mine[a * kExactWords];
    mine[0] = all;
  }
  __syncthreads();
  if (sum < 2 && word == 0) {
    const ExactDigits of = carried(room + sum * kWordAdders * kExactWords);
#pragma unroll
    for (int k = 0; k < kExactDigits; ++k) to[k] = static_cast<double>(of.digit[k]);
    to[kExactDigits] = of.special;
  }
  __syncthreads();
  if (threadIdx.x == 0) behind(tensor, words + static_cast<int64_t>(tensor) * 2 * kExactWords);
}

template <typename Behind>
void add_words(Queue& on, const double* partials, const UpdateTables& tables, double* words, const Behind& behind) {
  launch(on, {{static_cast<unsigned>(tables.run_count)}, {kWordThreads}}, words_of_tensors<Behind>, partials, tables,
         words, behind);
}

}  // namespace cairn::kernels::cuda
