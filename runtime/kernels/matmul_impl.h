#pragma once
// What matmul() comes to, for tests of each instruction set.

#include "runtime/kernels/gemm_kernel.h"
#include "runtime/kernels/matmul.h"

namespace cairn::kernels {

/// Packed blocks of A and B, of any dtypes; arguments are checked, m, n, k > 0. Its scratch: matmul_scratch().
void matmul_packed(const MatmulArgs& args, GemmIsa isa);

}  // namespace cairn::kernels
