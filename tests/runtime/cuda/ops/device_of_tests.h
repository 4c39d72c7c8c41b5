#pragma once
// The device on which ops_test compares: the doubles of the runtime and of cuBLASLt, with the kernels on the executor;
// in gpu_ops_tests (CAIRN_ON_DEVICE) the first CUDA device of the machine.

#include <doctest/doctest.h>

#include <memory>
#include <string>

#include "runtime/cuda/blas_api.h"
#include "runtime/cuda/context.h"
#ifdef CAIRN_ON_DEVICE
#include "runtime/cuda/linked/linked_api.h"
#include "tests/support/ok.h"
#else
#include "tests/runtime/cuda/cuda_machine.h"
#include "tests/simt/blas_double.h"
#include "tests/simt/reports.h"
#endif

namespace cairn::testing {

#ifdef CAIRN_ON_DEVICE

class DeviceOfTests {
 public:
  std::shared_ptr<cuda::Context> open() {
    auto opened = cuda::Context::open(cuda::linked_api(), 0);
    REQUIRE_OK(opened);
    return std::move(opened).value();
  }
  const cuda::BlasApi& products() {
    static const auto loaded = cuda::load_blas(cuda::library_candidates("libcublasLt.so.13"));
    REQUIRE_OK(loaded);
    return loaded.value().api;
  }
  void check_use() {}
  void check_left() {}
};

#else

class DeviceOfTests {
 public:
  std::shared_ptr<cuda::Context> open() { return machine_.open(); }
  const cuda::BlasApi& products() { return products_.api(); }
  /// Nothing that a program may not do.
  void check_use() {
    CHECK(machine_.cuda.misuses() == std::vector<std::string>());
    CHECK(products_.misuses() == std::vector<std::string>());
  }
  /// All is given back, and the kernels are not complained of.
  void check_left() {
    CHECK(products_.left() == 0);
    std::string reports;
    for (const std::string& line : simt::take_reports()) reports += line + "\n";
    CHECK(reports == "");
  }
  simt::BlasDouble& library() { return products_; }
  int64_t launches() { return machine_.cuda.take_counts().launches; }

 private:
  CudaMachine machine_{7, int64_t{1} << 24};
  simt::BlasDouble products_{machine_.cuda};
};

#endif

}  // namespace cairn::testing
