#pragma once
// The two ways of matmul(). Both take checked arguments with m, n, k > 0.

#include "runtime/kernels/matmul.h"

namespace cairn::kernels {

/// One oneDNN primitive on the caller's memory as it lies.
Status matmul_onednn(const MatmulArgs& args);

/// Blocks of A and B are first copied into f32 scratch with harmless leading dimensions, then multiplied in f32.
/// The scratch of a thread stays below 28 MiB whatever the shape.
Status matmul_panels(const MatmulArgs& args);

/// The arguments in words, for errors.
std::string describe(const MatmulArgs& args);

}  // namespace cairn::kernels
