#pragma once
// A CUDA device that this process uses: the runtime's functions, the device's number, and events that streams take and
// give back, so that none is made once a program has as many as it ever has at a time.

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/cuda/api.h"
#include "runtime/device/device.h"

namespace cairn::cuda {

/// Threads: any.
class Context {
 public:
  /// `api` outlives it. Errors: kUnavailable when there is no such device or no driver, with what to do about it.
  static Result<std::shared_ptr<Context>> open(const Api& api, int index);
  /// The same errors but that of opening the device: nothing of its memory is taken, and another process may have it
  /// for itself.
  static Status find(const Api& api, int index);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Api& api() const { return api_; }
  Device device() const { return {DeviceKind::kCuda, index_}; }
  /// Makes the device the calling thread's current one: each thread has its own.
  int select() const { return api_.set_device(index_); }
  Status checked(int error, const char* what) const { return cuda::checked(api_, error, what); }

  /// 0 and an event without timing, or the runtime's error.
  int take_event(EventHandle* event);
  void give_back(EventHandle event);

  /// Of the driver; null where it lacks it.
  void* driver_function(const char* name) const;
  /// The same, looked for once.
  WaitForWord wait_for_word();
  /// The device's name and its multiprocessors, "NVIDIA H200 (132 multiprocessors)"; "CUDA device" where the driver
  /// does not say.
  std::string card() const;
  /// The device's memory, all of it; 0 where the driver does not say.
  int64_t memory_bytes() const;
  /// A CUresult in the driver's words, with its number.
  std::string driver_error(int error) const;

 private:
  Context(const Api& api, int index) : api_(api), index_(index) {}

  const Api& api_;
  const int index_;
  std::mutex mutex_;
  std::vector<EventHandle> events_;  // that nobody uses
  bool looked_for_wait_ = false;
  WaitForWord wait_for_word_ = nullptr;
};

}  // namespace cairn::cuda
