#pragma once
// Copies between a CUDA device and the host, on a stream of their own.

#include <memory>

#include "runtime/core/result.h"
#include "runtime/cuda/api.h"
#include "runtime/device/device_link.h"

namespace cairn {

/// `api` outlives the link. `work`: the stream that follow_work() waits for, of the same device, with all work that
/// writes the copied memory. Null: the legacy default stream, with which all but non-blocking streams are in step. Each
/// call makes `device` the calling thread's current one. Destroy the link before the host memory that it uses is
/// unmapped. Errors: kUnavailable when there is no such device or no driver.
Result<std::unique_ptr<DeviceLink>> make_cuda_link(const cuda::Api& api, int device, cuda::StreamHandle work = nullptr);

/// Devices that make_cuda_link() would take; 0 without a driver.
int cuda_devices(const cuda::Api& api);

}  // namespace cairn
