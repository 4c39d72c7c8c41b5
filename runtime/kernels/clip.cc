#include "runtime/kernels/clip.h"

namespace cairn::kernels {

void clip_by_norm(const double* words, const ClipNumbers* numbers, const double* ruined, const double* counted,
                  Clip* out) {
  ClipNumbers of = *numbers;
  if (counted != nullptr) of.gradient_scale /= *counted;
  *out = clip_of(ExactSum::from(std::span<const double, ExactSum::kWords>(words, ExactSum::kWords)).value(), of);
  if (ruined != nullptr && *ruined != 0) out->finite = 0;
}

}  // namespace cairn::kernels
