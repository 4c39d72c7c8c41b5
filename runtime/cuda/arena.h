#pragma once
// All of the memory that a process takes of a CUDA device: one allocation, from which buffers get their blocks
// (runtime/device/buffer.h). Its size is the plan's.

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/cuda/stream.h"
#include "runtime/device/buffer.h"

namespace cairn::cuda {

/// Serves the device's buffers while it lives; it outlives them. Blocks are taken one behind the other. One that is
/// given back is not taken again before all are, as a trainer's are when it ends.
class Arena final : public DeviceHeap {
 public:
  /// Errors: kNoSpace where the device has not so much, naming the bytes.
  static Result<std::unique_ptr<Arena>> reserve(std::shared_ptr<Context> context, int64_t bytes);
  ~Arena() override;

  /// What blocks of these sizes take of an arena.
  static int64_t bytes_for(std::span<const int64_t> blocks);

  int64_t bytes() const { return bytes_; }
  /// That blocks took, the gaps between them included.
  int64_t used() const { return used_; }

  bool holds(const void* at) const { return at >= memory_ && at < memory_ + bytes_; }

  Result<std::byte*> take(int64_t bytes) override;
  void give_back(std::byte* block, int64_t bytes) override;

 private:
  Arena(std::shared_ptr<Context> context, int64_t bytes) : context_(std::move(context)), bytes_(bytes) {}
  /// The first bytes are zeros when it returns.
  Status clear(int64_t bytes);

  const std::shared_ptr<Context> context_;
  const int64_t bytes_;
  std::byte* memory_ = nullptr;
  int64_t used_ = 0, blocks_ = 0;
  int64_t soiled_ = 0;  // bytes that earlier blocks had
};

}  // namespace cairn::cuda
