#pragma once
// Where launches of kernels go. No CUDA header is needed to hold one.

struct CUstream_st;

namespace cairn::kernels::cuda {

/// A stream and the first launch that it refused. Later launches are made all the same; who waits for the stream asks.
struct Queue {
  CUstream_st* stream = nullptr;
  int error = 0;  // a cudaError_t; 0 is success
};

}  // namespace cairn::kernels::cuda
