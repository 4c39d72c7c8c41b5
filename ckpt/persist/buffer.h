#pragma once
// Memory that payload passes through, aligned for direct I/O.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::ckpt {

/// Multiples of 2 MiB lie in huge pages where the system gives them: a request needs few of them.
class Buffer {
 public:
  Buffer() = default;
  /// kUnavailable when there is none.
  static Result<Buffer> allocate(int64_t bytes);
  std::span<std::byte> bytes() const { return {memory_.get(), static_cast<size_t>(bytes_)}; }
  explicit operator bool() const { return memory_ != nullptr; }
  /// Its pages are there from now on: the first touch of memory can take longer than a disk takes to fill it (a virtual
  /// machine that gave free pages back to its host: 3 ms a MiB).
  void touch();

 private:
  struct Freer {
    Freer() : mapped_bytes(0) {}
    explicit Freer(int64_t mapped) : mapped_bytes(mapped) {}
    int64_t mapped_bytes;  // 0: of the heap
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Freer> memory_;
  int64_t bytes_ = 0;
};

inline constexpr int64_t kBounceBytes = int64_t{64} << 20;  // of a save or a load: with less the disk may wait

/// Buffers between two uses: what is kept here has been touched. Safe to share between threads.
class BufferStore {
 public:
  /// Beyond `max_bytes` what was put back first is freed.
  explicit BufferStore(int64_t max_bytes) : max_bytes_(max_bytes) {}
  std::optional<Buffer> take_kept(int64_t bytes);  // of exactly that size
  Result<Buffer> take(int64_t bytes);              // a kept one, or a new one
  void put_back(Buffer buffer);
  void limit(int64_t max_bytes);  // the bound from now on
  int64_t memory_bytes() const;

 private:
  void trim();  // under the mutex

  mutable std::mutex mutex_;
  int64_t max_bytes_;
  std::vector<Buffer> buffers_;  // in the order they came
  int64_t bytes_ = 0;
};

/// Makes new buffers and touches them, on a thread of its own, while whoever needs them works with those it has.
class BufferWarmer {
 public:
  /// `count` buffers of `bytes` each.
  BufferWarmer(int64_t bytes, int64_t count);
  ~BufferWarmer();               // makes no more
  std::optional<Buffer> poll();  // one that is ready
  std::optional<Buffer> wait();  // the next one; nullopt when no more will come
  bool finished() const;         // no more will come

 private:
  void work(int64_t bytes, int64_t count);
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Buffer> ready_;
  std::atomic<bool> closing_{false};
  bool done_ = false;
  std::thread thread_;
};

}  // namespace cairn::ckpt
