#include "runtime/dlrm/click_loss.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace cairn::dlrm {

template <typename T>
double click_loss(ClickLoss loss, const T* logits, const float* labels, int64_t samples, double factor, T* scores,
                  T* dlogits) {
  double sum = 0;
  for (int64_t s = 0; s < samples; ++s) {
    const double z = logits[s], t = labels[s];
    const double small = std::exp(-std::abs(z));  // the smaller of p and 1 - p is small / (1 + small)
    const double high = 1 / (1 + small), low = small / (1 + small);
    const double p = z < 0 ? low : high, rest = z < 0 ? high : low;
    double gradient = (1 - t) * p - t * rest;  // p - t, to the last digit where p is nearly 1
    if (loss == ClickLoss::kBinaryCrossEntropy) {
      sum += std::max(z, 0.0) - z * t + std::log1p(small);
    } else {
      sum += gradient * gradient;
      gradient *= 2 * high * low;
    }
    if (scores != nullptr) scores[s] = static_cast<T>(p);
    if (dlogits != nullptr) dlogits[s] = static_cast<T>(factor * gradient);
  }
  return sum;
}
template double click_loss(ClickLoss, const float*, const float*, int64_t, double, float*, float*);
template double click_loss(ClickLoss, const double*, const float*, int64_t, double, double*, double*);

double accuracy(std::span<const float> scores, std::span<const float> labels) {
  int64_t right = 0;
  for (size_t s = 0; s < scores.size(); ++s) right += (scores[s] > 0.5f ? 1.0f : 0.0f) == labels[s] ? 1 : 0;
  return scores.empty() ? 0 : static_cast<double>(right) / static_cast<double>(scores.size());
}

Result<double> area_under_curve(std::span<const float> scores, std::span<const float> labels) {
  const auto wrong = [](std::string text) { return Error{ErrorCode::kInvalidInput, "AUC: " + std::move(text)}; };
  if (scores.size() != labels.size())
    return wrong(fmt::format("{} scores for {} labels", scores.size(), labels.size()));
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (const size_t s : order) {
    if (std::isnan(scores[s])) return wrong(fmt::format("the score of sample {} is NaN", s));
    if (labels[s] != 0 && labels[s] != 1)
      return wrong(fmt::format("the label of sample {} is {}, expected 0 or 1", s, labels[s]));
  }
  std::ranges::sort(order, {}, [&](size_t s) { return scores[s]; });
  // Twice the number of pairs in which the clicked sample scores higher: integers, so exact in any order.
  __extension__ using Wide = unsigned __int128;
  Wide twice = 0;
  uint64_t zeros = 0, ones = 0;
  for (size_t i = 0; i < order.size();) {
    uint64_t tied_zeros = 0, tied_ones = 0;
    const float score = scores[order[i]];
    for (; i < order.size() && scores[order[i]] == score; ++i) ++(labels[order[i]] == 1 ? tied_ones : tied_zeros);
    twice += static_cast<Wide>(tied_ones) * (2 * zeros + tied_zeros);
    zeros += tied_zeros, ones += tied_ones;
  }
  if (zeros == 0 || ones == 0)
    return wrong(fmt::format("all {} labels are {}; it needs both 0 and 1", order.size(), ones > 0 ? 1 : 0));
  return static_cast<double>(twice) / (2 * static_cast<double>(zeros) * static_cast<double>(ones));
}

}  // namespace cairn::dlrm
