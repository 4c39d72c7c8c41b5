// A double of the part of the CUDA runtime that the link uses, for machines without a device: "device" memory is the
// host's, each stream but the default one is a thread that does its work late, and an event is done when its stream
// comes to it. So what the link forgets to wait for has not happened yet. Written from the runtime's documentation; it
// proves the order of calls, and nothing about a device or a driver.
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

struct CUevent_st {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t recorded = 0, done = 0;

  int64_t record() {
    const std::lock_guard lock(mutex);
    return ++recorded;
  }
  int64_t last() {
    const std::lock_guard lock(mutex);
    return recorded;
  }
  void finish(int64_t record) {
    const std::lock_guard lock(mutex);
    done = std::max(done, record);
    changed.notify_all();
  }
  void wait(int64_t record) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= record; });
  }
};

struct CUstream_st {
  explicit CUstream_st(bool late = true) : thread([this, late] { run(late); }) {}
  ~CUstream_st() {
    add({});
    thread.join();
  }
  void add(std::function<void()> work) {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  void drain() {
    CUevent_st event;
    const int64_t record = event.record();
    add([&] { event.finish(record); });
    event.wait(record);
  }

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

std::mutex mutex;                           // of what follows
std::map<const std::byte*, size_t> device;  // allocations
std::map<const std::byte*, size_t> pinned;  // registered host memory
std::set<cudaStream_t> streams;
std::set<cudaEvent_t> events;

bool within(const std::map<const std::byte*, size_t>& areas, const void* at, size_t bytes) {
  const std::lock_guard lock(mutex);
  const auto* begin = static_cast<const std::byte*>(at);
  auto it = areas.upper_bound(begin);
  return it != areas.begin() && begin + bytes <= (--it)->first + it->second;
}

template <typename T>
cudaError_t create(std::set<T*>& live, T*& made) {
  made = new T;
  const std::lock_guard lock(mutex);
  live.insert(made);
  return cudaSuccess;
}

template <typename T>
cudaError_t destroy(std::set<T*>& live, T* handle) {
  {
    const std::lock_guard lock(mutex);
    if (live.erase(handle) == 0) return cudaErrorInvalidResourceHandle;
  }
  delete handle;
  return cudaSuccess;
}

CUstream_st& queue_of(cudaStream_t stream) {
  static CUstream_st default_stream(/*late=*/false);
  return stream == nullptr ? default_stream : *stream;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) { return number == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
const char* cudaGetErrorString(cudaError_t) { return "refused by the double"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfDouble"; }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  if (priority > 0 || priority < -5) return cudaErrorInvalidValue;
  return create(streams, *stream);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  queue_of(stream).drain();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return destroy(streams, stream); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) { return create(events, *event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return destroy(events, event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  queue_of(stream).add([event, record = event->record()] { event->finish(record); });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->wait(event->last());
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  queue_of(stream).add([event, record = event->last()] { event->wait(record); });
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* host, size_t bytes, unsigned int) {
  const std::lock_guard lock(mutex);
  return pinned.emplace(static_cast<std::byte*>(host), bytes).second ? cudaSuccess
                                                                     : cudaErrorHostMemoryAlreadyRegistered;
}
cudaError_t cudaHostUnregister(void* host) {
  const std::lock_guard lock(mutex);
  return pinned.erase(static_cast<std::byte*>(host)) == 1 ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  auto* made = new std::byte[bytes];
  *memory = made;
  const std::lock_guard lock(mutex);
  device.emplace(made, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const auto* begin = static_cast<const std::byte*>(memory);
  {
    const std::lock_guard lock(mutex);
    if (device.erase(begin) == 0) return cudaErrorInvalidValue;
  }
  delete[] begin;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind == cudaMemcpyDeviceToHost) {
    if (!within(device, from, bytes)) return cudaErrorInvalidValue;
    queue_of(stream).add([=] { std::memcpy(to, from, bytes); });
    if (!within(pinned, to, bytes)) queue_of(stream).drain();  // pageable memory: it is there when the call returns
    return cudaSuccess;
  }
  if (kind != cudaMemcpyHostToDevice || !within(device, to, bytes)) return cudaErrorInvalidValue;
  if (within(pinned, from, bytes)) {
    queue_of(stream).add([=] { std::memcpy(to, from, bytes); });
  } else {  // pageable memory: read before the call returns
    const auto* begin = static_cast<const std::byte*>(from);
    queue_of(stream).add(
        [to, staged = std::vector<std::byte>(begin, begin + bytes)] { std::memcpy(to, staged.data(), staged.size()); });
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t begun = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return begun == cudaSuccess ? cudaStreamSynchronize(nullptr) : begun;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (!within(device, to, bytes)) return cudaErrorInvalidValue;
  queue_of(stream).add([=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  const cudaError_t begun = cudaMemsetAsync(to, value, bytes, nullptr);
  return begun == cudaSuccess ? cudaStreamSynchronize(nullptr) : begun;
}

}  // extern "C"

TEST_SUITE("runtime/cuda") {
  TEST_CASE("the links of all tests before have given back what they took") {
    const std::lock_guard lock(mutex);
    CHECK(device.empty());
    CHECK(pinned.empty());
    CHECK(streams.empty());
    CHECK(events.empty());
  }
}
