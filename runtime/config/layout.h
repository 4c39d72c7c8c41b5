#pragma once
// The recipe's `mesh`, `schedule` and `recompute`. runtime/config/recipe.h says how it is filled.

#include <cstdint>
#include <vector>

namespace cairn {

enum class MeshAxis { kTp, kDp, kPp, kCp };
enum class PipelineKind { kGpipe, k1F1B, kInterleaved, kZbH1, kZbV };
enum class RecomputeMode { kNone, kSelective, kFull };

struct MeshConfig {
  int64_t tp = 1, pp = 1;
  int64_t dp = 0;                                                               // 0: what remains of the world
  std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};  // fastest-varying first
  int64_t ep = 1;     // data-parallel ranks that divide the experts among them
  int64_t cp = 1;     // ranks that divide the tokens of each sequence
  int64_t shard = 0;  // replicas that ZeRO splits over, neighbours in dp; 0: all
  bool sequence_parallel = false;
  int64_t virtual_stages = 1;                    // stages of a rank, with the interleaved and zb-v schedules
  std::vector<int64_t> stages;                   // layers of each pipeline stage, pp * virtual_stages; empty: balanced
  double embedding_weight = 0, head_weight = 0;  // of the first and last stage, in layers, when they are balanced
  int64_t micro_batch_group = 0;                 // of the interleaved schedule; 0: pp
};

/// Activations that backward computes again instead of keeping them.
struct RecomputeConfig {
  RecomputeMode mode = RecomputeMode::kNone;  // selective: the attention core; full: whole layers
  int64_t layers = 0;                         // the first ones of each stage; 0: all
  bool distribute = false;                    // full: the inputs kept are split over tp
};

}  // namespace cairn
