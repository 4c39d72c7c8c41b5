#pragma once
// Which of a rank's two threads drives an operation: its own, or its lane's (runtime/comm/lane.h). Reports about waits
// tell the two apart.

namespace cairn::comm {

enum class RankThread { kMain, kLane };
constexpr int kRankThreads = 2;

/// Of the calling thread; kMain until it says otherwise.
inline RankThread& current_rank_thread() {
  thread_local RankThread thread = RankThread::kMain;
  return thread;
}

}  // namespace cairn::comm
