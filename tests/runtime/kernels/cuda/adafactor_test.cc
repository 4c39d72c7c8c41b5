#include "runtime/kernels/cuda/adafactor.h"

#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::AdafactorArgs;
using kernels::AdafactorDecay;
using kernels::AdafactorFactors;
using kernels::Clip;
using kernels::MatrixRun;

namespace {

constexpr Tolerance kDouble{.relative = 1e-12, .absolute = 1e-12};

void check_alike_doubles(const std::vector<double>& got, const std::vector<double>& wanted) {
  REQUIRE(got.size() == wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(kDouble.accepts(got[i], wanted[i]));
  }
}

/// One update of a run of [rows, cols] from element `begin` on.
void compare(int64_t rows, int64_t cols, int64_t begin, int64_t count, bool averaged) {
  CAPTURE(cols);
  CAPTURE(begin);
  const bool vector = rows == 1;
  const Clip clip{.grad_scale = 0.5f};
  const auto grad = normals<float>("grad", count), master = normals<float>("master", count),
             avg = normals<float>("avg", count, 0.01);
  auto row_moments = normals<float>("rows", rows), col_moments = normals<float>("cols", cols);
  for (std::vector<float>* const of : {&row_moments, &col_moments}) {
    for (float& v : *of) v *= v;
  }
  const AdafactorDecay of_rows{0.75, cols}, of_cols{0.75, rows};
  const AdafactorArgs args{.rate = 0.01f, .decay = 0.001f, .beta1 = 0.9f};
  struct Result {
    std::vector<double> row_sums, col_sums, words;
    std::vector<float> row_moments, col_moments, row_factors, col_factors, master, avg;
  } cpu{std::vector<double>(rows, 2.0),
        std::vector<double>(cols, 3.0),
        std::vector<double>(kernels::TensorNorms::kWords),
        row_moments,
        col_moments,
        std::vector<float>(rows),
        std::vector<float>(cols),
        master,
        avg};
  const MatrixRun run{DevicePtr(grad.data()), DevicePtr(&clip), begin, count, cols};
  kernels::adafactor_squares(run, vector ? nullptr : cpu.row_sums.data(), cpu.col_sums.data());
  kernels::adafactor_factors(of_rows, cpu.row_sums.data(), cpu.row_moments.data(), cpu.row_moments.data(),
                             cpu.row_factors.data(), rows);
  kernels::adafactor_factors(of_cols, cpu.col_sums.data(), cpu.col_moments.data(), cpu.col_moments.data(),
                             cpu.col_factors.data(), cols);
  kernels::scale_by_mean(cpu.col_factors.data(), cols, cpu.row_moments.data(), rows);
  const AdafactorFactors factors{DevicePtr<const float>(vector ? nullptr : cpu.row_factors.data()),
                                 DevicePtr<const float>(cpu.col_factors.data())};
  const kernels::TensorNorms norms{cpu.words};
  kernels::adafactor_norms(run, factors, cpu.master.data(), norms);
  kernels::adafactor_step(args, run, factors, cpu.master.data(), averaged ? cpu.avg.data() : nullptr, cpu.master.data(),
                          averaged ? cpu.avg.data() : nullptr);
  in_every_order([&] {
    OnDevice<float> d_grad(grad), d_master(master), d_avg(avg), d_row_moments(row_moments), d_col_moments(col_moments),
        d_row_factors(rows), d_col_factors(cols);
    OnDevice<Clip> d_clip(std::vector<Clip>{clip});
    OnDevice<double> d_row_sums(std::vector<double>(rows, 2.0)), d_col_sums(std::vector<double>(cols, 3.0)),
        d_words(std::vector<double>(kernels::TensorNorms::kWords)),
        partial_words(kernels::cuda::norm_chunks(count) * kernels::TensorNorms::kWords);
    const MatrixRun there{DevicePtr<const float>(d_grad.data()), DevicePtr<const Clip>(d_clip.data()), begin, count,
                          cols};
    ScratchQueue on(2 * kernels::cuda::square_partials(there));
    kernels::cuda::adafactor_squares(on, there, vector ? nullptr : d_row_sums.data(), d_col_sums.data());
    check_alike_doubles(d_row_sums.values(), cpu.row_sums);
    check_alike_doubles(d_col_sums.values(), cpu.col_sums);
    kernels::cuda::adafactor_factors(on, of_rows, d_row_sums.data(), d_row_moments.data(), d_row_moments.data(),
                                     d_row_factors.data(), rows);
    kernels::cuda::adafactor_factors(on, of_cols, d_col_sums.data(), d_col_moments.data(), d_col_moments.data(),
                                     d_col_factors.data(), cols);
    kernels::cuda::scale_by_mean(on, d_col_factors.data(), cols, d_row_moments.data(), rows);
    check_alike(d_row_moments.values(), cpu.row_moments, pointwise<float>());
    check_alike(d_col_factors.values(), cpu.col_factors, pointwise<float>());
    const AdafactorFactors there_factors{DevicePtr<const float>(vector ? nullptr : d_row_factors.data()),
                                         DevicePtr<const float>(d_col_factors.data())};
    kernels::cuda::adafactor_norms(on, there, there_factors, d_master.data(), partial_words.data(), d_words.data());
    std::vector<double> words = d_words.values();
    const kernels::TensorNorms got{words};
    CHECK(got.weight().value() == doctest::Approx(norms.weight().value()).epsilon(1e-10));
    CHECK(got.step().value() == doctest::Approx(norms.step().value()).epsilon(1e-5));
    kernels::cuda::adafactor_step(on, args, there, there_factors, d_master.data(), averaged ? d_avg.data() : nullptr,
                                  d_master.data(), averaged ? d_avg.data() : nullptr);
    check_alike(d_master.values(), cpu.master, pointwise<float>());
    check_alike(d_avg.values(), cpu.avg, pointwise<float>());
  });
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/adafactor") {
  TEST_CASE("Adafactor is the CPU's, of a matrix, of a share of one that begins and ends within rows, of a vector") {
    compare(70, 300, 0, 70 * 300, false);
    compare(9, 37, 40, 250, true);
    compare(1, 500, 100, 300, true);
  }
}
