#include "ckpt/merge_rule.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "runtime/core/random.h"

namespace cairn::ckpt {
namespace {

constexpr int kBinBits = 16;
constexpr double kParallel = 0.9995;  // cosine beyond which two vectors have no arc to walk on
constexpr double kNoLength = 1e-8;
constexpr double kNoDivisor = 1e-8;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

bool agrees_on_sign(MergeMethod method) { return method == MergeMethod::kTies || method == MergeMethod::kDareTies; }

/// Orders magnitudes as numbers; what is no number comes above all.
uint32_t magnitude_bits(double value) { return std::bit_cast<uint32_t>(static_cast<float>(value)) & 0x7fffffffu; }

}  // namespace

std::string_view merge_method_name(MergeMethod method) {
  switch (method) {
    case MergeMethod::kLinear:
      return "linear";
    case MergeMethod::kTaskArithmetic:
      return "task_arithmetic";
    case MergeMethod::kTies:
      return "ties";
    case MergeMethod::kDareLinear:
      return "dare_linear";
    case MergeMethod::kDareTies:
      return "dare_ties";
    case MergeMethod::kSlerp:
      return "slerp";
  }
  return "";
}

bool draws(MergeMethod method) { return method == MergeMethod::kDareLinear || method == MergeMethod::kDareTies; }
bool needs_base(MergeMethod method) { return method != MergeMethod::kLinear && method != MergeMethod::kSlerp; }
bool reads_density(MergeMethod method) { return method == MergeMethod::kTies || draws(method); }
bool normalizes(MergeMethod method) { return method == MergeMethod::kLinear || method == MergeMethod::kTies; }

Status check_merge_rule(const MergeRule& rule, size_t sources) {
  const std::string_view name = merge_method_name(rule.method);
  const size_t least = needs_base(rule.method) ? 1 : 2;
  if (sources < least) {
    return invalid(fmt::format("a merge ({}) is of {} or more, got {}", name,
                               least == 1 ? "one checkpoint" : "two checkpoints", sources));
  }
  if (rule.method == MergeMethod::kSlerp) {
    if (sources != 2) return invalid(fmt::format("slerp is of two checkpoints, got {}", sources));
    if (!(rule.t >= 0 && rule.t <= 1)) return invalid(fmt::format("t = {} is not from 0 to 1", rule.t));
    return {};
  }
  if (rule.weights.size() != sources)
    return invalid(fmt::format("{} weights for {} checkpoints", rule.weights.size(), sources));
  for (const double weight : rule.weights) {
    if (!std::isfinite(weight)) return invalid(fmt::format("weight {} is no number", weight));
  }
  const double total = std::accumulate(rule.weights.begin(), rule.weights.end(), 0.0);
  if (!std::isfinite(total)) return invalid("the sum of the weights is too large for a double");
  if (rule.method == MergeMethod::kLinear && rule.normalize && std::abs(total) < kNoDivisor)
    return invalid(fmt::format("the weights add up to {}, and the mean is divided by their sum", total));
  if (!std::isfinite(rule.lambda)) return invalid(fmt::format("lambda {} is no number", rule.lambda));
  if (!reads_density(rule.method)) return {};
  if (rule.densities.size() != sources)
    return invalid(fmt::format("{} densities for {} checkpoints", rule.densities.size(), sources));
  for (const double density : rule.densities) {
    if (!(density > 0 && density <= 1)) return invalid(fmt::format("density {} is not above 0 and up to 1", density));
  }
  return {};
}

TensorMerge::TensorMerge(const MergeRule& rule, std::string_view tensor, int64_t elems)
    : rule_(rule), elems_(elems), sources_(rule.weights.size()) {
  if (!reads_density(rule.method)) return;
  for (size_t i = 0; i < sources_.size(); ++i) {
    Source& source = sources_[i];
    source.all = rule.densities[i] >= 1;
    if (source.all) continue;
    if (draws(rule.method)) {
      source.key = stream_key(rule.seed + i * 0x9E3779B97F4A7C15ull, tensor);
    } else {
      source.left = static_cast<uint64_t>(std::max(1.0, std::floor(rule.densities[i] * static_cast<double>(elems))));
      source.bins.assign(size_t{1} << kBinBits, 0);
    }
  }
}

int TensorMerge::passes(MergeMethod method) {
  switch (method) {
    case MergeMethod::kLinear:
    case MergeMethod::kTaskArithmetic:
      return 0;
    case MergeMethod::kTies:
      return 2;
    default:
      return 1;
  }
}

void TensorMerge::look(int pass, const MergePiece& piece) {
  if (rule_.method == MergeMethod::kSlerp) {
    const std::vector<double>&a = piece.sources[0], &b = piece.sources[1];
    for (size_t e = 0; e < a.size(); ++e) {
      squares_[0] += a[e] * a[e];
      squares_[1] += b[e] * b[e];
      dot_ += a[e] * b[e];
    }
    return;
  }
  for (size_t i = 0; i < sources_.size(); ++i) {
    Source& source = sources_[i];
    if (source.all) continue;
    const std::vector<double>& values = piece.sources[i];
    for (size_t e = 0; e < values.size(); ++e) {
      const double delta = values[e] - piece.base[e];
      if (draws(rule_.method)) {
        const double size = std::abs(delta);
        source.sum += size;
        if (uniform_at(source.key, static_cast<uint64_t>(piece.index[e])) < rule_.densities[i]) source.kept += size;
        continue;
      }
      const uint32_t bits = magnitude_bits(delta);
      if (pass == 0) {
        ++source.bins[bits >> kBinBits];
      } else if (bits >> kBinBits == source.least >> kBinBits) {
        ++source.bins[bits & ((1u << kBinBits) - 1)];
      }
    }
  }
}

void TensorMerge::end_pass(int pass) {
  if (rule_.method == MergeMethod::kSlerp) {
    double length[2];
    for (int k = 0; k < 2; ++k) length[k] = std::sqrt(squares_[k]) > kNoLength ? std::sqrt(squares_[k]) : 1;
    const double cosine = dot_ / length[0] / length[1], angle = std::acos(cosine), t = rule_.t;
    const bool parallel = std::abs(cosine) > kParallel;
    factors_[0] = parallel ? 1 - t : std::sin(angle - angle * t) / std::sin(angle);
    factors_[1] = parallel ? t : std::sin(angle * t) / std::sin(angle);
    return;
  }
  for (Source& source : sources_) {
    if (source.all) continue;
    if (draws(rule_.method)) {
      constexpr double kNothing = 1e-7;
      if (source.sum >= kNothing && source.kept >= kNothing) source.scale = source.sum / source.kept;
      continue;
    }
    uint32_t bin = (1u << kBinBits) - 1;  // from the greatest down to the one that holds the last element to keep
    for (; bin > 0 && static_cast<uint64_t>(source.bins[bin]) < source.left; --bin)
      source.left -= static_cast<uint64_t>(source.bins[bin]);
    source.least = pass == 0 ? bin << kBinBits : source.least | bin;
    source.bins = std::vector<int64_t>(pass == 0 ? source.bins.size() : 0);  // they are held for one tensor at a time
  }
}

double TensorMerge::kept_delta(size_t i, const MergePiece& piece, size_t element) const {
  const double delta = piece.sources[i][element] - piece.base[element];
  const Source& source = sources_[i];
  if (source.all) return delta;
  if (!draws(rule_.method)) return magnitude_bits(delta) >= source.least ? delta : 0;
  const bool kept = uniform_at(source.key, static_cast<uint64_t>(piece.index[element])) < rule_.densities[i];
  return kept ? delta * source.scale : 0;
}

void TensorMerge::merge_linear(const MergePiece& piece, std::span<double> out) const {
  const double total = std::accumulate(rule_.weights.begin(), rule_.weights.end(), 0.0);
  std::ranges::fill(out, 0);
  for (size_t i = 0; i < piece.sources.size(); ++i) {
    const double share = rule_.normalize ? rule_.weights[i] / total : rule_.weights[i];
    for (size_t e = 0; e < out.size(); ++e) out[e] += share * piece.sources[i][e];
  }
}

void TensorMerge::merge_deltas(const MergePiece& piece, std::span<double> out) const {
  const bool signs = agrees_on_sign(rule_.method);
  const double total = std::accumulate(rule_.weights.begin(), rule_.weights.end(), 0.0);
  std::vector<double> weighted(piece.sources.size());
  for (size_t e = 0; e < out.size(); ++e) {
    double sum = 0, divisor = total;
    for (size_t i = 0; i < weighted.size(); ++i) {
      weighted[i] = rule_.weights[i] * kept_delta(i, piece, e);
      sum += weighted[i];
    }
    if (signs) {
      const bool up = sum >= 0;
      sum = divisor = 0;
      for (size_t i = 0; i < weighted.size(); ++i) {
        if (up ? weighted[i] > 0 : weighted[i] < 0) {
          sum += weighted[i];
          divisor += rule_.weights[i];
        } else if (std::isnan(weighted[i])) {
          sum = weighted[i];
        }
      }
      if (divisor == 0) divisor = 1;
    } else if (std::abs(divisor) < kNoDivisor) {
      divisor = 1;
    }
    if (rule_.normalize) sum /= divisor;
    out[e] = piece.base[e] + rule_.lambda * sum;
  }
}

void TensorMerge::merge(const MergePiece& piece, std::span<double> out) const {
  if (rule_.method == MergeMethod::kLinear) return merge_linear(piece, out);
  if (rule_.method != MergeMethod::kSlerp) return merge_deltas(piece, out);
  for (size_t e = 0; e < out.size(); ++e)
    out[e] = factors_[0] * piece.sources[0][e] + factors_[1] * piece.sources[1][e];
}

}  // namespace cairn::ckpt
