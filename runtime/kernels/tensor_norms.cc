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

void clear_numbers(std::span<double> numbers) { std::ranges::fill(numbers, 0.0); }

}  // namespace cairn::kernels
