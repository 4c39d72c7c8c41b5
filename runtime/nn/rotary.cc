#include "runtime/nn/rotary.h"

#include <algorithm>
#include <cmath>

#include "runtime/plan/model_tensors.h"

namespace cairn::nn {
namespace {

constexpr double kPi = 3.14159265358979323846;

float f32(double x) { return static_cast<float>(x); }

/// Wavelengths shorter than original / high stay, longer than original / low are divided, those between are blended.
float llama3_frequency(const RopeConfig& rope, float original, float frequency) {
  const float turns = original / (f32(2 * kPi) / frequency);  // in the original context
  const float factor = f32(rope.factor);
  if (turns > rope.high_freq_factor) return frequency;
  if (turns < rope.low_freq_factor) return frequency / factor;
  const float smooth = (turns - f32(rope.low_freq_factor)) / f32(rope.high_freq_factor - rope.low_freq_factor);
  return (1 - smooth) * frequency / factor + smooth * frequency;
}

/// The dimension, as a real number, that makes `turns` turns in the original context.
double yarn_dimension(double turns, double dims, double base, double original) {
  return dims * std::log(original / (turns * 2 * kPi)) / (2 * std::log(base));
}

/// `powers`: of the base, one over which is a frequency.
std::vector<float> yarn_frequencies(const RopeConfig& rope, double base, double dims, double original,
                                    const std::vector<float>& powers) {
  double low = yarn_dimension(rope.beta_fast, dims, base, original);
  double high = yarn_dimension(rope.beta_slow, dims, base, original);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1);
  if (low == high) high += 0.001;  // as the source does: a step, not a division by zero
  std::vector<float> out;
  for (size_t i = 0; i < powers.size(); ++i) {
    const float ramp = std::clamp((static_cast<float>(i) - f32(low)) / f32(high - low), 0.0f, 1.0f), kept = 1 - ramp;
    out.push_back(1 / (f32(rope.factor) * powers[i]) * (1 - kept) + 1 / powers[i] * kept);
  }
  return out;
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
  std::vector<float> powers;
  for (int64_t i = 0; i < rotary_dims(model) / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / f32(dims);
    powers.push_back(f32(std::pow(static_cast<double>(f32(base)), static_cast<double>(exponent))));
  }
  RotaryAngles out;
  if (scaling == RopeScaling::kYarn) {
    out.frequencies = yarn_frequencies(rope, base, dims, original, powers);
    out.factor = yarn_factor(rope);
    return out;
  }
  const bool longrope = scaling == RopeScaling::kLongRope;
  const std::vector<double>& divisors = static_cast<double>(tokens) > original ? rope.long_factor : rope.short_factor;
  for (size_t i = 0; i < powers.size(); ++i) {
    float frequency = 1 / (longrope ? f32(divisors[i]) * powers[i] : powers[i]);
    if (scaling == RopeScaling::kLinear) frequency /= f32(rope.factor);
    if (scaling == RopeScaling::kLlama3) frequency = llama3_frequency(rope, f32(original), frequency);
    out.frequencies.push_back(frequency);
  }
  if (longrope) out.factor = longrope_factor(rope, original);
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
