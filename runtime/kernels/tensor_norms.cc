#include "runtime/kernels/tensor_norms.h"

#include <algorithm>

#include "runtime/core/check.h"

namespace cairn::kernels {

void TensorNorms::add(ExactSum more_weight, ExactSum more_step) const {
  RT_CHECK(std::ssize(words) == kWords, "{} words for the norms of a tensor", words.size());
  more_weight.add(weight());
  more_step.add(step());
  std::ranges::copy(more_weight.words(), words.begin());
  std::ranges::copy(more_step.words(), words.begin() + ExactSum::kWords);
}

void add_norms_of_runs(std::span<const NormRun> runs, const double* partials, double* words) {
  for (const NormRun& run : runs) {
    const TensorNorms to{{words + run.tensor * TensorNorms::kWords, static_cast<size_t>(TensorNorms::kWords)}};
    for (int64_t chunk = 0; chunk < norm_chunks(run.count); ++chunk, partials += TensorNorms::kWords) {
      const std::span part(partials, static_cast<size_t>(TensorNorms::kWords));
      to.add(ExactSum::from(part.first<ExactSum::kWords>()), ExactSum::from(part.last<ExactSum::kWords>()));
    }
  }
}

}  // namespace cairn::kernels
