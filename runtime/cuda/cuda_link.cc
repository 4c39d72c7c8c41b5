#include "runtime/cuda/cuda_link.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/core/log.h"

namespace cairn {
namespace {

constexpr int64_t kDepth = 8;  // pieces on their way: a copy engine is never idle while the host sums one up

class CudaLink final : public DeviceLink {
 public:
  CudaLink(const cuda::Api& api, int device, cuda::StreamHandle work) : api_(api), device_(device), work_(work) {}
  ~CudaLink() override {
    api_.set_device(device_);
    if (copies_ != nullptr) {
      api_.synchronize_stream(copies_);
      api_.destroy_stream(copies_);
    }
    for (const cuda::EventHandle event : events_) {
      if (event != nullptr) api_.destroy_event(event);
    }
    for (void* const host : pinned_) api_.unpin(host);
    api_.last_error();
  }

  Status open() {
    RT_TRY(checked(api_.set_device(device_), "cudaSetDevice", ErrorCode::kUnavailable));
    // Non-blocking: what training puts into the default stream does not wait for copies. Priorities mean nothing to
    // copies; those of training come in between because only a few pieces are on their way.
    RT_TRY(checked(api_.create_stream(&copies_, cuda::kNonBlocking, 0), "cudaStreamCreateWithPriority"));
    for (cuda::EventHandle& event : events_) {
      // Who waits for a piece sleeps: its core belongs to training.
      RT_TRY(checked(api_.create_event(&event, cuda::kDisableTiming | cuda::kBlockingSync), "cudaEventCreate"));
    }
    return {};
  }

  Status use_host(std::span<std::byte> host) override {
    RT_TRY(select());
    if (host.empty()) return {};
    // Memory of another process is pinned in this one's page table: the arena needs to know nothing of it.
    const Status pinned = checked(api_.pin(host.data(), host.size(), cuda::kPortable), "cudaHostRegister");
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
    RT_TRY(checked(api_.record(events_[kDepth], work_), "cudaEventRecord"));
    return checked(api_.wait_event(copies_, events_[kDepth], 0), "cudaStreamWaitEvent");
  }

  bool at_once() const override { return false; }
  int64_t depth() const override { return kDepth; }

  Result<std::optional<uint64_t>> fetch(DeviceBytes device, std::byte* host) override {
    RT_CHECK(begun_ - arrived_ < kDepth, "{} pieces on their way", begun_ - arrived_);
    RT_TRY(select());
    RT_TRY(checked(api_.copy(host, device.first.address(), static_cast<size_t>(device.size), cuda::kToHost, copies_),
                   "cudaMemcpyAsync to the host"));
    RT_TRY(checked(api_.record(events_[static_cast<size_t>(begun_ % kDepth)], copies_), "cudaEventRecord"));
    ++begun_;
    return std::optional<uint64_t>();
  }

  Status arrive() override {
    RT_CHECK(arrived_ < begun_, "no piece is on its way");
    return checked(api_.synchronize_event(events_[static_cast<size_t>(arrived_++ % kDepth)]), "copying to the host");
  }

  Result<bool> has_arrived() override {
    RT_CHECK(arrived_ < begun_, "no piece is on its way");
    const int state = api_.query(events_[static_cast<size_t>(arrived_ % kDepth)]);
    if (state == cuda::kNotReady) return false;
    RT_TRY(checked(state, "copying to the host"));
    return true;
  }

  Status store(std::span<const std::byte> host, DevicePtr<std::byte> device) override {
    RT_TRY(select());
    return checked(api_.copy(device.address(), host.data(), host.size(), cuda::kToDevice, copies_),
                   "cudaMemcpyAsync to the device");
  }

  Status settle() override { return checked(api_.synchronize_stream(copies_), "copying to the device"); }

 private:
  /// The current device is each thread's own.
  Status select() const { return checked(api_.set_device(device_), "cudaSetDevice"); }

  /// An error of the runtime in words.
  Status checked(int error, const char* what, ErrorCode code = ErrorCode::kInternal) const {
    return cuda::checked(api_, error, what, code);
  }

  const cuda::Api& api_;
  int device_;
  cuda::StreamHandle work_, copies_ = nullptr;
  std::array<cuda::EventHandle, kDepth + 1> events_{};  // of the pieces on their way, and of the work before them
  int64_t begun_ = 0, arrived_ = 0;
  std::vector<void*> pinned_;
};

}  // namespace

int cuda_devices(const cuda::Api& api) {
  int count = 0;
  return cuda::checked(api, api.device_count(&count), "looking for devices").ok() ? count : 0;
}

Result<std::unique_ptr<DeviceLink>> make_cuda_link(const cuda::Api& api, int device, cuda::StreamHandle work) {
  int count = 0;
  const std::string name = device_name({DeviceKind::kCuda, device});
  RT_TRY(cuda::checked(api, api.device_count(&count), "looking for devices", ErrorCode::kUnavailable).with(name));
  if (device < 0 || device >= count) {
    return Error{ErrorCode::kUnavailable, fmt::format("{}: this machine has {} CUDA device(s)", name, count)};
  }
  auto link = std::make_unique<CudaLink>(api, device, work);
  RT_TRY(link->open());
  return std::unique_ptr<DeviceLink>(std::move(link));
}

}  // namespace cairn
