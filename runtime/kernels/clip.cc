#include "runtime/kernels/clip.h"

namespace cairn::kernels {

void clip_by_norm(const double* words, const ClipNumbers* numbers, const double* ruined, Clip* out) {
  *out = clip_of(ExactSum::from(std::span<const double, ExactSum::kWords>(words, ExactSum::kWords)).value(), *numbers);
  if (ruined != nullptr && *ruined != 0) out->finite = 0;
}

}  // namespace cairn::kernels
