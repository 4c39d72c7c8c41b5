#pragma once
// Which of a rank's two threads drives an operation: its own, or the one that reduces and gathers beside it
// (comm/queue.h). Reports about waits tell the two apart.

namespace cairn::comm {

enum class Lane { kMain, kBeside };
constexpr int kLanes = 2;

/// Of the calling thread; kMain until it says otherwise.
inline Lane& current_lane() {
  thread_local Lane lane = Lane::kMain;
  return lane;
}

}  // namespace cairn::comm
