#pragma once
// QK clip for CUDA: runtime/kernels/head_clip.h.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/run_tables.h"
#include "runtime/kernels/head_clip.h"

namespace cairn::kernels::cuda {

void head_factors(Queue& on, const HeadClip& of, const float* max_scores, float* query, float* key, float* clipped);

/// HeadRun, for a table on the device.
struct ScaledRun {
  float* master = nullptr;
  const float* factors = nullptr;
  void* weights = nullptr;
  int64_t begin = 0, count = 0, head_elems = 1;
  uint32_t first_chunk = 0;
  DType dtype = DType::kF32;
};
void scale_heads(Queue& on, const RunTable<ScaledRun>& runs, const float* clipped, const Clip* clip);

}  // namespace cairn::kernels::cuda
