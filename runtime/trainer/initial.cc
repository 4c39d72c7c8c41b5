#include "runtime/trainer/initial.h"

#include "runtime/core/check.h"
#include "runtime/core/random.h"

namespace cairn::trainer {

kernels::FirstWeights first_weights(const Plan& plan, int64_t tensor, const Box& box) {
  using Kind = kernels::FirstWeights::Kind;
  const TensorSpec& spec = plan.tensors[tensor];
  const int64_t dims = box.dims(), width = box.extent(dims - 1);
  RT_CHECK(dims <= 2, "a box of {} dims", dims);
  return {.kind = spec.init == InitKind::kOnes     ? Kind::kOnes
                  : spec.init == InitKind::kNormal ? Kind::kNormal
                                                   : Kind::kZeros,
          .key = stream_key(plan.recipe.seed, spec.name),
          .std = static_cast<float>(spec.init_std),
          .rows = box.count_elems() / width,
          .width = width,
          .first = flat_offset(spec.shape, box.lo),
          .stride = dims == 2 ? spec.shape[1] : 0};
}

void initial_weights(const Plan& plan, int64_t tensor, const Box& box, float* out) {
  kernels::draw_weights(first_weights(plan, tensor, box), out);
}

}  // namespace cairn::trainer
