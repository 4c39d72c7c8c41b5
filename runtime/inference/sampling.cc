#include "runtime/inference/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "runtime/core/random.h"

namespace cairn::inference {
namespace {

/// The `count` likeliest tokens, likeliest first; the lower id first among equals.
std::vector<int32_t> likeliest(std::span<const float> logits, size_t count) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  if (count < order.size()) {
    std::nth_element(order.begin(), order.begin() + static_cast<ptrdiff_t>(count), order.end(), before);
    order.resize(count);
  }
  std::sort(order.begin(), order.end(), before);
  return order;
}

}  // namespace

int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t index, int64_t text) {
  if (sampling.temperature <= 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  const size_t wanted = sampling.top_k > 0 ? static_cast<size_t>(sampling.top_k) : logits.size();
  const std::vector<int32_t> order = likeliest(logits, std::min(wanted, logits.size()));
  size_t kept = order.size();
  std::vector<double> weight(kept);
  double total = 0;
  for (size_t k = 0; k < kept; ++k) {
    weight[k] = std::exp((static_cast<double>(logits[order[k]]) - logits[order[0]]) / sampling.temperature);
    total += weight[k];
  }
  // Nucleus: the fewest most likely tokens whose probabilities reach top_p.
  double nucleus = 0;
  for (size_t k = 0; k < kept && sampling.top_p < 1.0; ++k) {
    nucleus += weight[k];
    if (nucleus >= sampling.top_p * total) {
      kept = k + 1;
      total = nucleus;
      break;
    }
  }
  const std::string stream = text == 0 ? "sample" : fmt::format("sample {}", text);
  double left = uniform_at(stream_key(sampling.seed, stream), index) * total;
  for (size_t k = 0; k + 1 < kept; ++k) {
    left -= weight[k];
    if (left < 0) return order[k];
  }
  return order[kept - 1];
}

}  // namespace cairn::inference
