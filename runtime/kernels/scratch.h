#pragma once
// Memory a kernel needs for itself: made thread_local by the kernel, grows to the largest size asked for, stays.

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "runtime/core/check.h"

namespace cairn::kernels {

class Scratch {
 public:
  /// `elems` floats, aligned to 64 bytes, with any content; the last call's memory is gone when this one is larger.
  float* floats(int64_t elems) {
    if (elems > capacity_) {
      const size_t bytes = (static_cast<size_t>(elems) * sizeof(float) + 63) / 64 * 64;
      memory_.reset();
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      RT_CHECK(memory_ != nullptr, "no memory for {} bytes of kernel scratch", bytes);
      capacity_ = elems;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace cairn::kernels
