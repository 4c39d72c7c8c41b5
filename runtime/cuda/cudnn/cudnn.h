#pragma once
// cuDNN behind runtime/cuda/cudnn_attention.h. With the preset `cuda` alone, where cudnn-frontend's headers are.

#include "runtime/cuda/cudnn_attention.h"

namespace cairn::cuda {

/// Opens cuDNN for device `index`, which is the calling thread's current one. What it builds is run on that device.
/// Errors: kUnavailable, kUnsupported, saying what is missing.
Result<AttentionLibrary> open_cudnn(const Api& api, int index);

}  // namespace cairn::cuda
