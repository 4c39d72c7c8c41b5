#pragma once
// All of the memory that a process takes of a CUDA device: one allocation, from which buffers get their blocks
// (runtime/device/buffer.h). Its size is the plan's.

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/cuda/nccl_api.h"
#include "runtime/cuda/stream.h"
#include "runtime/device/buffer.h"

namespace cairn::cuda {

/// Serves the device's buffers while it lives; it outlives them. Blocks are taken one behind the other. One that is
/// given back is not taken again before all are, as a trainer's are when it ends.
class Arena final : public DeviceHeap {
 public:
  /// Errors: kNoSpace where the device has not so much, naming the bytes. `nccl`: memory that NCCL can register, of
  /// ncclMemAlloc; it outlives the arena. kUnsupported where that gives memory of another kind.
  static Result<std::unique_ptr<Arena>> reserve(std::shared_ptr<Context> context, int64_t bytes,
                                                const NcclApi* nccl = nullptr);
  ~Arena() override;

  /// What blocks of these sizes take of an arena.
  static int64_t bytes_for(std::span<const int64_t> blocks);
  /// What an arena of so many bytes takes of the device.
  static int64_t reserved_for(int64_t bytes, bool of_nccl);

  int64_t bytes() const { return bytes_; }
  /// That blocks took, the gaps between them included.
  int64_t used() const { return used_; }

  DeviceBytes all() const { return {DevicePtr<std::byte>(memory_), bytes_}; }
  bool holds(const void* at) const { return at >= memory_ && at < memory_ + bytes_; }

  Result<std::byte*> take(int64_t bytes) override;
  void give_back(std::byte* block, int64_t bytes) override;

 private:
  Arena(std::shared_ptr<Context> context, int64_t bytes, const NcclApi* nccl)
      : context_(std::move(context)), bytes_(bytes), nccl_(nccl) {}
  Status allocate();
  /// That NCCL gave virtual memory, and as much as was planned.
  Status check_pieces() const;
  /// The first bytes are zeros when it returns.
  Status clear(int64_t bytes);

  const std::shared_ptr<Context> context_;
  const int64_t bytes_;
  const NcclApi* const nccl_;  // null: memory of cudaMalloc
  std::byte* memory_ = nullptr;
  int64_t used_ = 0, blocks_ = 0;
  int64_t soiled_ = 0;  // bytes that earlier blocks had
};

}  // namespace cairn::cuda
