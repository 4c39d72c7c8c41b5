#include "runtime/kernels/cuda/adafactor.h"

#include "runtime/kernels/cuda/square_rounds.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
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

/// One update of a run of [rows, cols] from element `begin` on, which is two runs in the passes over state. Where
/// `finite` is false nothing is to be written.
void compare(int64_t rows, int64_t cols, int64_t begin, int64_t count, bool averaged, bool finite = true) {
  CAPTURE(cols);
  CAPTURE(begin);
  const bool vector = rows == 1;
  const Clip clip{.grad_scale = 0.5f, .finite = finite ? 1 : 0};
  const auto grad = normals<float>("grad", count), master = normals<float>("master", count),
             avg = normals<float>("avg", count, 0.01);
  auto row_moments = normals<float>("rows", rows), col_moments = normals<float>("cols", cols);
  for (std::vector<float>* const of : {&row_moments, &col_moments}) {
    for (float& v : *of) v *= v;
  }
  const AdafactorDecay decay{0.75, DevicePtr(&clip)};
  const int64_t first = count / 3;
  constexpr int64_t kTensors = 2, kTensor = 1;
  const kernels::AdafactorLimits limits{.update_clip = 0.5, .least_scale = 1e-3, .scale_parameter = true};
  const std::vector<kernels::AdafactorRate> tensors = {{1, 1}, {static_cast<double>(count), 0.01}};
  /// `grad` and the arrays begin with the run.
  const auto runs_of = [&](const MatrixRun& run, const AdafactorFactors& factors, float* weights, float* averages,
                           bf16* low) {
    std::vector<kernels::AdafactorRun> out;
    for (const auto& [from, elems] : {std::pair(int64_t{0}, first), {first, count - first}}) {
      kernels::StateArrays arrays{.master = DevicePtr(weights + from)};
      if (averaged) arrays.exp_avg = DevicePtr(averages + from);
      out.push_back({.matrix = {run.grad + from, run.clip, run.begin + from, elems, run.cols},
                     .factors = factors,
                     .from = arrays,
                     .to = arrays,
                     .decay = 0.001f,
                     .beta1 = 0.9f,
                     .dtype = DType::kBf16,
                     .weights = DevicePtr<void>(low + from),
                     .tensor = kTensor});
    }
    return out;
  };
  struct Result {
    std::vector<double> row_sums, col_sums, words;
    std::vector<float> row_moments, col_moments, row_factors, col_factors, master, avg, rates;
    std::vector<bf16> low;
  } cpu{std::vector<double>(rows, 2.0),
        std::vector<double>(cols, 3.0),
        std::vector<double>(kTensors * kernels::TensorNorms::kWords),
        row_moments,
        col_moments,
        std::vector<float>(rows),
        std::vector<float>(cols),
        master,
        avg,
        std::vector<float>(kTensors),
        std::vector<bf16>(count)};
  const MatrixRun run{DevicePtr(grad.data()), DevicePtr(&clip), begin, count, cols};
  kernels::adafactor_squares(run, vector ? nullptr : cpu.row_sums.data(), cpu.col_sums.data());
  kernels::FactoredTensor tensor{
      .cols = {DevicePtr<const double>(cpu.col_sums.data()), DevicePtr<const float>(cpu.col_moments.data()),
               DevicePtr(cpu.col_moments.data()), DevicePtr(cpu.col_factors.data()), cols, rows},
      .mean_of_cols = averaged};
  if (!vector) {
    tensor.rows = {DevicePtr<const double>(cpu.row_sums.data()),
                   DevicePtr<const float>(cpu.row_moments.data()),
                   DevicePtr(cpu.row_moments.data()),
                   DevicePtr(cpu.row_factors.data()),
                   rows,
                   cols};
  }
  kernels::adafactor_factors_of_tensors(decay, {&tensor, 1});
  const AdafactorFactors factors{DevicePtr<const float>(vector ? nullptr : cpu.row_factors.data()),
                                 DevicePtr<const float>(cpu.col_factors.data())};
  const std::vector<kernels::AdafactorRun> runs =
      runs_of(run, factors, cpu.master.data(), cpu.avg.data(), cpu.low.data());
  std::vector<kernels::NormRun> norm_runs;
  int64_t chunks = 0;
  for (const kernels::AdafactorRun& of : runs) {
    norm_runs.push_back({of.matrix.count, of.tensor});
    chunks += kernels::norm_chunks(of.matrix.count);
  }
  std::vector<double> partials(chunks * kernels::TensorNorms::kWords);
  kernels::adafactor_norms_of_runs(runs, partials.data());
  kernels::add_norms_of_runs(norm_runs, partials.data(), cpu.words.data());
  kernels::adafactor_rates(limits, tensors, cpu.words.data(), cpu.rates.data());
  kernels::adafactor_step_of_runs(runs, cpu.rates.data());
  if (!finite) {
    CHECK(cpu.row_moments == row_moments);
    CHECK(cpu.master == master);
  }
  const std::vector<float> no_rows(rows), no_cols(cols);
  const std::vector<bf16> no_weights(count);
  in_every_order([&] {
    OnDevice<float> d_grad(grad), d_master(master), d_avg(avg), d_row_moments(row_moments), d_col_moments(col_moments),
        d_row_factors(no_rows), d_col_factors(no_cols);
    OnDevice<Clip> d_clip(std::vector<Clip>{clip});
    OnDevice<double> d_row_sums(std::vector<double>(rows, 2.0)), d_col_sums(std::vector<double>(cols, 3.0)),
        d_words(std::vector<double>(kTensors * kernels::TensorNorms::kWords)),
        d_partials(chunks * kernels::TensorNorms::kWords);
    OnDevice<float> d_rates(kTensors);
    OnDevice<bf16> d_low(no_weights);
    OnDevice<kernels::AdafactorRate> d_tensors(tensors);
    const MatrixRun there{DevicePtr<const float>(d_grad.data()), DevicePtr<const Clip>(d_clip.data()), begin, count,
                          cols};
    const auto rounds = kernels::cuda::square_rounds(std::vector<kernels::SquaresRun>{
        {there, DevicePtr(vector ? nullptr : d_row_sums.data()), DevicePtr(d_col_sums.data())}});
    REQUIRE(rounds.size() == 1);
    const kernels::cuda::SquareRound& round = rounds.front();
    Queue on;
    const OnDevice<kernels::cuda::SquaredRun> d_squared(round.runs);
    const OnDevice<kernels::cuda::ColumnParts> d_columns(round.columns);
    OnDevice<double> d_parts(round.part_sums);
    kernels::cuda::square_runs(on, {d_squared.data(), 1, round.blocks}, d_clip.data(), d_parts.data());
    kernels::cuda::add_columns(on, {d_columns.data(), 1, round.column_blocks}, d_parts.data());
    check_alike_doubles(d_row_sums.values(), cpu.row_sums);
    check_alike_doubles(d_col_sums.values(), cpu.col_sums);
    kernels::cuda::MomentsOfTensor of_tensor{.cols = {d_col_sums.data(), d_col_moments.data(), d_col_moments.data(),
                                                      d_col_factors.data(), cols, 1, static_cast<double>(rows)},
                                             .mean_of_cols = averaged};
    if (!vector) {
      of_tensor.rows = {
          d_row_sums.data(),        d_row_moments.data(), d_row_moments.data(), d_row_factors.data(), rows, 1,
          static_cast<double>(cols)};
    }
    const OnDevice<kernels::cuda::MomentsOfTensor> d_moments(std::vector{of_tensor});
    kernels::cuda::make_factors(on, decay.old_part, d_clip.data(), d_moments.data(), 1);
    check_alike(d_row_moments.values(), cpu.row_moments, pointwise<float>());
    check_alike(d_col_factors.values(), cpu.col_factors, pointwise<float>());
    if (!vector) check_alike(d_row_factors.values(), cpu.row_factors, pointwise<float>());
    const AdafactorFactors there_factors{DevicePtr<const float>(vector ? nullptr : d_row_factors.data()),
                                         DevicePtr<const float>(d_col_factors.data())};
    std::vector<kernels::cuda::FactoredRun> table;
    std::vector<kernels::cuda::UpdateRun> norm_table;
    for (const kernels::AdafactorRun& of : runs_of(there, there_factors, d_master.data(), d_avg.data(), d_low.data())) {
      table.push_back({.grad = of.matrix.grad.address(),
                       .row = of.factors.row.address(),
                       .col = of.factors.col.address(),
                       .master = of.from.master.address(),
                       .avg = of.from.exp_avg.address(),
                       .master_out = of.to.master.address(),
                       .avg_out = of.to.exp_avg.address(),
                       .weights = of.weights.address(),
                       .begin = of.matrix.begin,
                       .count = of.matrix.count,
                       .cols = of.matrix.cols,
                       .decay = of.decay,
                       .beta1 = of.beta1,
                       .dtype = of.dtype,
                       .tensor = static_cast<int32_t>(of.tensor)});
      norm_table.push_back({.count = of.matrix.count, .tensor = static_cast<int32_t>(of.tensor)});
    }
    REQUIRE(kernels::cuda::FactoredRuns::number_chunks(table) == chunks);
    kernels::cuda::UpdateTables::number_chunks(norm_table);
    const OnDevice<kernels::cuda::FactoredRun> d_table(table);
    const OnDevice<kernels::cuda::UpdateRun> d_norm_table(norm_table);
    const kernels::cuda::FactoredRuns state{d_table.data(), std::ssize(table), chunks};
    kernels::cuda::adafactor_norms(on, state, d_clip.data(), d_partials.data());
    const kernels::cuda::UpdateTables of_norms{d_norm_table.data(), std::ssize(table), chunks};
    OnDevice<double> d_same_words(std::vector<double>(kTensors * kernels::TensorNorms::kWords));
    kernels::cuda::add_words_for_rates(on, d_partials.data(), of_norms, d_same_words.data(), limits, d_tensors.data(),
                                       d_rates.data());
    const std::vector<float> rates_at_once = d_rates.values();
    kernels::cuda::add_words_of_tensors(on, d_partials.data(), of_norms, d_words.data());
    CHECK(d_words.values() == d_same_words.values());
    const std::vector<double> words = d_words.values();
    for (int64_t sum = 0; sum < 2; ++sum) {
      const auto value = [&](const std::vector<double>& of) {
        const auto at = static_cast<size_t>((kTensor * 2 + sum) * ExactSum::kWords);
        return ExactSum::from(std::span(of).subspan(at).first<ExactSum::kWords>()).value();
      };
      CHECK(value(words) == doctest::Approx(value(cpu.words)).epsilon(sum == 0 ? 1e-10 : 1e-5));
    }
    kernels::cuda::adafactor_rates(on, limits, d_tensors.data(), kTensors, d_words.data(), d_rates.data());
    std::vector<float> rates(kTensors);  // of the device's own words: the CPU's bits
    kernels::adafactor_rates(limits, tensors, words.data(), rates.data());
    CHECK(d_rates.values() == rates);
    CHECK(rates_at_once[kTensor] == rates[kTensor]);
    kernels::cuda::adafactor_step(on, state, d_clip.data(), d_rates.data());
    check_alike(d_master.values(), cpu.master, pointwise<float>());
    check_alike(d_avg.values(), cpu.avg, pointwise<float>());
    const std::vector<float> made = d_master.values();
    const std::vector<bf16> low = d_low.values();
    for (size_t i = 0; i < low.size(); ++i) {
      if (low[i].bits != (finite ? to_bf16(made[i]).bits : 0)) FAIL("weight ", i, " of ", low.size());
    }
  });
}

/// Runs of two tensors' gradients; the second run begins where the first ends.
struct Several {
  static constexpr int64_t kRows = 600, kCols = 37, kVector = 90;
  std::vector<float> grad = normals<float>("grad", kRows* kCols + kVector);
  std::vector<double> rows = std::vector<double>(kRows), cols = std::vector<double>(kCols),
                      of_vector = std::vector<double>(kVector);

  std::vector<kernels::SquaresRun> runs(const float* at, const Clip* clip, double* to_rows, double* to_cols,
                                        double* to_vector) const {
    const auto run = [&](int64_t begin, int64_t end) {
      return kernels::SquaresRun{
          {DevicePtr(at + begin), DevicePtr(clip), begin, end - begin, kCols}, DevicePtr(to_rows), DevicePtr(to_cols)};
    };
    // Two that touch; one behind a gap, in the row in which the one before ends; one in a later row; a vector's.
    return {run(5, 400),
            run(400, 1010),
            run(1020, 9000),
            run(9300, kRows * kCols),
            {{DevicePtr(at + kRows * kCols), DevicePtr(clip), 0, kVector, kVector}, nullptr, DevicePtr(to_vector)}};
  }
};

}  // namespace

TEST_SUITE("runtime/kernels/cuda/adafactor") {
  TEST_CASE("Adafactor is the CPU's, of a matrix, of a share of one that begins and ends within rows, of a vector") {
    compare(70, 300, 0, 70 * 300, false);
    compare(9, 37, 40, 250, true);
    compare(1, 500, 100, 300, true);
    compare(9, 37, 40, 250, true, false);
  }
  TEST_CASE("squares of many runs are the CPU's, by as many rounds as memory and shared rows ask for") {
    Several of;
    const Clip clip{.grad_scale = 0.5f};
    kernels::adafactor_squares_of_runs(
        of.runs(of.grad.data(), &clip, of.rows.data(), of.cols.data(), of.of_vector.data()));
    in_every_order([&] {
      OnDevice<float> d_grad(of.grad);
      OnDevice<Clip> d_clip(std::vector<Clip>{clip});
      for (const int64_t most : {kernels::cuda::kPartSums, int64_t{100}}) {
        CAPTURE(most);
        OnDevice<double> d_rows(std::vector<double>(Several::kRows)), d_cols(std::vector<double>(Several::kCols)),
            d_vector(std::vector<double>(Several::kVector));
        const auto runs = of.runs(d_grad.data(), d_clip.data(), d_rows.data(), d_cols.data(), d_vector.data());
        const auto rounds = kernels::cuda::square_rounds(runs, most);
        CHECK(rounds.size() == (most == 100 ? 4 : 2));  // a row is of two runs; else each run's parts fill the memory
        CHECK(rounds.front().runs.front().count == 1005);
        for (const kernels::cuda::SquareRound& round : rounds) {
          Queue on;
          const OnDevice<kernels::cuda::SquaredRun> d_runs(round.runs);
          const OnDevice<kernels::cuda::ColumnParts> d_columns(round.columns);
          CHECK(round.part_sums <= most);
          OnDevice<double> d_parts(round.part_sums);
          kernels::cuda::square_runs(on, {d_runs.data(), std::ssize(round.runs), round.blocks}, d_clip.data(),
                                     d_parts.data());
          kernels::cuda::add_columns(on, {d_columns.data(), std::ssize(round.columns), round.column_blocks},
                                     d_parts.data());
        }
        check_alike_doubles(d_rows.values(), of.rows);
        check_alike_doubles(d_cols.values(), of.cols);
        check_alike_doubles(d_vector.values(), of.of_vector);
      }
    });
  }
  TEST_CASE("rounds of runs of any shape have room where their elements and columns say so") {
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1, 5}, {256, 3}, {257, 3}, {100'000, 7}, {3, 70'000}}) {
      const auto sums_of = [&](int64_t begin, int64_t count) {
        const auto rounds = kernels::cuda::square_rounds(
            std::vector<kernels::SquaresRun>{{{nullptr, nullptr, begin, count, cols}, nullptr, nullptr}});
        return rounds.front().part_sums;
      };
      for (const int64_t begin : {int64_t{0}, cols - 1}) {
        const int64_t count = rows * cols - begin;
        CHECK(sums_of(begin, count) <= kernels::cuda::part_sums(count, cols));
      }
    }
  }
}
