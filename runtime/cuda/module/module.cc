#include "runtime/cuda/machine/module.h"

#include <build_version.inc>

#ifdef CAIRN_CUDNN
#include "runtime/cuda/cudnn/cudnn.h"
#endif
#include "runtime/cuda/linked/linked_api.h"
#include "runtime/cuda/ops/ops.h"
#include "runtime/kernels/cuda/attention.h"
#include "runtime/kernels/cuda/state.h"

namespace cairn::cuda {

// Alone of this module to be seen from outside. Its parts of runtime/cuda and below are copies, whose code works on the
// program's objects; they have no state of their own.
extern "C" {
[[gnu::visibility("default")]] extern const Module cairn_cuda_module;
const Module cairn_cuda_module = {
    .tree_version = CAIRN_TREE_VERSION, .api = &linked_api, .kernels = []() -> KernelTables {
      return {.of_f32 = &ops<float>(),
              .of_bf16 = &ops<bf16>(),
              .of_f16 = &ops<f16>(),
              .state = &state_ops(),
              .scratch_bytes = &scratch_bytes,
              .rank_sums = &kernels::cuda::rank_sums(),
              .sum_runs = &kernels::cuda::sum_runs,
#ifdef CAIRN_CUDNN
              .cudnn = &open_cudnn,
#endif
              .has_warpgroups = &kernels::cuda::has_warpgroups};
    }};
}

}  // namespace cairn::cuda
