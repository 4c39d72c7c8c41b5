#pragma once
// Communication of arrays in a device's memory by an engine of the host's memory (runtime/comm): device -> pinned
// memory -> shared memory or Gloo -> pinned memory -> device. It is how several ranks share one device, and how ranks
// communicate where there is no NCCL.
//
// An operation is ordered on the stream that the calling thread orders on (runtime/comm/ordered_on.h), and has been
// done when that is settled; nothing waits before. Its errors are those of that settle, or of a later operation.
// Results are the inner engine's, bit for bit. What lies in the host's memory is communicated before the call returns,
// behind what was ordered before.

#include <functional>
#include <memory>

#include "runtime/comm/comm.h"
#include "runtime/cuda/stream.h"
#include "runtime/device/staging_rooms.h"

namespace cairn::cuda {

class StagedEngine : public comm::Engine {
 public:
  /// Bytes that are pinned for what is under way: rooms.total_bytes(), and what an operation has taken beyond. Threads:
  /// any.
  virtual int64_t pinned_bytes() const = 0;
};

/// `inner`, `rank` (the rank's stream) and what `on_device` asks are borrowed and outlive the engine, which outlives
/// its groups. `rooms` are pinned at once. An operation that finds too little room in them pins more, which a plan does
/// not let happen (runtime/trainer/staging_rooms.h). `least_chunk_bytes`: comm::SideSums. Errors: what the device
/// cannot do.
Result<std::unique_ptr<StagedEngine>> make_staged_engine(comm::Engine& inner, CudaStream& rank,
                                                         std::function<bool(const void*)> on_device,
                                                         const StagingRooms& rooms, int64_t least_chunk_bytes = 0);

}  // namespace cairn::cuda
