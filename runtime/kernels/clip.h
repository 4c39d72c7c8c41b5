#pragma once
// Clipping gradients by their global norm (Pascanu et al. 2013), without the host: from the squared norm, as ranks have
// added it up, comes the factor that update rules read where they run. Where the norm is not finite they write nothing.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "runtime/core/exact_sum.h"
#include "runtime/device/pointer.h"

namespace cairn::kernels {

/// What the host knows of a step's gradients.
struct ClipNumbers {
  double most = 0;            // the largest norm; 0: any
  double gradient_scale = 1;  // by which the mean loss of the tokens that count is more than that of all
  double loss_scale = 1;      // by which they are too large
};

/// What is left to know, on the device.
struct Clip {
  double norm = 0;       // of the gradients as they count
  float grad_scale = 1;  // by which they are multiplied
  int32_t finite = 1;    // whether the norm is, and all that the update depends on
};

/// norm = sqrt(squares) / loss_scale * gradient_scale; grad_scale = min(1, most / (norm + 1e-6)) of what makes
/// gradients count, as torch.nn.utils.clip_grad_norm_ has it.
inline Clip clip_of(double squares, const ClipNumbers& of) {
  const double norm = std::sqrt(squares) / of.loss_scale * of.gradient_scale;
  const double scale = of.most > 0 ? std::min(1.0, of.most / (norm + 1e-6)) : 1.0;
  return {norm, static_cast<float>(scale * of.gradient_scale / of.loss_scale), std::isfinite(norm) ? 1 : 0};
}

/// words [ExactSum::kWords] of the squared norm, numbers and out [1]. `ruined` [1]: where it is not 0, as of losses
/// that are not finite, `out` is not finite either, whatever the norm; may be null. `counted` [1]: ClipNumbers'
/// gradient_scale is divided by it; may be null.
void clip_by_norm(const double* words, const ClipNumbers* numbers, const double* ruined, const double* counted,
                  Clip* out);

}  // namespace cairn::kernels
