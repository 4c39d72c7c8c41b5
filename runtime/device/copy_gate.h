#pragma once
// Memory that is copied beside the work that will change it, as training state during a snapshot. Work that is about to
// overwrite a part waits until that part has been read. ckpt/copy implements it.

#include <cstddef>
#include <cstdint>
#include <span>

namespace cairn {

class CopyGate {
 public:
  virtual ~CopyGate() = default;

  /// How much of an array is best overwritten at once: more would wait for more.
  virtual int64_t block_bytes() const = 0;

  /// Returns when the copy under way, if there is one, has read these bytes. Never fails: a copy that has failed needs
  /// nothing any more, and whoever ordered it is told.
  virtual void wait(std::span<const std::span<std::byte>> areas) = 0;

  /// How long all calls of wait() have taken.
  virtual int64_t waited_ns() const = 0;
};

}  // namespace cairn
