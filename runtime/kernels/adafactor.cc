#include "runtime/kernels/adafactor.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"
#include "runtime/kernels/state_copies.h"

namespace cairn::kernels {
namespace {

constexpr int64_t kBlock = 1024;  // parallel_elements cuts at multiples of it, so threads change no bit of the sums

/// Calls body(at, n, row, col) for the parts of elements [begin, end) of a run that lie in one row each.
template <typename Body>
void for_rows(const MatrixRun& run, int64_t begin, int64_t end, const Body& body) {
  for (int64_t at = begin; at < end;) {
    const int64_t row = (run.begin + at) / run.cols, col = (run.begin + at) % run.cols;
    const int64_t n = std::min(end - at, run.cols - col);
    body(at, n, row, col);
    at += n;
  }
}

RT_INLINE double sum_squares_body(const float* grad, float scale, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const double g = static_cast<double>(grad[i] * scale);
    sum += g * g;
  }
  return sum;
}
RT_CLONES(sum_squares)

RT_INLINE void add_squares_body(const float* grad, float scale, int64_t n, double* sums) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const double g = static_cast<double>(grad[i] * scale);
    sums[i] += g * g;
  }
}
RT_CLONES(add_squares)

RT_INLINE void norms_row_body(const float* grad, float scale, const float* col, const float* master, int64_t n,
                              double* weight, double* step) {
  double w2 = 0, u2 = 0;
#pragma omp simd reduction(+ : w2, u2)
  for (int64_t i = 0; i < n; ++i) {
    const double w = master[i], u = static_cast<double>(grad[i] * scale * col[i]);
    w2 += w * w;
    u2 += u * u;
  }
  *weight += w2;
  *step += u2;
}
RT_CLONES(norms_row)

RT_INLINE void step_row_body(AdafactorArgs args, const float* grad, float scale, const float* col, const float* master,
                             float* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = master[i] - args.decay * master[i] - args.rate * (grad[i] * scale * col[i]);
  }
}
RT_CLONES(step_row)

RT_INLINE void average_row_body(AdafactorArgs args, const float* grad, float scale, const float* col,
                                const float* master, const float* avg, float* out, float* avg_out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float m = args.beta1 * avg[i] + (1.0f - args.beta1) * (args.rate * (grad[i] * scale * col[i]));
    avg_out[i] = m;
    out[i] = master[i] - args.decay * master[i] - m;
  }
}
RT_CLONES(average_row)

/// A run and its factors.
struct Run {
  Run(const MatrixRun& run, const AdafactorFactors& factors)
      : grad(run.grad.address()),
        scale(run.clip.address()->grad_scale),
        row(factors.row.address()),
        col(factors.col.address()) {}
  float scale_of(int64_t of_row) const { return row == nullptr ? scale : scale * row[of_row]; }

  const float* grad;
  float scale;
  const float *row, *col;
};

}  // namespace

void adafactor_squares(const MatrixRun& run, double* row_sums, double* col_sums) {
  if (run.count == 0) return;
  const Run on(run, {});
  const int64_t first = run.begin / run.cols, end = (run.begin + run.count - 1) / run.cols + 1;
  if (row_sums != nullptr) {
    parallel_ranges(end - first, 1, run.cols, [&](int64_t row_begin, int64_t row_end) {
      const int64_t from = std::max<int64_t>(0, (first + row_begin) * run.cols - run.begin);
      const int64_t to = std::min(run.count, (first + row_end) * run.cols - run.begin);
      for_rows(run, from, to, [&](int64_t at, int64_t n, int64_t row, int64_t) {
        row_sums[row] += sum_squares(on.grad + at, on.scale, n);
      });
    });
  }
  // By columns a second time: threads that took rows would each need all columns.
  parallel_ranges(run.cols, 64, end - first, [&](int64_t col_begin, int64_t col_end) {
    for_rows(run, 0, run.count, [&](int64_t at, int64_t n, int64_t, int64_t col) {
      const int64_t from = std::max(col, col_begin), to = std::min(col + n, col_end);
      if (from < to) add_squares(on.grad + at + from - col, on.scale, to - from, col_sums + from);
    });
  });
}

void adafactor_squares_of_runs(std::span<const SquaresRun> runs) {
  for (const SquaresRun& run : runs) adafactor_squares(run.matrix, run.rows.address(), run.cols.address());
}

void adafactor_factors(const AdafactorDecay& decay, const FactoredDim& of) {
  constexpr double kLeastSquare = 1e-30;  // eps1 of the paper
  if (decay.clip.address()->finite == 0) return;
  const double* const squares = of.squares.address();
  const float* const from = of.from.address();
  float *const to = of.to.address(), *const factors = of.factors.address();
  for (int64_t i = 0; i < of.count; ++i) {
    const double now = squares[i] / static_cast<double>(of.terms) + kLeastSquare;
    to[i] = static_cast<float>(decay.old_part * static_cast<double>(from[i]) + (1.0 - decay.old_part) * now);
    factors[i] = static_cast<float>(1.0 / std::sqrt(static_cast<double>(to[i])));
  }
}

void scale_by_mean(float* factors, int64_t count, const float* moments, int64_t moments_count) {
  double sum = 0;
  for (int64_t i = 0; i < moments_count; ++i) sum += static_cast<double>(moments[i]);
  const auto root = static_cast<float>(std::sqrt(sum / static_cast<double>(moments_count)));
  for (int64_t i = 0; i < count; ++i) factors[i] *= root;
}

void adafactor_factors_of_tensors(const AdafactorDecay& decay, std::span<const FactoredTensor> tensors) {
  if (decay.clip.address()->finite == 0) return;
  for (const FactoredTensor& of : tensors) {
    adafactor_factors(decay, of.rows);
    adafactor_factors(decay, of.cols);
    const FactoredDim& whole = of.mean_of_cols ? of.cols : of.rows;
    if (of.rows.count > 0) scale_by_mean(of.rows.factors.address(), of.rows.count, whole.to.address(), whole.count);
  }
}

void adafactor_moments(const AdafactorDecay& decay, std::span<const SquaresRun> runs,
                       std::span<const FactoredTensor> tensors) {
  adafactor_squares_of_runs(runs);
  adafactor_factors_of_tensors(decay, tensors);
}

void adafactor_norms(const MatrixRun& run, const AdafactorFactors& factors, const float* master,
                     const TensorNorms& norms) {
  const Run on(run, factors);
  ExactSum all_weight, all_step;
  std::mutex mutex;
  parallel_elements(run.count, [&](int64_t begin, int64_t end) {
    ExactSum mine_weight, mine_step;
    for (int64_t i = begin; i < end; i += kBlock) {
      double weight = 0, step = 0;
      for_rows(run, i, std::min(i + kBlock, end), [&](int64_t at, int64_t n, int64_t row, int64_t col) {
        norms_row(on.grad + at, on.scale_of(row), on.col + col, master + at, n, &weight, &step);
      });
      mine_weight.add(weight);
      mine_step.add(step);
    }
    const std::lock_guard lock(mutex);  // once a thread; the sums are exact in any order
    all_weight.add(mine_weight);
    all_step.add(mine_step);
  });
  norms.add(all_weight, all_step);
}

void adafactor_step(const AdafactorArgs& args, const MatrixRun& run, const AdafactorFactors& factors,
                    const float* master, const float* avg, float* master_out, float* avg_out) {
  const Run on(run, factors);
  parallel_elements(run.count, [&](int64_t begin, int64_t end) {
    for_rows(run, begin, end, [&](int64_t at, int64_t n, int64_t row, int64_t col) {
      const float scale = on.scale_of(row);
      if (avg == nullptr) {
        step_row(args, on.grad + at, scale, on.col + col, master + at, master_out + at, n);
      } else {
        average_row(args, on.grad + at, scale, on.col + col, master + at, avg + at, master_out + at, avg_out + at, n);
      }
    });
  });
}

void adafactor_norms_of_runs(std::span<const AdafactorRun> runs, double* partials) {
  for (const AdafactorRun& run : runs) {
    const int64_t words = norm_chunks(run.matrix.count) * TensorNorms::kWords;
    std::fill_n(partials, words, 0.0);
    const std::span first(partials, static_cast<size_t>(std::min(words, TensorNorms::kWords)));
    if (run.matrix.clip.address()->finite != 0 && words > 0) {
      adafactor_norms(run.matrix, run.factors, run.from.master.address(), {first});
    }
    partials += words;
  }
}

void adafactor_rates(const AdafactorLimits& limits, std::span<const AdafactorRate> tensors, const double* words,
                     float* rates) {
  for (size_t k = 0; k < tensors.size(); ++k, words += TensorNorms::kWords) {
    const std::span of(words, static_cast<size_t>(TensorNorms::kWords));
    const auto root_of_mean = [&](std::span<const double, ExactSum::kWords> squares) {
      return std::sqrt(ExactSum::from(squares).value() / tensors[k].elems);
    };
    double rate = tensors[k].lr;
    if (limits.update_clip > 0) {
      rate /= std::max(1.0, root_of_mean(of.last<ExactSum::kWords>()) / limits.update_clip);
    }
    if (limits.scale_parameter) rate *= std::max(limits.least_scale, root_of_mean(of.first<ExactSum::kWords>()));
    rates[k] = static_cast<float>(rate);
  }
}

void adafactor_rates_of_runs(const AdafactorLimits& limits, std::span<const AdafactorRate> tensors,
                             std::span<const NormRun> runs, const double* partials, double* words, float* rates) {
  add_norms_of_runs(runs, partials, words);
  adafactor_rates(limits, tensors, words, rates);
}

void adafactor_step_of_runs(std::span<const AdafactorRun> runs, const float* rates) {
  for (const AdafactorRun& run : runs) {
    if (run.matrix.clip.address()->finite == 0) return;
    adafactor_step({rates[run.tensor], run.decay, run.beta1}, run.matrix, run.factors, run.from.master.address(),
                   run.from.exp_avg.address(), run.to.master.address(), run.to.exp_avg.address());
    if (run.weights) put_weights(run.to.master.address(), run.matrix.count, run.dtype, run.weights.address());
  }
}

}  // namespace cairn::kernels
