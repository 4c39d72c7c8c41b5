#pragma once
// A CUDA device for a trainer in tests: the doubles of the runtime and of cuBLASLt, the kernels on the executor.

#include <memory>

#include "runtime/cuda/machine/machine.h"
#include "runtime/cuda/ops/ops.h"
#include "tests/runtime/cuda/cuda_machine.h"
#include "tests/simt/blas_double.h"

namespace cairn::testing {

/// Of one process.
class TrainedDouble {
 public:
  explicit TrainedDouble(uint64_t seed) : cuda(seed, int64_t{1} << 26) {}
  ~TrainedDouble() {
    CHECK(cuda.misuses().empty());
    CHECK(cuda.left().empty());
    CHECK(products.misuses().empty());
    CHECK(products.left() == 0);
  }

  Result<std::unique_ptr<cuda::CudaMachine>> open() {
    const cuda::KernelTables tables{.of_f32 = &cuda::ops<float>(),
                                    .of_bf16 = &cuda::ops<bf16>(),
                                    .of_f16 = &cuda::ops<f16>(),
                                    .state = &cuda::state_ops(),
                                    .scratch_bytes = &cuda::scratch_bytes};
    return cuda::CudaMachine::open(runtime.api(), products.api(), tables, {.product_bytes = int64_t{1} << 16});
  }

  simt::StreamDouble cuda;
  simt::CudaApi runtime{cuda};
  simt::BlasDouble products{cuda};
};

}  // namespace cairn::testing
