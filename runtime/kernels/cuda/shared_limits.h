#pragma once
// How much shared memory each kernel has been allowed. CUDA keeps a limit for each kernel on each device, and a launch
// above 48 KiB needs it raised: once, as a call of the runtime at every launch takes a microsecond of the host.

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace cairn::kernels::cuda {

/// Threads: any. No thread launches before the call that raises the limit for it has returned.
class SharedLimits {
 public:
  static constexpr int64_t kUnasked = 48 << 10;  // bytes that every kernel has

  /// Calls raise() where the kernel's limit on this device is below `bytes`. Returns 0, or the error that raise() gave:
  /// then the next launch asks again.
  template <typename Raise>
  int allow(int device, const void* kernel, int64_t bytes, Raise raise) {
    if (bytes <= kUnasked) return 0;
    const std::lock_guard lock(mutex_);
    int64_t& allowed = allowed_[{device, kernel}];
    if (bytes <= allowed) return 0;
    const int error = raise();
    if (error == 0) allowed = bytes;
    return error;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, int64_t> allowed_;
};

}  // namespace cairn::kernels::cuda
