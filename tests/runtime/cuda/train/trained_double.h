#pragma once
// A CUDA device for a trainer in tests: the doubles of the runtime and of cuBLASLt, the kernels on the executor. What
// CUDA has no kernel for yet does the CPU's, late and in its stream like any other, so that the trainer can be tested
// before the last kernel is there.

#include <algorithm>
#include <memory>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/cuda/machine/machine.h"
#include "runtime/cuda/ops/ops.h"
#include "tests/runtime/cuda/cuda_machine.h"
#include "tests/simt/blas_double.h"

namespace cairn::testing {

/// The CPU's kernel as work of a stream of the double.
template <typename Cpu, Cpu* kFunction>
struct Late;
template <typename... A, void (*kFunction)(A...)>
struct Late<void(A...), kFunction> {
  static inline simt::StreamDouble* on = nullptr;
  static void run(Stream& stream, typename kernels::Param<A>::Type... of) {
    cuda::CudaStream& cuda = cuda::cuda_stream(stream);
    if (!cuda.ready()) return;
    cuda.keep(on->launch(cuda.handle(), [=] { kFunction(kernels::Param<A>::on_cpu(of)...); }), "a CPU's kernel");
  }
};

inline bool is_missing(std::string_view op) {
  const auto all = cuda::missing_ops();
  return std::find(all.begin(), all.end(), op) != all.end();
}

/// Of one process.
class TrainedDouble {
 public:
  explicit TrainedDouble(uint64_t seed) : cuda(seed, int64_t{1} << 26) {
    fill(f32_);
    fill(bf16_);
    fill(f16_);
  }
  ~TrainedDouble() {
    CHECK(cuda.misuses().empty());
    CHECK(cuda.left().empty());
    CHECK(products.misuses().empty());
    CHECK(products.left() == 0);
  }

  Result<std::unique_ptr<cuda::CudaMachine>> open() {
    const cuda::KernelTables tables{.of_f32 = &f32_,
                                    .of_bf16 = &bf16_,
                                    .of_f16 = &f16_,
                                    .state = &cuda::state_ops(),
                                    .scratch_bytes = &cuda::scratch_bytes};
    return cuda::CudaMachine::open(runtime.api(), products.api(), tables, {.product_bytes = int64_t{1} << 16});
  }

  simt::StreamDouble cuda;
  simt::CudaApi runtime{cuda};
  simt::BlasDouble products{cuda};

 private:
  template <typename Cpu, Cpu* kFunction>
  auto late() {
    Late<Cpu, kFunction>::on = &cuda;
    return &Late<Cpu, kFunction>::run;
  }
  template <typename T>
  void fill(kernels::Ops<T>& table) {
    using kernels::attention_backward;
    using kernels::attention_forward;
    table = cuda::ops<T>();
    if (is_missing("attention_forward")) {
      table.attention_forward = late<std::remove_pointer_t<decltype(&attention_forward<T>)>, &attention_forward<T>>();
    }
    if (is_missing("attention_backward")) {
      table.attention_backward = late<kernels::AttentionBackward<T>, &attention_backward<T, T>>();
    }
  }

  kernels::Ops<float> f32_;
  kernels::Ops<bf16> bf16_;
  kernels::Ops<f16> f16_;
};

}  // namespace cairn::testing
