#pragma once
// A run that begins with the weights of a Hugging Face folder (T.hf in a recipe): the folder as ckpt::ForeignWeights.

#include "ckpt/foreign.h"
#include "runtime/config/model.h"

namespace cairn::tools {

/// For runs of `model`. Opening fails with kInvalidInput when the folder's config.json says another model: switches
/// that shapes do not show (rotary base, epsilon, activation ...) are compared one by one. What shapes show is left to
/// the match of tensors, and a context may be another one where no table of positions depends on it.
ckpt::OpenForeign open_hf_for(const ModelConfig& model);

}  // namespace cairn::tools
