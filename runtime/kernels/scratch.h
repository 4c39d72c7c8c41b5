#pragma once
// Memory that kernels need for themselves while they run: a stack of floats for each thread, whose size the plan knows.
// A kernel says at its declaration how much it takes at most (ScratchElems); a trainer reserves that for the kernels of
// its model (nn/kernel_scratch.h), so that nothing is allocated in a step.

#include <algorithm>
#include <cstdint>

namespace cairn::kernels {

/// What a kernel takes, in floats.
struct ScratchElems {
  int64_t own = 0;   // of the calling thread, while its tasks run
  int64_t task = 0;  // of each thread of the team, for a task

  /// Enough for either: one kernel runs at a time.
  ScratchElems& raise(const ScratchElems& other) {
    own = std::max(own, other.own);
    task = std::max(task, other.task);
    return *this;
  }
};

/// What a thread's stack and those of its team's helpers take, in bytes.
struct ScratchBytes {
  int64_t caller = 0, helper = 0;

  static ScratchBytes of(const ScratchElems& elems);
  /// Of a team of so many threads.
  int64_t of_team(int64_t threads) const { return caller + (threads - 1) * helper; }
};

/// `elems` floats with any content on the calling thread's stack, aligned to 64 bytes, until it is destroyed: in the
/// reverse order of making. The first one of a kernel on a thread says how much more the kernel will take there
/// (`beyond`), and grows a stack that is too small for all of it.
class Scratch {
 public:
  explicit Scratch(int64_t elems, int64_t beyond = 0);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* floats() const { return memory_; }

 private:
  float* memory_;
  int64_t elems_;
};

/// So much for the calling thread and for each helper that its team will have: before the thread's first kernel. Pages
/// are taken when they are used.
void reserve_scratch(const ScratchBytes& bytes);

/// What the stacks of the calling thread and of its team's helpers take.
int64_t scratch_bytes();

/// For the team: a helper of the thread whose stacks these are begins.
class TeamScratch;
TeamScratch& scratch_of_this_team();
void join_scratch(TeamScratch& team);

}  // namespace cairn::kernels
