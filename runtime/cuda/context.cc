#include "runtime/cuda/context.h"

#include <fmt/format.h>

#include <array>

namespace cairn::cuda {

Status Context::find(const Api& api, int index) {
  const std::string name = device_name({DeviceKind::kCuda, index});
  int driver = 0, runtime = 0, count = 0;
  RT_TRY(cuda::checked(api, api.driver_version(&driver), "cudaDriverGetVersion", ErrorCode::kUnavailable).with(name));
  if (driver == 0) {
    return Error{ErrorCode::kUnavailable, fmt::format("{}: no NVIDIA driver (libcuda.so.1) was found", name)};
  }
  RT_TRY(
      cuda::checked(api, api.runtime_version(&runtime), "cudaRuntimeGetVersion", ErrorCode::kUnavailable).with(name));
  if (driver < runtime / 1000 * 1000) {
    return Error{ErrorCode::kUnavailable,
                 fmt::format("{}: the driver is for CUDA {}.{}, the runtime needs one for {}.0", name, driver / 1000,
                             driver % 1000 / 10, runtime / 1000)};
  }
  RT_TRY(cuda::checked(api, api.device_count(&count), "looking for devices", ErrorCode::kUnavailable).with(name));
  if (index < 0 || index >= count) {
    return Error{ErrorCode::kUnavailable, fmt::format("{}: this machine has {} CUDA device(s)", name, count)};
  }
  return {};
}

Result<std::shared_ptr<Context>> Context::open(const Api& api, int index) {
  RT_TRY(find(api, index));
  std::shared_ptr<Context> out(new Context(api, index));
  RT_TRY(cuda::checked(api, out->select(), "cudaSetDevice", ErrorCode::kUnavailable).with(device_name(out->device())));
  return out;
}

Context::~Context() {
  bool failed = select() != 0;
  for (const EventHandle event : events_) failed |= api_.destroy_event(event) != 0;
  if (failed) api_.last_error();  // whoever waited for the work has been told
}

int Context::take_event(EventHandle* event) {
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      *event = events_.back();
      events_.pop_back();
      return 0;
    }
  }
  return api_.create_event(event, kDisableTiming | kBlockingSync);  // who waits for it sleeps
}

void Context::give_back(EventHandle event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
}

void* Context::driver_function(const char* name) const {
  void* found = nullptr;
  int how = 0;
  if (api_.driver_function(name, &found, kDriverVersion, 0, &how) == 0) {
    return how == 0 ? found : nullptr;  // cudaDriverEntryPointSuccess
  }
  api_.last_error();
  return nullptr;
}

WaitForWord Context::wait_for_word() {
  const std::lock_guard lock(mutex_);
  if (!looked_for_wait_) wait_for_word_ = reinterpret_cast<WaitForWord>(driver_function(kWaitForWord));
  looked_for_wait_ = true;
  return wait_for_word_;
}

std::string Context::card() const {
  const auto device_of = reinterpret_cast<DriverDevice>(driver_function(kDriverDevice));
  const auto name_of = reinterpret_cast<DeviceName>(driver_function(kDeviceName));
  const auto attribute_of = reinterpret_cast<DeviceAttribute>(driver_function(kDeviceAttribute));
  int device = 0, multiprocessors = 0;
  std::array<char, 256> name{};
  if (device_of == nullptr || name_of == nullptr || attribute_of == nullptr || device_of(&device, index_) != 0 ||
      name_of(name.data(), static_cast<int>(name.size()) - 1, device) != 0 ||
      attribute_of(&multiprocessors, kMultiprocessors, device) != 0) {
    return "CUDA device";
  }
  return fmt::format("{} ({} multiprocessors)", name.data(), multiprocessors);
}

int64_t Context::memory_bytes() const {
  const auto device_of = reinterpret_cast<DriverDevice>(driver_function(kDriverDevice));
  const auto memory_of = reinterpret_cast<DeviceMemory>(driver_function(kDeviceMemory));
  int device = 0;
  size_t bytes = 0;
  if (device_of == nullptr || memory_of == nullptr || device_of(&device, index_) != 0 || memory_of(&bytes, device) != 0)
    return 0;
  return static_cast<int64_t>(bytes);
}

std::string Context::driver_error(int error) const {
  const auto words_of = reinterpret_cast<DriverErrorString>(driver_function(kDriverErrorString));
  const char* words = nullptr;
  if (words_of == nullptr || words_of(error, &words) != 0 || words == nullptr) return fmt::format("CUresult {}", error);
  return fmt::format("{} (CUresult {})", words, error);
}

}  // namespace cairn::cuda
