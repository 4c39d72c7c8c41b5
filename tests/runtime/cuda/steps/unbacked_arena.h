#pragma once
// Snapshot memory of a run of any size that takes none: the arena's own code (ckpt/snapshot/arena.h) makes it, but no
// page of it is reserved or touched, and its slots are pages of zeros. A program that is linked to this has functions
// of its own in place of the system's that reserve pages.

#include <memory>

#include "ckpt/snapshot/arena.h"
#include "runtime/plan/plan.h"

namespace cairn::testing {

class UnbackedArena {
 public:
  /// Decides that the run begins anew, as its agent does. `plan` outlives it.
  explicit UnbackedArena(const Plan& plan);
  ~UnbackedArena();
  UnbackedArena(const UnbackedArena&) = delete;
  UnbackedArena& operator=(const UnbackedArena&) = delete;

  ckpt::Arena& arena() { return *arena_; }

 private:
  std::unique_ptr<ckpt::Arena> arena_;
};

}  // namespace cairn::testing
