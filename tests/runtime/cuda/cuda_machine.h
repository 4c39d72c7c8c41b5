#pragma once
// A device that is a double (tests/simt/cuda_api.h), for tests of what orders work on one.

#include <doctest/doctest.h>

#include <memory>

#include "runtime/cuda/context.h"
#include "tests/simt/cuda_api.h"
#include "tests/support/ok.h"

namespace cairn::testing {

struct CudaMachine {
  explicit CudaMachine(uint64_t seed, int64_t memory_bytes = int64_t{1} << 24)
      : cuda(seed, memory_bytes), runtime(cuda) {}

  std::shared_ptr<cuda::Context> open() {
    auto opened = cuda::Context::open(runtime.api(), 0);
    REQUIRE_OK(opened);
    return std::move(opened).value();
  }

  simt::StreamDouble cuda;
  simt::CudaApi runtime;
};

}  // namespace cairn::testing
