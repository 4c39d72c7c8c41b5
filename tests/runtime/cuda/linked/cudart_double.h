#pragma once
// What tests may ask of the double of the CUDA runtime (cudart_double.cc), and have it do.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace cairn::cudart_double {

/// The call after `calls` more is refused with `error`; `from_then_on`: and all after it, as after a fault of the
/// device. What gives something back gives it back all the same.
void refuse_call(int64_t calls, cudaError_t error, bool from_then_on);

/// No longer. Whether a call was refused.
bool refuse_no_more();

/// What no program may do and a real runtime need not notice, in words; forgotten then.
std::vector<std::string> misuses();

/// What is still there, in words.
std::vector<std::string> left();

/// Devices that a call was made on that needs a context there. A real one takes hundreds of MiB.
std::vector<int> devices_used();

/// Copies from or to host memory that is not pinned.
int64_t pageable_copies();

}  // namespace cairn::cudart_double
