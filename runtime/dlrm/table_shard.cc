#include "runtime/dlrm/table_shard.h"

#include <algorithm>
#include <cmath>

#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::dlrm {
namespace {

using kernels::cloned;  // by which RT_CLONES chooses

template <typename T>
RT_INLINE void add_row_body(T* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}
RT_CLONES(add_row)

template <typename T>
RT_INLINE void step_row_body(T* weights, const T* gradient, int64_t n, T factor) {
  for (int64_t i = 0; i < n; ++i) weights[i] -= factor * gradient[i];
}
RT_CLONES(step_row)

constexpr int64_t kAhead = 4;  // bags whose first row is asked for before its turn comes

}  // namespace

template <typename T>
ShardRows<T>::ShardRows(int64_t rows, int64_t width, DlrmRule rule)
    : rows_(rows),
      width_(width),
      weights_(static_cast<size_t>(rows * width)),
      square_sums_(rule == DlrmRule::kRowAdagrad ? static_cast<size_t>(rows) : 0) {}

template <typename T>
void ShardRows<T>::pool(std::span<const Bag> bags, T* to, int64_t stride, bool adds) const {
  const T* const table = weights_.data();
  const int64_t width = width_;
  kernels::parallel_ranges(std::ssize(bags), 1, width, [=](int64_t s, int64_t end) {
    for (; s < end; ++s) {
      if (s + kAhead < end && bags[static_cast<size_t>(s + kAhead)].count > 0)
        __builtin_prefetch(table + *bags[static_cast<size_t>(s + kAhead)].rows * width);
      const Bag& bag = bags[static_cast<size_t>(s)];
      T* const sum = to + s * stride;
      int32_t i = 0;
      if (!adds && bag.count > 0) std::copy_n(table + bag.rows[i++] * width, width, sum);
      if (!adds && bag.count == 0) std::fill_n(sum, width, T{0});
      for (; i < bag.count; ++i) add_row(sum, table + bag.rows[i] * width, width);
    }
  });
}

template <typename T>
void ShardRows<T>::apply(const RowUpdate& how, int64_t row, const T* gradient) {
  double factor = how.lr;
  if (how.rule == DlrmRule::kRowAdagrad) {
    double squares = 0;
    for (int64_t i = 0; i < width_; ++i) squares += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
    T& sum = square_sums_[static_cast<size_t>(row)];
    sum += static_cast<T>(squares / static_cast<double>(width_));
    factor /= std::sqrt(static_cast<double>(sum)) + how.eps;
  }
  step_row(weights_.data() + row * width_, gradient, width_, static_cast<T>(factor));
}

template <typename T>
void ShardRows<T>::update(const RowUpdate& how, std::span<const Bag> bags, std::span<const T* const> gradients) {
  entries_.clear();
  for (size_t s = 0; s < bags.size(); ++s)
    for (int32_t i = 0; i < bags[s].count; ++i)
      entries_.push_back(static_cast<uint64_t>(bags[s].rows[i]) << 32 | static_cast<uint64_t>(s));
  std::ranges::sort(entries_);
  starts_.clear();
  for (size_t i = 0; i < entries_.size(); ++i)
    if (i == 0 || entries_[i] >> 32 != entries_[i - 1] >> 32) starts_.push_back(static_cast<int64_t>(i));
  const int64_t distinct = std::ssize(starts_);
  starts_.push_back(std::ssize(entries_));
  const int64_t mean = distinct > 0 ? std::ssize(entries_) / distinct : 0;
  kernels::parallel_ranges(distinct, 1, (mean + 2) * width_, [&](int64_t d, int64_t end) {
    std::vector<T> sum(static_cast<size_t>(width_));
    for (; d < end; ++d) {
      const auto* entry = &entries_[static_cast<size_t>(starts_[static_cast<size_t>(d)])];
      const auto* const stop = entries_.data() + starts_[static_cast<size_t>(d + 1)];
      const int64_t row = static_cast<int64_t>(*entry >> 32);
      const auto gradient_of = [&](uint64_t e) { return gradients[static_cast<size_t>(e & 0xffffffffu)]; };
      const T* gradient = gradient_of(*entry);
      if (stop - entry > 1) {
        std::copy_n(gradient, width_, sum.data());
        while (++entry < stop) add_row(sum.data(), gradient_of(*entry), width_);
        gradient = sum.data();
      }
      apply(how, row, gradient);
    }
  });
}

template <typename T>
void ShardRows<T>::update_all(const RowUpdate& how, const T* gradients) {
  kernels::parallel_ranges(rows_, 1, 3 * width_, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) apply(how, row, gradients + row * width_);
  });
}

template <typename T>
void ShardRows<T>::add_gradients(std::span<const Bag> bags, const T* gradients, int64_t stride, T* sums) const {
  for (size_t s = 0; s < bags.size(); ++s)
    for (int32_t i = 0; i < bags[s].count; ++i)
      add_row(sums + bags[s].rows[i] * width_, gradients + static_cast<int64_t>(s) * stride, width_);
}

template class ShardRows<float>;
template class ShardRows<double>;

}  // namespace cairn::dlrm
