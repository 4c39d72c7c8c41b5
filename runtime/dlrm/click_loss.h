#pragma once
// The loss of clicks, and what is said of scores: accuracy and AUC.

#include <cstdint>
#include <span>

#include "runtime/config/dlrm.h"
#include "runtime/core/result.h"

namespace cairn::dlrm {

/// Returns the sum of the samples' losses, taken from the logits, so that a saturated sigmoid loses no digits. Writes
/// the probabilities, and `factor` times the gradient of each sample's loss by its logit. Either may be null.
template <typename T>
double click_loss(ClickLoss loss, const T* logits, const float* labels, int64_t samples, double factor, T* scores,
                  T* dlogits);

/// Part of the samples whose score, rounded, is the label: a score above 0.5 says 1. 0 without samples.
double accuracy(std::span<const float> scores, std::span<const float> labels);

/// Area under the ROC curve: the chance that a clicked sample has the higher score of a pair, a tie counts half.
/// Memory: an index a sample. Errors: kInvalidInput where scores and labels differ in number, a score is NaN, a label
/// is neither 0 nor 1, or all labels are equal (then the area is not defined).
Result<double> area_under_curve(std::span<const float> scores, std::span<const float> labels);

}  // namespace cairn::dlrm
