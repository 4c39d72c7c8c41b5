#pragma once
// Engines that fail together: what the hybrid engine needs of the two that it joins.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/comm/comm.h"
#include "runtime/comm/gloo_engine.h"
#include "runtime/comm/group.h"
#include "runtime/core/error.h"
#include "runtime/core/result.h"

namespace cairn::comm {

class LinkedEngine : public Engine {
 public:
  /// Why this engine is dead; nothing while it lives. Cheap; safe from any thread.
  virtual std::optional<Error> dead() = 0;

  /// What the calling thread is in, of the other engine: so that whoever watches this rank (RankView) sees operations
  /// of both. An engine without a place to write it keeps nothing.
  virtual void operation_begins(const Site& /*site*/) {}
  virtual void operation_ends() {}
  /// A world rank that it waits for from now on; -1: for nobody any more.
  virtual void operation_awaits(int64_t /*rank*/) {}

  /// What there is to see of a rank of this host: "rank 1 (pid 7) died; it was last seen in ...".
  struct Seen {
    bool lost = false;     // it has left or died
    bool stopped = false;  // by a signal or a debugger
    std::string text;
  };
  /// Nothing of a rank that the engine cannot see. Safe from any thread.
  virtual std::optional<Seen> look_at(int64_t /*world_rank*/) { return std::nullopt; }
};

/// attach_shm_engine() and make_gloo_engine() by their inner type. `other` dies with the Gloo engine, and it with
/// `other`, which is told the Gloo engine's operations.
Result<std::unique_ptr<LinkedEngine>> attach_linked_shm_engine(int fd, int64_t rank, Options options);
Result<std::unique_ptr<LinkedEngine>> make_linked_gloo_engine(const GlooConfig& config,
                                                              const std::shared_ptr<LinkedEngine>& other);

}  // namespace cairn::comm
