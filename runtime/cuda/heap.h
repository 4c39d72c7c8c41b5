#pragma once
// Memory of a device where each block is an allocation of its own: for work whose arrays are not known from the start.
// A trainer has an arena (runtime/cuda/arena.h) instead, so that it asks for memory once.

#include <memory>

#include "runtime/cuda/context.h"
#include "runtime/device/buffer.h"

namespace cairn::cuda {

/// Blocks are zeros at first. It outlives its blocks.
class Heap final : public DeviceHeap {
 public:
  explicit Heap(std::shared_ptr<Context> context);
  ~Heap() override;

  Result<std::byte*> take(int64_t bytes) override;
  /// Waits for the device, which may still use the block.
  void give_back(std::byte* block, int64_t bytes) override;

 private:
  const std::shared_ptr<Context> context_;
};

}  // namespace cairn::cuda
