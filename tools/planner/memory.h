#pragma once
// What the ranks of a plan hold, in bytes: the one count behind `cairn plan`, its search and --machine. Pure.

#include <cstdint>
#include <vector>

#include "runtime/core/traffic.h"
#include "runtime/plan/plan.h"

namespace cairn::tools {

/// What one rank of a pipeline stage holds; all ranks of a stage allocate the same. Bytes; of all batch phases the
/// most, since that is what a rank allocates.
struct StageMemory {
  std::vector<Chunk> chunks;
  int64_t parameters = 0;
  int64_t weight_bytes = 0;           // in the compute dtype; with ZeRO-3 this rank's shards
  int64_t gathered_bytes = 0;         // units that are gathered from shards (ZeRO-3)
  int64_t grad_bytes = 0;             // fp32 sums, and the slots of ZeRO-2
  int64_t optimizer_bytes = 0;        // one slot of masters and moments, unless on a disk, and what no checkpoint holds
  int64_t activation_bytes = 0;       // and other buffers of the layers
  int64_t boundary_bytes = 0;         // sent to and received from the neighbouring stages
  int64_t snapshot_bytes = 0;         // of what this rank saves, once
  int64_t restored_bytes = 0;         // of optimizer state that a load reads for this rank: also what others save
  std::vector<GroupTraffic> traffic;  // what it puts in, a step

  int64_t total() const {
    return weight_bytes + gathered_bytes + grad_bytes + optimizer_bytes + activation_bytes + boundary_bytes;
  }
  int64_t layers() const;
  int64_t in_flight() const;  // micro-batches, of all chunks
  /// Equal except for the activations, which shrink towards the last stage with the micro-batches in flight.
  bool same_weights(const StageMemory& other) const;
  bool same_size(const StageMemory& other) const;
};

/// Of the ranks of one pipeline stage, [0, pp). `with_traffic`: also step_traffic(), which is of `plan`'s own batch.
StageMemory stage_memory(const Plan& plan, int64_t pp, bool with_traffic);

/// Of the fullest rank. Looks at the first, second and last stage where all have as many layers: those between differ
/// in the micro-batches in flight alone, which never grow towards the end.
int64_t largest_rank_bytes(const Plan& plan);

}  // namespace cairn::tools
