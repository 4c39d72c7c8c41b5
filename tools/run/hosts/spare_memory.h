#pragma once
// What a spare has ready for the place that it may get: memory for its ranks, touched. That is what taking a place
// costs besides reading the state. Its processes are not: those of the other hosts start anew at the same time.
//
// A thread of its own prepares it, at low priority; nothing runs once it is there.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "ckpt/snapshot/prepared_memory.h"
#include "runtime/config/numbers.h"
#include "tools/run/hosts/host_wire.h"

namespace cairn::tools {

class SpareMemory {
 public:
  /// `say`: from the thread that prepares; what there is no room for.
  explicit SpareMemory(std::function<void(const std::string&)> say) : say_(std::move(say)) {}
  ~SpareMemory() { drop(); }
  SpareMemory(const SpareMemory&) = delete;
  SpareMemory& operator=(const SpareMemory&) = delete;

  /// For the largest place of a segment, `ranks` a host, which compute on `device`. What is there for the same one
  /// stays.
  void prepare(const HostSegment& segment, int64_t ranks, DeviceChoice device);
  /// Waits for what is under way: the rest of it takes less than all of it. Null: there is none.
  std::shared_ptr<ckpt::PreparedMemory> take();
  void drop();

 private:
  Result<ckpt::PreparedMemory> make(const HostSegment& segment, int64_t ranks, DeviceChoice device) const;

  const std::function<void(const std::string&)> say_;
  std::optional<HostSegment> segment_;
  std::thread thread_;
  std::atomic<bool> stop_ = false;
  std::shared_ptr<ckpt::PreparedMemory> made_;  // of the thread, until that is joined
};

}  // namespace cairn::tools
