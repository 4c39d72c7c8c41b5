#pragma once
// Where launches of kernels go. No CUDA header is needed to hold one.

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace cairn::kernels::cuda {

/// A stream, memory for what a call leaves between its launches, and the first launch that was refused. Later launches
/// are made all the same; who waits for the stream asks.
struct Queue {
  CUstream_st* stream = nullptr;
  int error = 0;                 // a cudaError_t; 0 is success
  std::byte* scratch = nullptr;  // aligned to 16
  int64_t scratch_bytes = 0;
  int64_t lacked_bytes = 0;  // that a call asked for in vain: it has launched nothing

  /// Memory for `count` of them, until the next call; null where there is too little.
  template <typename T>
  T* room(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes <= scratch_bytes) return reinterpret_cast<T*>(scratch);
    lacked_bytes = bytes;
    return nullptr;
  }
};

}  // namespace cairn::kernels::cuda
