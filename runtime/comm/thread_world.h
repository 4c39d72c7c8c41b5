#pragma once
// Ranks as threads of one process, for tests: the shared-memory engine over anonymous memory.

#include <cstdint>
#include <memory>

#include "runtime/comm/comm.h"
#include "runtime/comm/shm_world.h"

namespace cairn::comm {

class ThreadWorld {
 public:
  explicit ThreadWorld(int64_t size, Options options = {});
  /// With sizes of its own; `config.world_size` counts the ranks.
  explicit ThreadWorld(const ShmWorldConfig& config, Options options = {});

  /// The engine of one rank; once per rank. It may outlive the world object. Destroying it tells the others that this
  /// rank is gone: who waits for it, then or later, gets kPeerLost.
  std::unique_ptr<Engine> engine(int64_t rank);

 private:
  std::shared_ptr<Segment> segment_;
  Options options_;
};

}  // namespace cairn::comm
