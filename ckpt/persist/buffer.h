#pragma once
// Memory that payload passes through, aligned for direct I/O.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

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

}  // namespace cairn::ckpt
