#pragma once
// Copies between a CUDA device and the host, on a stream of their own.

#include <functional>
#include <memory>

#include "runtime/core/result.h"
#include "runtime/core/word_sums.h"
#include "runtime/cuda/api.h"
#include "runtime/device/device_link.h"

namespace cairn {

/// word_sums of `count` runs, which a table on the device names: runtime/kernels/cuda/state.h. Gives a cudaError_t.
using SumRuns = int (*)(CUstream_st* on, const WordRun* runs, int64_t count, int64_t chunks, uint64_t* partials,
                        uint64_t* sums);

struct CudaLinkOptions {
  /// The stream that follow_work() waits for, of the same device, with all work that writes the copied memory. Null:
  /// the legacy default stream, with which all but non-blocking streams are in step.
  cuda::StreamHandle work = nullptr;
  int64_t deadline_ms = 0;  // of each wait for the device; 0: none
  /// Kernels for the device's word_sums, and memory of the device for them, asked for at sum_up(). Null: it takes none.
  SumRuns sum_runs = nullptr;
  std::function<DeviceBytes()> room;
};

/// Device memory for the sums of `arrays` arrays, which have `bytes` bytes in all.
int64_t sum_room_bytes(int64_t arrays, int64_t bytes);

/// `api` outlives the link. Each call makes `device` the calling thread's current one. Destroy the link before the host
/// memory that it uses is unmapped. Errors: kUnavailable when there is no such device or no driver.
Result<std::unique_ptr<DeviceLink>> make_cuda_link(const cuda::Api& api, int device,
                                                   const CudaLinkOptions& options = {});

/// Devices that make_cuda_link() would take; 0 without a driver.
int cuda_devices(const cuda::Api& api);

}  // namespace cairn
