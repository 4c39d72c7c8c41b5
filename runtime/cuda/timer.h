#pragma once
// Moments of a CUDA stream's work (runtime/device/op_clock.h): events that keep the time at which the device comes to
// them. They are used again: none is made once as many exist as lie between two reads.

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "runtime/cuda/context.h"
#include "runtime/cuda/stream.h"
#include "runtime/device/op_clock.h"

namespace cairn::cuda {

/// Errors of the runtime are the stream's, which takes no moment any more once it has failed.
class CudaTimer final : public StreamTimer {
 public:
  CudaTimer(CudaStream& stream, std::shared_ptr<Context> context) : stream_(stream), context_(std::move(context)) {}
  ~CudaTimer() override;

  void mark() override;
  Status read(std::span<double> ms) override;

 private:
  CudaStream& stream_;
  const std::shared_ptr<Context> context_;
  std::vector<EventHandle> marked_;  // not read
  EventHandle last_ = nullptr;       // read last
  std::vector<EventHandle> free_;
};

}  // namespace cairn::cuda
