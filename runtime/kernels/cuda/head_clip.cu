#include "runtime/kernels/cuda/head_clip.h"

#include "runtime/kernels/cuda/chunks.h"
#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

/// One block, a thread for each key head in turn.
__global__ void __launch_bounds__(kThreads)
    factors_of_heads(HeadClip of, const float* max_scores, float* query, float* key, float* clipped) {
  RT_SHARED(float, room, kThreads / kWarp);
  float mine = 0;
  for (int64_t kv = threadIdx.x; kv < of.key_heads; kv += kThreads) {
    const int64_t first = kv * of.group;
    double least = 1;
    for (int64_t h = first; h < first + of.group; ++h) {
      const double score = static_cast<double>(max_scores[h]);
      if (score > of.most && of.most / score < least) least = of.most / score;
    }
    const double root = sqrt(least);
    key[kv] = static_cast<float>(root);
    for (int64_t h = first; h < first + of.group; ++h) {
      const double score = static_cast<double>(max_scores[h]), part = of.most / score;
      const bool above = score > of.most;
      mine += above ? 1.0f : 0.0f;
      query[h] = least == 1 ? 1.0f : static_cast<float>((above && part < 1.0 ? part : 1.0) / root);
    }
  }
  mine = warp_sum(mine);
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float all = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) all += room[warp];
  *clipped = all;
}

__global__ void __launch_bounds__(kThreads)
    scaled_chunks(RunTable<ScaledRun> runs, const float* clipped, const Clip* clip) {
  if (*clipped == 0 || clip->finite == 0) return;
  const ScaledRun run = run_of_block(runs);
  const int64_t first = static_cast<int64_t>(blockIdx.x - run.first_chunk) * kChunk;
  const int64_t end = first + kChunk < run.count ? first + kChunk : run.count;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    Pack<float, 1> out;
    out.at[0] = run.master[i] * run.factors[ratio(run.begin + i, run.head_elems)];
    run.master[i] = out.at[0];
    put_weights<1>(run, i, out);
  }
}

}  // namespace

void head_factors(Queue& on, const HeadClip& of, const float* max_scores, float* query, float* key, float* clipped) {
  launch(on, {{1}, {kThreads}}, factors_of_heads, of, max_scores, query, key, clipped);
}

void scale_heads(Queue& on, const RunTable<ScaledRun>& runs, const float* clipped, const Clip* clip) {
  launch(on, one_a_chunk(runs.chunks), scaled_chunks, runs, clipped, clip);
}

}  // namespace cairn::kernels::cuda
