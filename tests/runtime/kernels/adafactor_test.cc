#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/state_copies.h"

#include "tests/runtime/kernels/kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/adafactor") {
  TEST_CASE("squares, norms and steps of ragged runs agree with the formulas in double, on any number of threads") {
    struct Case {
      int64_t rows, cols, begin, end;
    };
    for (const auto& [rows, cols, begin, end] :
         {Case{7, 13, 0, 91}, Case{7, 13, 5, 60}, Case{7, 13, 14, 20}, Case{1, 5000, 17, 4999}, Case{5000, 1, 1, 4000},
          Case{600, 700, 333, 419'000}, Case{7, 13, 13, 13}}) {
      CAPTURE(rows);
      CAPTURE(begin);
      const auto all = static_cast<size_t>(rows * cols), count = static_cast<size_t>(end - begin);
      const auto grad = normals<float>("g", all), weight = normals<float>("w", all), average = normals<float>("m", all);
      auto row = normals<float>("r", static_cast<size_t>(rows)), col = normals<float>("c", static_cast<size_t>(cols));
      const bool matrix = rows > 1;
      const kernels::Clip half{.grad_scale = 0.5F};
      const kernels::MatrixRun run{DevicePtr(grad.data() + begin), DevicePtr(&half), begin, end - begin, cols};
      const kernels::AdafactorFactors factors{DevicePtr<const float>(matrix ? row.data() : nullptr),
                                              DevicePtr<const float>(col.data())};
      const kernels::AdafactorArgs args{.rate = 0.25F, .decay = 0.125F, .beta1 = 0.75F};

      std::vector<double> want_rows(static_cast<size_t>(rows), 1.0), want_cols(static_cast<size_t>(cols), 2.0);
      std::vector<double> plain(count), averaged(count), steps(count);
      double weight2 = 0, step2 = 0;
      for (int64_t i = begin; i < end; ++i) {
        const double g = 0.5 * static_cast<double>(grad[i]), w = weight[i];
        const double u = g * (matrix ? static_cast<double>(row[i / cols]) : 1.0) * static_cast<double>(col[i % cols]);
        want_rows[i / cols] += g * g;
        want_cols[i % cols] += g * g;
        weight2 += w * w;
        step2 += u * u;
        plain[i - begin] = w - 0.125 * w - 0.25 * u;
        steps[i - begin] = 0.75 * static_cast<double>(average[i]) + 0.25 * 0.25 * u;
        averaged[i - begin] = w - 0.125 * w - steps[i - begin];
      }
      std::vector<double> first_rows, first_cols;
      double first_norm = 0;
      for (const int threads : {1, 3}) {
        omp_set_num_threads(threads);
        std::vector<double> row_sums(static_cast<size_t>(rows), 1.0), col_sums(static_cast<size_t>(cols), 2.0);
        kernels::adafactor_squares(run, matrix ? row_sums.data() : nullptr, col_sums.data());
        for (int64_t r = 0; matrix && r < rows; ++r) CHECK(row_sums[r] == doctest::Approx(want_rows[r]).epsilon(1e-12));
        for (int64_t c = 0; c < cols; ++c) REQUIRE(col_sums[c] == doctest::Approx(want_cols[c]).epsilon(1e-12));
        std::vector<double> words(kernels::TensorNorms::kWords);
        const kernels::TensorNorms norms{words};
        kernels::adafactor_norms(run, factors, weight.data() + begin, norms);
        CHECK(norms.weight().value() == doctest::Approx(weight2).epsilon(1e-10));
        CHECK(norms.step().value() == doctest::Approx(step2).epsilon(1e-5));
        if (threads == 1) {
          first_rows = row_sums;
          first_cols = col_sums;
          first_norm = norms.step().value();
        }
        CHECK(row_sums == first_rows);
        CHECK(col_sums == first_cols);
        CHECK(norms.step().value() == first_norm);
        std::vector<float> out(weight.begin() + begin, weight.begin() + end),
            avg(average.begin() + begin, average.begin() + end);
        kernels::adafactor_step(args, run, factors, out.data(), nullptr, out.data(), nullptr);  // in place
        check_close(out, plain, {.relative = 1e-6, .absolute = 1e-6});
        kernels::adafactor_step(args, run, factors, weight.data() + begin, avg.data(), out.data(), avg.data());
        check_close(out, averaged, {.relative = 1e-6, .absolute = 1e-6});
        check_close(avg, steps, {.relative = 1e-6, .absolute = 1e-6});
      }
      omp_set_num_threads(omp_get_num_procs());
    }
  }

  TEST_CASE("second moments go on, leave 1 / root, and a matrix's rows take the root of their mean") {
    constexpr int64_t kCount = 37;
    const auto from = normals<float>("v", kCount);
    std::vector<float> before(kCount), after(kCount), factors(kCount);
    std::vector<double> squares(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      before[i] = std::abs(from[i]);
      squares[i] = static_cast<double>(i * i);
    }
    kernels::Clip clip;
    const kernels::AdafactorDecay decay{.old_part = 0.75, .clip = DevicePtr<const kernels::Clip>(&clip)};
    const auto dim = [&](const std::vector<float>& source, std::vector<float>* to, std::vector<float>* left) {
      return kernels::FactoredDim{.squares = DevicePtr<const double>(squares.data()),
                                  .from = DevicePtr<const float>(source.data()),
                                  .to = DevicePtr(to->data()),
                                  .factors = DevicePtr(left->data()),
                                  .count = kCount,
                                  .terms = 5};
    };
    clip.finite = 0;
    kernels::adafactor_factors(decay, dim(before, &after, &factors));
    CHECK(after == std::vector<float>(kCount));  // nothing is written
    CHECK(factors == after);
    clip.finite = 1;
    kernels::adafactor_factors(decay, dim(before, &after, &factors));
    double mean = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      const double want = 0.75 * static_cast<double>(before[i]) + 0.25 * (squares[i] / 5 + 1e-30);
      CHECK(static_cast<double>(after[i]) == doctest::Approx(want).epsilon(1e-6));
      CHECK(static_cast<double>(factors[i]) == doctest::Approx(1 / std::sqrt(want)).epsilon(1e-6));
      mean += want / kCount;
    }
    auto in_place = before, scaled = factors;
    kernels::adafactor_factors(decay, dim(in_place, &in_place, &scaled));
    CHECK(in_place == after);
    kernels::scale_by_mean(scaled.data(), kCount, after.data(), kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      CHECK(static_cast<double>(scaled[i]) ==
            doctest::Approx(static_cast<double>(factors[i]) * std::sqrt(mean)).epsilon(1e-6));
    }
    kernels::fill_doubles(0, squares.data(), kCount - 1);
    CHECK(std::count(squares.begin(), squares.end(), 0.0) == kCount - 1);
  }

  TEST_CASE("a tensor's rate falls with its step's root mean square above the clip, and grows with its weights'") {
    constexpr int64_t kTensors = 3;
    const std::vector<kernels::AdafactorRate> tensors = {{.elems = 4, .lr = 0.5}, {.elems = 16, .lr = 0.25}, {1, 0}};
    std::vector<double> words;
    const auto put = [&words](double squares) {
      ExactSum sum;
      sum.add(squares);
      const auto add = sum.words();
      words.insert(words.end(), add.begin(), add.end());
    };
    for (const auto& [weight, step] : {std::pair(36.0, 4 * 25.0), {16 * 1e-6, 16 * 0.25}, {1.0, 1.0}}) {
      put(weight);
      put(step);
    }
    std::vector<float> rates(kTensors);
    const auto rates_by = [&](const kernels::AdafactorLimits& limits) {
      kernels::adafactor_rates(limits, tensors, words.data(), rates.data());
      return rates;
    };
    CHECK(rates_by({}) == std::vector<float>{0.5F, 0.25F, 0});
    CHECK(rates_by({.update_clip = 2}) == std::vector<float>{0.5F / 2.5F, 0.25F, 0});  // 5 over 2; 0.5 is below 2
    CHECK(rates_by({.least_scale = 0.125, .scale_parameter = true}) == std::vector<float>{0.5F * 3, 0.25F * 0.125F, 0});
  }

  TEST_CASE("passes over several runs are those over each, with its tensor's rate and its weights; none where ruined") {
    constexpr int64_t kCols = 11, kFirst = 40, kRest = 37;
    const auto grad = normals<float>("g", kFirst + kRest), weight = normals<float>("w", kFirst + kRest),
               row = normals<float>("r", 7), col = normals<float>("c", kCols);
    kernels::Clip clip{.grad_scale = 0.5F};
    std::vector<float> out = weight, avg(kFirst + kRest, 0.25F);
    std::vector<bf16> low(kFirst + kRest);
    const std::vector<float> rates = {0, 0.5F, 0.25F};
    std::vector<kernels::AdafactorRun> runs;
    for (const auto& [begin, count, tensor] : {std::tuple(int64_t{0}, kFirst, int64_t{2}), {kFirst, kRest, 1}}) {
      const kernels::StateArrays arrays{.master = DevicePtr(out.data() + begin),
                                        .exp_avg = DevicePtr(avg.data() + begin)};
      runs.push_back(
          {.matrix = {DevicePtr(grad.data() + begin), DevicePtr<const kernels::Clip>(&clip), begin, count, kCols},
           .factors = {DevicePtr(row.data()), DevicePtr(col.data())},
           .from = arrays,
           .to = arrays,
           .decay = 0.125F,
           .beta1 = 0.75F,
           .dtype = DType::kBf16,
           .weights = DevicePtr<void>(low.data() + begin),
           .tensor = tensor});
    }
    constexpr auto kWords = static_cast<size_t>(kernels::TensorNorms::kWords);
    std::vector<double> partials(2 * kWords, 5.0), wanted(2 * kWords);
    kernels::adafactor_norms_of_runs(runs, partials.data());
    std::vector<float> wanted_out = weight, wanted_avg = avg;
    for (size_t k = 0; k < 2; ++k) {
      const kernels::AdafactorRun& run = runs[k];
      const int64_t at = run.matrix.begin;
      kernels::adafactor_norms(run.matrix, run.factors, weight.data() + at,
                               {std::span(wanted).subspan(k * kWords, kWords)});
      kernels::adafactor_step({rates[static_cast<size_t>(run.tensor)], 0.125F, 0.75F}, run.matrix, run.factors,
                              weight.data() + at, wanted_avg.data() + at, wanted_out.data() + at,
                              wanted_avg.data() + at);
    }
    CHECK(partials == wanted);
    clip.finite = 0;
    kernels::adafactor_step_of_runs(runs, rates.data());
    CHECK(out == weight);
    CHECK(avg == std::vector<float>(kFirst + kRest, 0.25F));
    kernels::adafactor_norms_of_runs(runs, partials.data());
    CHECK(partials == std::vector<double>(2 * kWords));
    clip.finite = 1;
    kernels::adafactor_step_of_runs(runs, rates.data());
    CHECK(out == wanted_out);
    CHECK(avg == wanted_avg);
    for (size_t i = 0; i < low.size(); ++i) CHECK(low[i].bits == to_bf16(out[i]).bits);
  }
}
