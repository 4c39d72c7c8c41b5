#pragma once
// What a CPU's kernels take beside the plan's buffers: their scratch (runtime/kernels/scratch.h), which depends on the
// model, the layout and the number of threads, but on no processor.

#include "runtime/kernels/scratch.h"
#include "runtime/plan/plan.h"

namespace cairn::nn {

/// For training, of a rank in any phase of its batch. At most: of each kernel the largest call that the rank makes.
kernels::ScratchBytes kernel_scratch(const Plan& plan, int64_t rank);

}  // namespace cairn::nn
