#include "runtime/cuda/cuda_link.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>
#include <string>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/core/log.h"

namespace cairn {
namespace {

constexpr int64_t kDepth = 8;  // pieces on their way: a copy engine is never idle while the host sums one up

Status checked(cudaError_t error, const char* what, ErrorCode code = ErrorCode::kInternal) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // told here: the trainer's next look at its thread's last error is for its own
  return Error{error == cudaErrorMemoryAllocation ? ErrorCode::kNoSpace : code,
               fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error))};
}

class CudaLink final : public DeviceLink {
 public:
  CudaLink(int device, cudaStream_t work) : device_(device), work_(work) {}
  ~CudaLink() override {
    cudaSetDevice(device_);
    if (copies_ != nullptr) {
      cudaStreamSynchronize(copies_);
      cudaStreamDestroy(copies_);
    }
    for (const cudaEvent_t event : events_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    for (void* const host : pinned_) cudaHostUnregister(host);
    cudaGetLastError();
  }

  Status open() {
    RT_TRY(checked(cudaSetDevice(device_), "cudaSetDevice", ErrorCode::kUnavailable));
    // Non-blocking: what training puts into the default stream does not wait for copies. Priorities mean nothing to
    // copies; those of training come in between because only a few pieces are on their way.
    RT_TRY(checked(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "cudaStreamCreate"));
    for (cudaEvent_t& event : events_) {
      // Who waits for a piece sleeps: its core belongs to training.
      RT_TRY(
          checked(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate"));
    }
    return {};
  }

  Status use_host(std::span<std::byte> host) override {
    RT_TRY(select());
    if (host.empty()) return {};
    // Memory of another process is pinned in this one's page table: the arena needs to know nothing of it.
    const Status pinned =
        checked(cudaHostRegister(host.data(), host.size(), cudaHostRegisterPortable), "cudaHostRegister");
    if (pinned.ok()) {
      pinned_.push_back(host.data());
    } else {  // the runtime copies through memory of its own then, and returns when a piece is there
      spdlog::warn("{} MiB of snapshot memory cannot be pinned, copies to it are slow: {}", host.size() >> 20,
                   pinned.error().message);
    }
    return {};
  }

  Status follow_work() override {
    RT_TRY(select());
    RT_TRY(checked(cudaEventRecord(events_[kDepth], work_), "cudaEventRecord"));
    return checked(cudaStreamWaitEvent(copies_, events_[kDepth], 0), "cudaStreamWaitEvent");
  }

  bool at_once() const override { return false; }
  int64_t depth() const override { return kDepth; }

  Result<std::optional<uint64_t>> fetch(std::span<const std::byte> device, std::byte* host) override {
    RT_CHECK(begun_ - arrived_ < kDepth, "{} pieces on their way", begun_ - arrived_);
    RT_TRY(select());
    RT_TRY(checked(cudaMemcpyAsync(host, device.data(), device.size(), cudaMemcpyDeviceToHost, copies_),
                   "cudaMemcpyAsync to the host"));
    RT_TRY(checked(cudaEventRecord(events_[static_cast<size_t>(begun_ % kDepth)], copies_), "cudaEventRecord"));
    ++begun_;
    return std::optional<uint64_t>();
  }

  Status arrive() override {
    RT_CHECK(arrived_ < begun_, "no piece is on its way");
    return checked(cudaEventSynchronize(events_[static_cast<size_t>(arrived_++ % kDepth)]), "copying to the host");
  }

  Result<bool> has_arrived() override {
    RT_CHECK(arrived_ < begun_, "no piece is on its way");
    const cudaError_t state = cudaEventQuery(events_[static_cast<size_t>(arrived_ % kDepth)]);
    if (state == cudaErrorNotReady) return false;
    RT_TRY(checked(state, "copying to the host"));
    return true;
  }

  Status store(std::span<const std::byte> host, std::byte* device) override {
    RT_TRY(select());
    return checked(cudaMemcpyAsync(device, host.data(), host.size(), cudaMemcpyHostToDevice, copies_),
                   "cudaMemcpyAsync to the device");
  }

  Status settle() override { return checked(cudaStreamSynchronize(copies_), "copying to the device"); }

 private:
  /// The current device is each thread's own.
  Status select() const { return checked(cudaSetDevice(device_), "cudaSetDevice"); }

  int device_;
  cudaStream_t work_, copies_ = nullptr;
  std::array<cudaEvent_t, kDepth + 1> events_{};  // of the pieces on their way, and of the work before them
  int64_t begun_ = 0, arrived_ = 0;
  std::vector<void*> pinned_;
};

}  // namespace

int cuda_devices() {
  int count = 0;
  return checked(cudaGetDeviceCount(&count), "looking for devices").ok() ? count : 0;
}

Result<std::unique_ptr<DeviceLink>> make_cuda_link(int device, void* work) {
  int count = 0;
  const std::string name = device_name({DeviceKind::kCuda, device});
  RT_TRY(checked(cudaGetDeviceCount(&count), "looking for devices", ErrorCode::kUnavailable).with(name));
  if (device < 0 || device >= count) {
    return Error{ErrorCode::kUnavailable, fmt::format("{}: this machine has {} CUDA device(s)", name, count)};
  }
  auto link = std::make_unique<CudaLink>(device, static_cast<cudaStream_t>(work));
  RT_TRY(link->open());
  return std::unique_ptr<DeviceLink>(std::move(link));
}

}  // namespace cairn
