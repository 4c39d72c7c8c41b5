#pragma once
// The angles of rotary positions as the model scales them, for kernels::rotary_table().

#include <vector>

#include "runtime/config/model.h"

namespace cairn::nn {

struct RotaryAngles {
  std::vector<float> frequencies;  // [rotary_dims / 2], radians a position
  double factor = 1;               // of cosines and sines
};

/// In float32, step by step as transformers and Megatron compute them: the models that are published were trained with
/// these roundings, and at position 100,000 they turn by up to 4e-3 from the exact angle.
/// For samples of `tokens` tokens: the dynamic scaling and longrope depend on them.
/// `window`: of the layers that model.window_rope_theta is for.
/// Source: transformers, modeling_rope_utils.py; yarn: Peng et al. 2023, llama3: Meta's Llama 3.1 code, longrope: Ding
/// et al. 2024 as Phi-3 has it.
RotaryAngles rotary_angles(const ModelConfig& model, int64_t tokens, bool window = false);

/// Positions as the factor of queries counts them: it grows where this is a multiple of model.temperature_floor.
int64_t temperature_count(const ModelConfig& model, int64_t position);
/// The factor of queries at a position (model.temperature_scale). Source: transformers models/llama4,
/// models/ministral3.
double query_temperature(const ModelConfig& model, int64_t position);

}  // namespace cairn::nn
