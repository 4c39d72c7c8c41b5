#pragma once
// What matmul() comes to, for tests of each instruction set.

#include "runtime/kernels/gemm_kernel.h"
#include "runtime/kernels/matmul.h"

namespace cairn::kernels {

/// Packed blocks of A and B, of any dtypes; arguments are checked, m, n, k > 0. The calling thread keeps up to 6 MiB of
/// packed B, all of A where several threads share its parts, and as much as 2048 rows of B's columns there take in
/// float when a 16-bit result has its sum in chunks (with MatmulArgs::parts as often as a tree has levels); each thread
/// a part of A (GemmKernel::part_words).
void matmul_packed(const MatmulArgs& args, GemmIsa isa);

}  // namespace cairn::kernels
