#include "runtime/trainer/initial.h"

#include <vector>

#include "runtime/core/random.h"

namespace cairn::trainer {

void initial_weights(const Plan& plan, int64_t tensor, const Box& box, float* out) {
  const TensorSpec& spec = plan.tensors[tensor];
  const uint64_t key = stream_key(plan.recipe.seed, spec.name);
  // A box of at most two dims: rows of `width` elements, each a function of its global index alone.
  const int64_t width = box.extent(box.dims() - 1);
  const int64_t rows = box.count_elems() / width;
#pragma omp parallel for if (rows * width > 1 << 16)
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<int64_t> index = box.lo;
    index[0] += row;
    const int64_t first = flat_offset(spec.shape, index);
    for (int64_t k = 0; k < width; ++k) {
      out[row * width + k] = spec.init == InitKind::kOnes ? 1.0f
                             : spec.init == InitKind::kNormal
                                 ? static_cast<float>(spec.init_std) * normal_at(key, first + k)
                                 : 0.0f;
    }
  }
}

}  // namespace cairn::trainer
