#pragma once
// Memory that payload passes through, aligned for direct I/O.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/core/result.h"

namespace cairn::ckpt {

/// Memory from the system in huge pages where it gives them.
class Buffer {
 public:
  Buffer() = default;
  /// kUnavailable when there is none.
  static Result<Buffer> allocate(int64_t bytes);
  std::span<std::byte> bytes() const { return {memory_.get(), static_cast<size_t>(bytes_)}; }
  explicit operator bool() const { return memory_ != nullptr; }

 private:
  struct Freer {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Freer> memory_;
  int64_t bytes_ = 0;
};

}  // namespace cairn::ckpt
