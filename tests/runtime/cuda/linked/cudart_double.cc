// A double of the part of the CUDA runtime that the link and its tests use, for machines without a device: "device"
// memory is the host's, each stream but the default one is a thread that does its work late, a copy in two halves, and
// an event is done when its stream comes to it. So what the link forgets to wait for has not happened yet, and what a
// copy on its way is to bring is not there: its target is spoilt when it is ordered. There are two devices, each
// thread's current one is the first until it says otherwise. Written from the runtime's documentation; it proves the
// order of calls, and nothing about a device or a driver.
#include "tests/runtime/cuda/linked/cudart_double.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>

namespace {

constexpr int kDevices = 2;
constexpr auto kSpoilt = 0xa5;

/// What an event was last recorded after: done when a stream comes to it.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point at;

  void finish() {
    const std::lock_guard lock(mutex);
    done = true;
    at = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
  bool is_done() {
    const std::lock_guard lock(mutex);
    return done;
  }
};

}  // namespace

struct CUevent_st {
  int device;
  bool timed;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // null: never recorded

  std::shared_ptr<Mark> last() {
    const std::lock_guard lock(mutex);
    return mark;
  }
};

struct CUstream_st {
  CUstream_st(int device, bool blocking, bool late)
      : device(device), blocking(blocking), thread([this, late] { run(late); }) {}
  ~CUstream_st() {
    add({});
    thread.join();
  }
  void add(std::function<void()> work) {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  std::shared_ptr<Mark> mark() {
    auto made = std::make_shared<Mark>();
    add([made] { made->finish(); });
    return made;
  }

  const int device;
  const bool blocking;  // in step with the default stream

 private:
  void run(bool late) {
    std::minstd_rand random(7);
    while (true) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !queue.empty(); });
      const std::function<void()> work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      if (!work) return;
      if (late) std::this_thread::sleep_for(std::chrono::microseconds(200 + random() % 300));
      work();
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::thread thread;
};

namespace {

struct Area {
  const std::byte* begin;
  size_t bytes;
  int device = 0;
  bool holds(const void* at, size_t size) const { return at >= begin && size <= bytes && at <= begin + (bytes - size); }
  bool meets(const void* at, size_t size) const {
    return at < begin + bytes && begin < static_cast<const std::byte*>(at) + size;
  }
};

std::mutex mutex;                               // of what follows
std::list<Area> device_memory, pinned, coming;  // coming: host memory of copies on their way
std::set<cudaStream_t> streams;
std::set<cudaEvent_t> events;
std::set<int> used;
std::vector<std::string> wrong;
int64_t pageable = 0;
struct {
  int64_t calls = -1;
  cudaError_t error = cudaSuccess;
  bool from_then_on = false, done = false;
} refusal;

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

bool holds(const std::list<Area>& areas, const void* at, size_t bytes, int device = -1) {
  const std::lock_guard lock(mutex);
  return std::any_of(areas.begin(), areas.end(),
                     [&](const Area& area) { return area.holds(at, bytes) && (device < 0 || device == area.device); });
}
bool meets(const std::list<Area>& areas, const void* at, size_t bytes) {
  const std::lock_guard lock(mutex);
  return std::any_of(areas.begin(), areas.end(), [&](const Area& area) { return area.meets(at, bytes); });
}
void misuse(std::string what) {
  const std::lock_guard lock(mutex);
  wrong.push_back(std::move(what));
}

cudaError_t refused() {
  const std::lock_guard lock(mutex);
  if (refusal.calls < 0) return cudaSuccess;
  if (refusal.calls > 0) {
    --refusal.calls;
    return cudaSuccess;
  }
  if (refusal.done && !refusal.from_then_on) return cudaSuccess;
  refusal.done = true;
  return refusal.error;
}

cudaError_t tell(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

/// Of a call that needs no context.
template <typename Body>
cudaError_t plain(const Body& body) {
  const cudaError_t error = refused();
  return tell(error != cudaSuccess ? error : body());
}
template <typename Body>
cudaError_t call(const Body& body) {
  return plain([&] {
    {
      const std::lock_guard lock(mutex);
      used.insert(current);
    }
    return body();
  });
}
/// What it does it does all the same.
template <typename Body>
cudaError_t giving_back(const Body& body) {
  const cudaError_t error = refused(), done = body();
  return tell(done != cudaSuccess ? done : error);
}

template <typename T>
T* keep(std::set<T*>& live, T* made) {
  const std::lock_guard lock(mutex);
  live.insert(made);
  return made;
}

CUstream_st& default_of(int device) {
  static CUstream_st defaults[kDevices] = {{0, true, /*late=*/false}, {1, true, /*late=*/false}};
  return defaults[device];
}

/// As the legacy default stream has it: it follows all blocking ones, and they follow it.
CUstream_st& in_step(cudaStream_t handle) {
  CUstream_st& stream = handle == nullptr ? default_of(current) : *handle;
  if (!stream.blocking) return stream;
  std::vector<std::shared_ptr<Mark>> before;
  if (handle != nullptr) {
    before.push_back(default_of(stream.device).mark());
  } else {
    const std::lock_guard lock(mutex);
    for (CUstream_st* const other : streams) {
      if (other->blocking && other->device == current) before.push_back(other->mark());
    }
  }
  stream.add([before] {
    for (const auto& mark : before) mark->wait();
  });
  return stream;
}

void drain(cudaStream_t stream) { in_step(stream).mark()->wait(); }

/// The host's side of it is `host`.
void copy_late(CUstream_st& stream, void* to, const void* from, size_t bytes, const void* host) {
  auto area = [&] {
    const std::lock_guard lock(mutex);
    return coming.insert(coming.end(), {static_cast<const std::byte*>(host), bytes});
  }();
  stream.add([=] {
    std::memcpy(to, from, bytes / 2);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::memcpy(static_cast<std::byte*>(to) + bytes / 2, static_cast<const std::byte*>(from) + bytes / 2,
                bytes - bytes / 2);
    const std::lock_guard lock(mutex);
    coming.erase(area);
  });
}

bool is_mapped(const void* at, size_t bytes) {
  constexpr size_t kPage = 4096;
  std::vector<unsigned char> pages((bytes + kPage - 1) / kPage);
  return mincore(const_cast<void*>(at), bytes, pages.data()) == 0;
}

}  // namespace

namespace cairn::cudart_double {

void refuse_call(int64_t calls, cudaError_t error, bool from_then_on) {
  const std::lock_guard lock(mutex);
  refusal = {calls, error, from_then_on, false};
}

bool refuse_no_more() {
  const std::lock_guard lock(mutex);
  refusal.calls = -1;
  return refusal.done;
}

std::vector<std::string> misuses() {
  const std::lock_guard lock(mutex);
  return std::exchange(wrong, {});
}

std::vector<std::string> left() {
  const std::lock_guard lock(mutex);
  std::vector<std::string> out;
  const auto tell = [&](size_t count, const char* what) {
    if (count > 0) out.push_back(fmt::format("{} {}", count, what));
  };
  tell(device_memory.size(), "allocations");
  tell(pinned.size(), "pinned areas");
  tell(coming.size(), "copies on their way");
  tell(streams.size(), "streams");
  tell(events.size(), "events");
  return out;
}

std::vector<int> devices_used() {
  const std::lock_guard lock(mutex);
  return {used.begin(), used.end()};
}

int64_t pageable_copies() {
  const std::lock_guard lock(mutex);
  return pageable;
}

}  // namespace cairn::cudart_double

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return plain([&] {
    *count = kDevices;
    return cudaSuccess;
  });
}
cudaError_t cudaSetDevice(int number) {
  return plain([&] {
    if (number < 0 || number >= kDevices) return cudaErrorInvalidDevice;
    current = number;
    return cudaSuccess;
  });
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  return plain([&] {
    if (number < 0 || number >= kDevices) return cudaErrorInvalidDevice;
    *properties = {};
    std::strcpy(properties->name, "a double of the CUDA runtime");
    return cudaSuccess;
  });
}
cudaError_t cudaDriverGetVersion(int* version) {
  return plain([&] {
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all_bytes) {
  return call([&] {
    *free_bytes = *all_bytes = size_t{4} << 30;
    return cudaSuccess;
  });
}
const char* cudaGetErrorString(cudaError_t) { return "refused by the double"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfDouble"; }
cudaError_t cudaGetLastError() {
  const std::lock_guard lock(mutex);
  if (refusal.calls == 0 && refusal.done && refusal.from_then_on) return refusal.error;
  return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return call([&] {
    *stream = keep(streams, new CUstream_st(current, flags != cudaStreamNonBlocking, /*late=*/true));
    return cudaSuccess;
  });
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return giving_back([&] {
    drain(stream);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return giving_back([&] {
    {
      const std::lock_guard lock(mutex);
      if (streams.erase(stream) == 0) return cudaErrorInvalidResourceHandle;
    }
    std::thread([stream] { delete stream; }).detach();  // returns at once: what is in it is still done
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  return call([&] {
    if ((flags & cudaEventBlockingSync) == 0) misuse("an event that is waited for at full load");
    *event = keep(events, new CUevent_st{current, (flags & cudaEventDisableTiming) == 0, {}, {}});
    return cudaSuccess;
  });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return giving_back([&] {
    const std::lock_guard lock(mutex);
    if (events.erase(event) == 0) return cudaErrorInvalidResourceHandle;
    delete event;
    return cudaSuccess;
  });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call([&] {
    CUstream_st& queue = in_step(stream);
    if (event->device != queue.device) return cudaErrorInvalidResourceHandle;
    const std::lock_guard lock(event->mutex);
    event->mark = queue.mark();
    return cudaSuccess;
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call([&] {
    const auto mark = event->last();
    return mark == nullptr || mark->is_done() ? cudaSuccess : cudaErrorNotReady;
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call([&] {
    if (const auto mark = event->last(); mark != nullptr) mark->wait();
    return cudaSuccess;
  });
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return call([&] {
    const auto from = start->last(), to = end->last();
    if (!start->timed || !end->timed || from == nullptr || to == nullptr) return cudaErrorInvalidResourceHandle;
    if (!from->is_done() || !to->is_done()) return cudaErrorNotReady;
    *ms = std::chrono::duration<float, std::milli>(to->at - from->at).count();
    return cudaSuccess;
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  return call([&] {
    if (const auto mark = event->last(); mark != nullptr) in_step(stream).add([mark] { mark->wait(); });
    return cudaSuccess;
  });
}

cudaError_t cudaHostRegister(void* host, size_t bytes, unsigned int) {
  return call([&] {
    if (bytes == 0 || !is_mapped(host, bytes)) return cudaErrorInvalidValue;
    if (meets(pinned, host, bytes)) return cudaErrorHostMemoryAlreadyRegistered;
    const std::lock_guard lock(mutex);
    pinned.push_back({static_cast<std::byte*>(host), bytes});
    return cudaSuccess;
  });
}
cudaError_t cudaHostUnregister(void* host) {
  return giving_back([&] {
    Area area{};
    {
      const std::lock_guard lock(mutex);
      const auto found = std::find_if(pinned.begin(), pinned.end(), [&](const Area& p) { return p.begin == host; });
      if (found == pinned.end()) return cudaErrorHostMemoryNotRegistered;
      area = *found;
      pinned.erase(found);
    }
    if (meets(coming, area.begin, area.bytes)) misuse("memory unpinned while a copy is on its way to it");
    if (!is_mapped(area.begin, area.bytes)) misuse("memory unmapped before it was unpinned");
    return cudaSuccess;
  });
}
cudaError_t cudaHostAlloc(void** host, size_t bytes, unsigned int) {
  return call([&] {
    *host = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*host == MAP_FAILED) return cudaErrorMemoryAllocation;
    const std::lock_guard lock(mutex);
    pinned.push_back({static_cast<std::byte*>(*host), bytes});
    return cudaSuccess;
  });
}
cudaError_t cudaFreeHost(void* host) {
  return giving_back([&] {
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(pinned.begin(), pinned.end(), [&](const Area& p) { return p.begin == host; });
    if (found == pinned.end()) return cudaErrorInvalidValue;
    munmap(host, found->bytes);
    pinned.erase(found);
    return cudaSuccess;
  });
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  return call([&] {
    *attributes = {};
    attributes->type = holds(device_memory, at, 1) ? cudaMemoryTypeDevice
                       : holds(pinned, at, 1)      ? cudaMemoryTypeHost
                                                   : cudaMemoryTypeUnregistered;
    return cudaSuccess;
  });
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return call([&] {
    auto* made = new std::byte[bytes];
    *memory = made;
    const std::lock_guard lock(mutex);
    device_memory.push_back({made, bytes, current});
    return cudaSuccess;
  });
}
cudaError_t cudaFree(void* memory) {
  return giving_back([&] {
    std::vector<std::shared_ptr<Mark>> before;
    {
      const std::lock_guard lock(mutex);
      const auto found = std::find_if(device_memory.begin(), device_memory.end(),
                                      [&](const Area& area) { return area.begin == memory; });
      if (found == device_memory.end()) return cudaErrorInvalidValue;
      for (CUstream_st* const stream : streams) {
        if (stream->device == found->device) before.push_back(stream->mark());
      }
      before.push_back(default_of(found->device).mark());
      device_memory.erase(found);
    }
    for (const auto& mark : before) mark->wait();
    delete[] static_cast<std::byte*>(memory);
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return call([&] {
    if (bytes == 0) return cudaSuccess;
    CUstream_st& queue = in_step(stream);
    const bool from_device = kind != cudaMemcpyHostToDevice, to_device = kind != cudaMemcpyDeviceToHost;
    if (from_device && !holds(device_memory, from, bytes, queue.device)) return cudaErrorInvalidValue;
    if (to_device && !holds(device_memory, to, bytes, queue.device)) return cudaErrorInvalidValue;
    if (from_device && to_device) {
      queue.add([=] { std::memcpy(to, from, bytes); });
      return cudaSuccess;
    }
    const void* const host = to_device ? from : to;
    if (!is_mapped(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) & ~uintptr_t{4095}), 1))
      return cudaErrorInvalidValue;
    if (holds(pinned, host, bytes)) {
      if (!to_device) std::memset(to, kSpoilt, bytes);
      copy_late(queue, to, from, bytes, host);
      return cudaSuccess;
    }
    if (meets(pinned, host, bytes)) return cudaErrorInvalidValue;  // pinned in part
    {
      const std::lock_guard lock(mutex);
      ++pageable;
    }
    if (to_device) {  // pageable memory: read before the call returns
      const auto* begin = static_cast<const std::byte*>(from);
      queue.add([to, staged = std::vector<std::byte>(begin, begin + bytes)] {
        std::memcpy(to, staged.data(), staged.size());
      });
    } else {  // there when the call returns
      queue.add([=] { std::memcpy(to, from, bytes); });
      queue.mark()->wait();
    }
    return cudaSuccess;
  });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t begun = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return begun == cudaSuccess ? cudaStreamSynchronize(nullptr) : begun;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return call([&] {
    CUstream_st& queue = in_step(stream);
    if (!holds(device_memory, to, bytes, queue.device)) return cudaErrorInvalidValue;
    queue.add([=] { std::memset(to, value, bytes); });
    return cudaSuccess;
  });
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  const cudaError_t begun = cudaMemsetAsync(to, value, bytes, nullptr);
  return begun == cudaSuccess ? cudaStreamSynchronize(nullptr) : begun;
}

// It copies nothing between its devices: nobody whose tests use it does.
cudaError_t cudaDeviceGetPCIBusId(char*, int, int) { return cudaErrorNotSupported; }
cudaError_t cudaDeviceCanAccessPeer(int*, int, int) { return cudaErrorNotSupported; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return cudaErrorNotSupported; }
cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) { return cudaErrorNotSupported; }

// It has no graphs: nobody whose tests use it captures one.
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaErrorNotSupported; }
// Nor does it wait for words in memory.
cudaError_t cudaHostGetDevicePointer(void**, void*, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return cudaErrorNotSupported;
}

}  // extern "C"
