#include "runtime/kernels/cuda/update.h"

#include <numeric>

#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/ema.h"
#include "runtime/kernels/lamb.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::Clip;
using kernels::ClipNumbers;
using kernels::cuda::kChunk;
using kernels::cuda::UpdateNumbers;
using kernels::cuda::UpdateRun;
using kernels::cuda::UpdateTables;

namespace {

constexpr int64_t kWords = ExactSum::kWords;

// Runs: less than a pack, with a tail, of two chunks.
const std::vector<int64_t> kCounts = {3, 1001, kChunk + 37};

/// Gradients and state of all runs, each at a multiple of 4 elements; `shift` moves them from there.
struct Runs {
  explicit Runs(int64_t shift = 0) {
    int64_t at = shift;
    for (const int64_t count : kCounts) {
      begins.push_back(at);
      at += (count + 3) / 4 * 4;
    }
    all = at;
    grad = normals<float>("grad", all, 0.1);
    master = normals<float>("master", all);
    exp_avg = normals<float>("exp_avg", all, 0.1);
    exp_avg_sq = normals<float>("exp_avg_sq", all, 0.1);
    for (float& v : exp_avg_sq) v *= v;
  }
  std::vector<int64_t> begins;
  int64_t all = 0;
  std::vector<float> grad, master, exp_avg, exp_avg_sq;
};

/// The CPU's, of one run.
kernels::StateArrays arrays_of(Runs& runs, size_t run) {
  const int64_t at = runs.begins[run];
  return {DevicePtr(runs.master.data() + at), DevicePtr(runs.exp_avg.data() + at),
          DevicePtr(runs.exp_avg_sq.data() + at)};
}

constexpr Clip kClip{.grad_scale = 0.5f};  // of all updates here

/// For the CPU, and for UpdateNumbers.
kernels::AdamwArgs args_of(int64_t numbers) {
  return {.lr = 1e-2f,
          .beta1 = 0.9f,
          .beta2 = 0.95f,
          .eps = 1e-8f,
          .weight_decay = numbers == 0 ? 0.0f : 0.1f,
          .clip = DevicePtr(&kClip),
          .step = 3};
}

struct OnDeviceRuns {
  explicit OnDeviceRuns(const Runs& runs)
      : grad(runs.grad),
        master(runs.master),
        exp_avg(runs.exp_avg),
        exp_avg_sq(runs.exp_avg_sq),
        low(filled<bf16>(runs.all, 9)),
        half(filled<f16>(runs.all, 9)) {
    for (size_t run = 0; run < kCounts.size(); ++run) {
      const int64_t at = runs.begins[run];
      const kernels::cuda::StateRun state{master.data() + at, exp_avg.data() + at, exp_avg_sq.data() + at};
      table.push_back({.grad = grad.data() + at,
                       .from = state,
                       .to = state,
                       .weights = run != 1 ? static_cast<void*>(low.data() + at) : half.data() + at,
                       .count = kCounts[run],
                       .of = UpdateNumbers::of(args_of(run == 0 ? 0 : 1)),
                       .dtype = run != 1 ? DType::kBf16 : DType::kF16});
    }
  }
  OnDevice<float> grad, master, exp_avg, exp_avg_sq;
  OnDevice<bf16> low;
  OnDevice<f16> half;
  std::vector<UpdateRun> table;
};

/// The table on the device, its chunks numbered.
struct OnDeviceTables {
  explicit OnDeviceTables(std::vector<UpdateRun> of)
      : chunks(UpdateTables::number_chunks(of)), runs(of), tables{runs.data(), std::ssize(of), chunks} {}
  int64_t chunks;
  OnDevice<UpdateRun> runs;
  UpdateTables tables;
};

template <typename T>
void check_weights(const std::vector<float>& master, const std::vector<T>& weights, int64_t begin, int64_t count) {
  for (int64_t i = begin; i < begin + count; ++i) {
    const float wanted = std::is_same_v<T, bf16> ? to_f32(to_bf16(master[i])) : to_f32(to_f16(master[i]));
    if (to_f32(weights[i]) == wanted) continue;
    CAPTURE(i);
    CHECK(to_f32(weights[i]) == wanted);
    return;
  }
  CHECK(to_f32(weights[begin + count]) == 9);  // behind a run nothing is written
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/update") {
  TEST_CASE("runs know their first chunk, and blocks find their runs, empty ones between") {
    std::vector<UpdateRun> runs;
    for (const int64_t count : {int64_t{0}, kChunk, int64_t{0}, kChunk + 1, int64_t{5}, int64_t{0}})
      runs.push_back({.count = count});
    CHECK(UpdateTables::number_chunks(runs) == 4);
    const auto x = normals<float>("x", 3 * kChunk);
    std::vector<float> wanted(x.size(), 9.0f);
    int64_t at = 3;
    for (UpdateRun& run : runs) {
      std::copy_n(x.begin() + at, run.count, wanted.begin() + at);
      at += run.count + 3;
    }
    in_every_order([&] {
      OnDevice<float> from(x), to(filled<float>(std::ssize(x), 9.0f));
      std::vector<UpdateRun> table = runs;
      int64_t begin = 3;
      for (UpdateRun& run : table) {
        run.grad = run.from.master = from.data() + begin;
        run.to.master = to.data() + begin;
        begin += run.count + 3;
      }
      const OnDeviceTables there(table);
      Queue on;
      kernels::cuda::ema(on, 0.5, there.tables, nullptr);
      CHECK(to.values() == wanted);
    });
  }

  TEST_CASE("averages of weights are the CPU's, aligned or not, in place") {
    for (const int64_t shift : {0, 1}) {
      const auto weight = normals<float>("weight", 1037), from = normals<float>("from", 1037);
      const int64_t count = std::ssize(weight) - shift;
      std::vector<float> to = from;
      kernels::ema(0.99, weight.data() + shift, to.data() + shift, to.data() + shift, count, {});
      in_every_order([&] {
        OnDevice<float> d_weight(weight), d_to(from);
        float* const average = d_to.data() + shift;
        const OnDeviceTables there({{.grad = d_weight.data() + shift,
                                     .from = {.master = average},
                                     .to = {.master = average},
                                     .count = count}});
        Queue on;
        OnDevice<Clip> clip(std::vector<Clip>{{.finite = 0}});
        kernels::cuda::ema(on, 0.99, there.tables, clip.data());
        CHECK(same_bits(d_to.values(), from));
        clip.data()->finite = 1;
        kernels::cuda::ema(on, 0.99, there.tables, clip.data());
        check_alike(d_to.values(), to, pointwise<float>());
      });
    }
  }

  TEST_CASE("the norm of gradients has the CPU's bits, wherever they begin and however large they are") {
    for (const int64_t shift : {0, 1}) {
      for (const float size : {1.0f, 1e-18f, 1e17f}) {
        CAPTURE(shift);
        CAPTURE(size);
        Runs runs(shift);
        for (float& g : runs.grad) g *= size;
        ExactSum wanted;
        for (size_t run = 0; run < kCounts.size(); ++run) {
          kernels::add_squares(runs.grad.data() + runs.begins[run], kCounts[run], wanted);
        }
        const auto all = wanted.words();
        in_every_order([&] {
          OnDevice<float> grad(runs.grad);
          std::vector<kernels::ElemRun> table;
          for (size_t run = 0; run < kCounts.size(); ++run) table.push_back({runs.begins[run], kCounts[run]});
          OnDevice<kernels::ElemRun> d_table(table);
          OnDevice<double> words(kWords);
          ScratchQueue on(2 * kernels::cuda::kSquaresPartials);
          kernels::cuda::add_squares_of_runs(on, grad.data(), d_table.data(), std::ssize(table), words.data());
          CHECK(words.values() == std::vector<double>(all.begin(), all.end()));
          const ClipNumbers numbers{0.5, 1.25, 4.0};
          OnDevice<ClipNumbers> d_numbers(std::vector<ClipNumbers>{numbers});
          OnDevice<Clip> out(1);
          kernels::cuda::clip_by_norm(on, words.data(), d_numbers.data(), nullptr, nullptr, out.data());
          const double norm = std::sqrt(wanted.value()) / 4.0 * 1.25;
          const Clip clip = out.values()[0];
          CHECK(clip.norm == norm);
          CHECK(clip.finite == 1);
          CHECK(clip.grad_scale == static_cast<float>(std::min(1.0, 0.5 / (norm + 1e-6)) * 1.25 / 4.0));
          for (const double ruined : {0.0, 1.0}) {
            OnDevice<double> d_ruined(std::vector<double>{ruined});
            kernels::cuda::clip_by_norm(on, words.data(), d_numbers.data(), d_ruined.data(), nullptr, out.data());
            CHECK(out.values()[0].finite == (ruined == 0 ? 1 : 0));
            OnDevice<double> d_counted(std::vector<double>{3});
            kernels::cuda::clip_by_norm(on, words.data(), d_numbers.data(), d_ruined.data(), d_counted.data(),
                                        out.data());
            Clip third;
            const double counted = 3;
            kernels::clip_by_norm(words.values().data(), &numbers, &ruined, &counted, &third);
            CHECK(out.values()[0].norm == third.norm);
            CHECK(out.values()[0].grad_scale == third.grad_scale);
            CHECK(out.values()[0].finite == third.finite);
            CHECK(third.norm < norm);
          }
        });
      }
    }
  }

  TEST_CASE("squares of more runs than a block reads at once, some empty, some of several chunks") {
    std::vector<kernels::ElemRun> runs;
    int64_t end = 0;
    for (int64_t run = 0; run < 300; ++run) {
      const int64_t count = run == 100 || run == 290 ? 2 * kChunk + 5 : run % 7;
      runs.push_back({end, count});
      end += (count + 15) / 16 * 16;
    }
    const auto x = normals<float>("x", end);
    std::vector<double> wanted(kWords);
    kernels::add_squares_of_runs(x.data(), runs.data(), std::ssize(runs), wanted.data());
    in_every_order([&] {
      OnDevice<float> d_x(x);
      OnDevice<kernels::ElemRun> d_runs(runs);
      OnDevice<double> words(kWords);
      ScratchQueue on(2 * kernels::cuda::kSquaresPartials);
      kernels::cuda::add_squares_of_runs(on, d_x.data(), d_runs.data(), std::ssize(runs), words.data());
      CHECK(words.values() == wanted);
    });
  }

  TEST_CASE("a gradient that is infinite or no number makes the norm so") {
    for (const float bad : {INFINITY, NAN}) {
      std::vector<float> grad(100, 1.0f);
      grad[77] = bad;
      OnDevice<float> d_grad(grad);
      OnDevice<kernels::ElemRun> runs(std::vector<kernels::ElemRun>{{0, 100}});
      OnDevice<double> words(kWords);
      OnDevice<ClipNumbers> d_numbers(std::vector<ClipNumbers>{{}});
      OnDevice<Clip> out(1);
      ScratchQueue on(2 * kernels::cuda::kSquaresPartials);
      kernels::cuda::add_squares_of_runs(on, d_grad.data(), runs.data(), 1, words.data());
      kernels::cuda::clip_by_norm(on, words.data(), d_numbers.data(), nullptr, nullptr, out.data());
      CHECK(out.values()[0].finite == 0);
      CHECK(std::isnan(out.values()[0].norm) == std::isnan(bad));
    }
  }

  TEST_CASE("AdamW over many runs is the CPU's; where the norm is not finite nothing is written") {
    for (const int64_t shift : {0, 1}) {
      CAPTURE(shift);
      const Runs before(shift);
      Runs after = before;
      for (size_t run = 0; run < kCounts.size(); ++run) {
        const int64_t at = before.begins[run];
        const kernels::StateArrays state = arrays_of(after, run);
        kernels::AdamwArgs args = args_of(run == 0 ? 0 : 1);
        args.portable = true;
        kernels::adamw(args, before.grad.data() + at, state, state, nullptr, nullptr, kCounts[run]);
      }
      in_every_order([&] {
        OnDeviceRuns there(before);
        const OnDeviceTables on_device(there.table);
        const UpdateTables& tables = on_device.tables;
        OnDevice<Clip> clip(std::vector<Clip>{{1, 0.5f, 0}});
        Queue on;
        kernels::cuda::adamw(on, tables, clip.data());
        CHECK(same_bits(there.master.values(), before.master));
        CHECK(same_bits(there.exp_avg.values(), before.exp_avg));
        clip.data()->finite = 1;
        kernels::cuda::adamw(on, tables, clip.data());
        check_alike(there.master.values(), after.master, pointwise<float>());
        check_alike(there.exp_avg.values(), after.exp_avg, pointwise<float>());
        check_alike(there.exp_avg_sq.values(), after.exp_avg_sq, pointwise<float>());
        check_weights(there.master.values(), there.low.values(), before.begins[0], kCounts[0]);
        check_weights(there.master.values(), there.half.values(), before.begins[1], kCounts[1]);
      });
    }
  }

  TEST_CASE("LAMB over many runs is the CPU's, its ratio that of whole tensors") {
    const std::vector<size_t> tensors = {0, 0, 1};
    const Runs before;
    Runs after = before;
    std::vector<double> norm_words(2 * kernels::TensorNorms::kWords);
    const auto norms_of = [&](size_t tensor) {
      return kernels::TensorNorms{
          std::span(norm_words).subspan(tensor * kernels::TensorNorms::kWords, kernels::TensorNorms::kWords)};
    };
    for (size_t run = 0; run < kCounts.size(); ++run) {
      kernels::lamb_moments(args_of(run == 0 ? 0 : 1), before.grad.data() + before.begins[run], arrays_of(after, run),
                            arrays_of(after, run), kCounts[run], norms_of(tensors[run]));
    }
    std::vector<float> trust;
    for (const size_t tensor : {0, 1}) {
      const kernels::TensorNorms norm = norms_of(tensor);
      trust.push_back(static_cast<float>(std::sqrt(norm.weight().value()) / std::sqrt(norm.step().value())));
    }
    for (size_t run = 0; run < kCounts.size(); ++run) {
      kernels::lamb_step(args_of(run == 0 ? 0 : 1), trust[tensors[run]], arrays_of(after, run), arrays_of(after, run),
                         kCounts[run]);
    }
    in_every_order([&] {
      OnDeviceRuns there(before);
      for (size_t run = 0; run < kCounts.size(); ++run) there.table[run].tensor = static_cast<int32_t>(tensors[run]);
      const OnDeviceTables on_device(there.table);
      const UpdateTables& tables = on_device.tables;
      OnDevice<Clip> clip(std::vector<Clip>{{1, 0.5f, 0}});
      OnDevice<double> partials(on_device.chunks * 2 * kWords), words(std::vector<double>(2 * 2 * kWords));
      Queue on;
      const auto step = [&] {
        kernels::cuda::lamb_moments(on, tables, clip.data(), partials.data());
        kernels::cuda::add_words_of_tensors(on, partials.data(), tables, words.data());
        kernels::cuda::lamb_step(on, tables, clip.data(), words.data());
      };
      step();
      CHECK(same_bits(there.master.values(), before.master));
      CHECK(same_bits(there.exp_avg.values(), before.exp_avg));
      CHECK(words.values() == std::vector<double>(static_cast<size_t>(words.size()), 0.0));
      clip.data()->finite = 1;
      step();
      std::vector<double> sums = words.values();
      for (const size_t tensor : {0, 1}) {
        const kernels::TensorNorms got{
            std::span(sums).subspan(tensor * kernels::TensorNorms::kWords, kernels::TensorNorms::kWords)};
        CHECK(got.weight().value() == doctest::Approx(norms_of(tensor).weight().value()).epsilon(1e-6));
        CHECK(got.step().value() == doctest::Approx(norms_of(tensor).step().value()).epsilon(1e-5));
      }
      check_alike(there.exp_avg.values(), after.exp_avg, pointwise<float>());
      check_alike(there.master.values(), after.master, pointwise<float>());
      check_weights(there.master.values(), there.low.values(), before.begins[0], kCounts[0]);
    });
  }
}
