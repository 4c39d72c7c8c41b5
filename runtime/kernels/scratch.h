#pragma once
// Memory a kernel needs for itself: made thread_local by the kernel, grows to the largest size asked for, stays.

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "runtime/core/check.h"

namespace cairn::kernels {

class Scratch {
 public:
  /// `elems` floats, aligned to 64 bytes (huge pages where they fill one), with any content; the last call's memory is
  /// gone when this one is larger.
  float* floats(int64_t elems) {
    if (elems > capacity_) {
      constexpr size_t kHugePage = size_t{2} << 20;
      const size_t align = static_cast<size_t>(elems) * sizeof(float) < kHugePage ? 64 : kHugePage;
      const size_t bytes = (static_cast<size_t>(elems) * sizeof(float) + align - 1) / align * align;
      memory_.reset();
      memory_.reset(static_cast<float*>(std::aligned_alloc(align, bytes)));
      if (memory_ != nullptr && align == kHugePage) madvise(memory_.get(), bytes, MADV_HUGEPAGE);
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
