#include "runtime/device/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/device/guard.h"

namespace cairn {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 56;  // above any address space; keeps the rounding from overflowing

/// What a request takes from the kernel: whole pages, huge ones once they can be filled.
int64_t mapped_bytes(int64_t size_bytes) {
  const int64_t page = size_bytes < kHugePage ? kPage : kHugePage;
  return (size_bytes + page - 1) / page * page;
}

struct Pool {
  std::mutex mutex;
  std::map<int64_t, std::vector<std::byte*>> free;  // by mapped size
  std::map<Device, int64_t> allocated;
  std::map<Device, DeviceHeap*> others;  // memory of what is no CPU
};

/// Never destroyed: a buffer in a static may outlive any order of destruction.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

std::byte* map_pages(int64_t bytes) {
  const bool huge = bytes >= kHugePage;
  const int64_t reserve = huge ? bytes + kHugePage : bytes;  // the spare part lets the start lie on a huge page bound
  void* const mapped =
      mmap(nullptr, static_cast<size_t>(reserve), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (!huge) return static_cast<std::byte*>(mapped);
  const auto start = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  const auto head = static_cast<int64_t>(aligned - start);
  if (head > 0) munmap(mapped, static_cast<size_t>(head));
  munmap(reinterpret_cast<void*>(aligned + static_cast<uintptr_t>(bytes)), static_cast<size_t>(kHugePage - head));
  auto* const data = reinterpret_cast<std::byte*>(aligned);
  madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // advice: a kernel without huge pages may decline
  return data;
}

}  // namespace

std::string device_name(Device device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      guarded_(std::exchange(other.guarded_, false)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    device_ = other.device_;
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
    guarded_ = std::exchange(other.guarded_, false);
  }
  return *this;
}

Buffer::~Buffer() { release(); }

void Buffer::release() {
  if (data_ == nullptr) return;
  if (std::exchange(guarded_, false)) guard::remove({data_, static_cast<size_t>(mapped_bytes(size_bytes_))});
  Pool& p = pool();
  const std::lock_guard lock(p.mutex);
  if (device_.kind == DeviceKind::kCpu) {
    p.free[mapped_bytes(size_bytes_)].push_back(data_);
  } else {
    const auto served = p.others.find(device_);
    RT_CHECK(served != p.others.end(), "a block of {} outlives the memory there", device_name(device_));
    served->second->give_back(data_, size_bytes_);
  }
  p.allocated[device_] -= size_bytes_;
  data_ = nullptr;
  size_bytes_ = 0;
}

Result<Buffer> Buffer::allocate(Device device, int64_t size_bytes) {
  RT_CHECK(size_bytes >= 0, "a buffer of {} bytes", size_bytes);
  Buffer buffer;
  buffer.device_ = device;
  if (device.kind != DeviceKind::kCpu) {
    Pool& p = pool();
    const std::lock_guard lock(p.mutex);
    const auto served = p.others.find(device);
    if (served == p.others.end()) {
      return Error{ErrorCode::kUnsupported,
                   fmt::format("{} bytes on {}: no memory is reserved there; use device \"cpu\"", size_bytes,
                               device_name(device))};
    }
    if (size_bytes == 0) return buffer;
    RT_TRY_SET(buffer.data_, served->second->take(size_bytes));
    buffer.size_bytes_ = size_bytes;
    p.allocated[device] += size_bytes;
    return buffer;
  }
  if (size_bytes == 0) return buffer;
  const bool addressable = size_bytes <= kMaxBytes;
  const int64_t bytes = addressable ? mapped_bytes(size_bytes) : 0;
  Pool& p = pool();
  if (addressable) {
    const std::lock_guard lock(p.mutex);
    if (const auto found = p.free.find(bytes); found != p.free.end() && !found->second.empty()) {
      buffer.data_ = found->second.back();
      found->second.pop_back();
    }
  }
  if (buffer.data_ != nullptr) {
    std::memset(buffer.data_, 0, static_cast<size_t>(size_bytes));
  } else {
    if (addressable) buffer.data_ = map_pages(bytes);
    if (buffer.data_ == nullptr) {
      return Error{ErrorCode::kNoSpace,
                   fmt::format("no memory for {} bytes on {} ({} bytes are in use there): {}", size_bytes,
                               device_name(device), allocated_bytes(device), std::strerror(ENOMEM)),
                   ENOMEM};
    }
  }
  buffer.size_bytes_ = size_bytes;
  const std::lock_guard lock(p.mutex);
  p.allocated[device] += size_bytes;
  return buffer;
}

Buffer Buffer::for_device_alone() && {
  if (data_ != nullptr && !guarded_ && device_.kind == DeviceKind::kCpu && guard::on.load(std::memory_order_relaxed)) {
    guard::add({data_, static_cast<size_t>(mapped_bytes(size_bytes_))});
    guarded_ = true;
  }
  return std::move(*this);
}

void serve_heap(Device device, DeviceHeap* memory) {
  RT_CHECK(device.kind != DeviceKind::kCpu, "memory of the CPU is the system's");
  Pool& p = pool();
  const std::lock_guard lock(p.mutex);
  RT_CHECK(p.allocated[device] == 0, "{} bytes of {} are in use", p.allocated[device], device_name(device));
  if (memory == nullptr) {
    p.others.erase(device);
  } else {
    p.others[device] = memory;
  }
}

int64_t allocated_bytes(Device device) {
  Pool& p = pool();
  const std::lock_guard lock(p.mutex);
  const auto found = p.allocated.find(device);
  return found == p.allocated.end() ? 0 : found->second;
}

}  // namespace cairn
