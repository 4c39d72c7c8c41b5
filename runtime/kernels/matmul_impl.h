#pragma once
// The two ways of matmul(). Both take checked arguments with m, n, k > 0.

#include "runtime/kernels/gemm_kernel.h"
#include "runtime/kernels/matmul.h"

namespace cairn::kernels {

/// One oneDNN primitive on the caller's memory as it lies.
Status matmul_onednn(const MatmulArgs& args);

/// Own kernels on packed blocks of A and B, for any dtypes. The calling thread keeps up to 6 MiB of packed B, and as
/// much as 2048 rows of B's columns there take in float when a 16-bit result has its sum in parts; each thread 384 KiB
/// of A.
void matmul_packed(const MatmulArgs& args, GemmIsa isa);

/// The arguments in words, for errors.
std::string describe(const MatmulArgs& args);

}  // namespace cairn::kernels
