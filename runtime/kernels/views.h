#pragma once
// Views of arrays, as kernels take them.

#include <cstdint>

#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"

namespace cairn::kernels {

/// Elements [begin, begin + count) of an array.
struct ElemRun {
  int64_t begin = 0, count = 0;
};

/// Rows that begin `stride` elements apart; how many and how wide they are, the kernel's dims say.
template <typename T>
struct Rows {
  DevicePtr<T> data;
  int64_t stride = 0;

  /// For kernels.
  T* row(int64_t r) const { return data.address() + r * stride; }
};
template <typename T>
void add_dims(OpDims& /*to*/, const Rows<T>& /*of*/) {}

}  // namespace cairn::kernels
