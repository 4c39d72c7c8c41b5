#include "runtime/nn/rotary.h"

#include <algorithm>
#include <cmath>

#include "runtime/plan/model_tensors.h"

namespace cairn::nn {
namespace {

constexpr double kPi = 3.14159265358979323846;

/// Wavelengths shorter than original / high stay, longer than original / low are divided, those between are blended.
double llama3_frequency(const RopeConfig& rope, double original, double frequency) {
  const double turns = original * frequency / (2 * kPi);  // in the original context
  if (turns > rope.high_freq_factor) return frequency;
  if (turns < rope.low_freq_factor) return frequency / rope.factor;
  const double smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - smooth) * frequency / rope.factor + smooth * frequency;
}

/// The dimension, as a real number, that makes `turns` turns in the original context.
double yarn_dimension(double turns, double dims, double base, double original) {
  return dims * std::log(original / (turns * 2 * kPi)) / (2 * std::log(base));
}

void scale_yarn(const RopeConfig& rope, double base, double dims, double original, std::vector<double>& frequencies) {
  double low = yarn_dimension(rope.beta_fast, dims, base, original);
  double high = yarn_dimension(rope.beta_slow, dims, base, original);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1);
  if (low == high) high += 0.001;  // as the source does: a step, not a division by zero
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double scaled = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / rope.factor * scaled + frequencies[i] * (1 - scaled);
  }
}

double yarn_mscale(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1; }

double yarn_factor(const RopeConfig& rope) {
  if (rope.attention_factor > 0) return rope.attention_factor;
  if (rope.mscale > 0 && rope.mscale_all_dim > 0) {
    return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim);
  }
  return yarn_mscale(rope.factor, 1);
}

double longrope_factor(const RopeConfig& rope, double original) {
  if (rope.attention_factor > 0) return rope.attention_factor;
  return rope.factor <= 1 ? 1 : std::sqrt(1 + std::log(rope.factor) / std::log(original));
}

}  // namespace

RotaryAngles rotary_angles(const ModelConfig& model, int64_t tokens, bool window) {
  const RopeConfig& rope = model.rope;
  const RopeScaling scaling = window ? RopeScaling::kNone : rope.scaling;
  const auto dims = static_cast<double>(rotary_dims(model));
  const auto original = static_cast<double>(rope.original_context > 0 ? rope.original_context : model.context);
  double base = window ? model.window_rope_theta : model.rope_theta;
  if (scaling == RopeScaling::kDynamic) {
    const double length = std::max(static_cast<double>(tokens), original);
    base *= std::pow(rope.factor * length / original - (rope.factor - 1), dims / (dims - 2));
  }
  RotaryAngles out;
  for (int64_t i = 0; i < rotary_dims(model) / 2; ++i) {
    double frequency = std::pow(base, -2.0 * static_cast<double>(i) / dims);
    if (scaling == RopeScaling::kLinear) frequency /= rope.factor;
    if (scaling == RopeScaling::kLlama3) frequency = llama3_frequency(rope, original, frequency);
    out.frequencies.push_back(frequency);
  }
  if (scaling == RopeScaling::kYarn) {
    scale_yarn(rope, base, dims, original, out.frequencies);
    out.factor = yarn_factor(rope);
  } else if (scaling == RopeScaling::kLongRope) {
    const std::vector<double>& divisors = static_cast<double>(tokens) > original ? rope.long_factor : rope.short_factor;
    for (size_t i = 0; i < out.frequencies.size(); ++i) out.frequencies[i] /= divisors[i];
    out.factor = longrope_factor(rope, original);
  }
  return out;
}

int64_t temperature_count(const ModelConfig& model, int64_t position) {
  return model.temperature_form == TemperatureForm::kLlama4 ? position + 1 : position;
}

double query_temperature(const ModelConfig& model, int64_t position) {
  const auto steps = static_cast<double>(temperature_count(model, position) / model.temperature_floor);
  return 1 + model.temperature_scale * std::log(1 + steps);
}

}  // namespace cairn::nn
