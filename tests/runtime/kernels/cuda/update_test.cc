#include "runtime/kernels/cuda/update.h"

#include <numeric>

#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/lamb.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;
using kernels::Clip;
using kernels::ClipNumbers;
using kernels::cuda::Chunk;
using kernels::cuda::kChunk;
using kernels::cuda::UpdateNumbers;
using kernels::cuda::UpdateRun;

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
                       .weight_bf16 = run != 1 ? low.data() + at : nullptr,
                       .weight_f16 = run == 1 ? half.data() + at : nullptr,
                       .count = kCounts[run],
                       .numbers = run == 0 ? 0 : 1,
                       .tensor = run == 2 ? 1 : 0});
    }
  }
  OnDevice<float> grad, master, exp_avg, exp_avg_sq;
  OnDevice<bf16> low;
  OnDevice<f16> half;
  std::vector<UpdateRun> table;
};

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

std::vector<UpdateNumbers> numbers() { return {UpdateNumbers::of(args_of(0)), UpdateNumbers::of(args_of(1))}; }

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
  TEST_CASE("chunks cut runs, and groups of runs know theirs") {
    const std::vector<Chunk> chunks = kernels::cuda::chunks_of(std::vector<int64_t>{kChunk, 0, kChunk + 1, 5});
    REQUIRE(chunks.size() == 4);
    CHECK(chunks[0].run == 0);
    CHECK(chunks[2].run == 2);
    CHECK(chunks[2].number == 1);
    CHECK(chunks[3].run == 3);
    const std::vector<int32_t> groups = {0, 0, 1, 2};
    CHECK(kernels::cuda::chunk_begins(chunks, groups, 3) == std::vector<int32_t>{0, 1, 3, 4});
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
        const std::vector<Chunk> chunks = kernels::cuda::chunks_of(kCounts);
        const auto all = wanted.words();
        in_every_order([&] {
          OnDevice<float> grad(runs.grad);
          std::vector<kernels::cuda::Floats> table;
          for (size_t run = 0; run < kCounts.size(); ++run)
            table.push_back({grad.data() + runs.begins[run], kCounts[run]});
          OnDevice<kernels::cuda::Floats> d_table(table);
          OnDevice<Chunk> d_chunks(chunks);
          OnDevice<int32_t> begins(std::vector<int32_t>{0, static_cast<int32_t>(chunks.size())});
          OnDevice<double> partials(std::ssize(chunks) * kWords), words(kWords);
          Queue on;
          kernels::cuda::squares(on, d_table.data(), d_chunks.data(), std::ssize(chunks), partials.data());
          kernels::cuda::add_words(on, partials.data(), begins.data(), 1, 1, words.data());
          CHECK(words.values() == std::vector<double>(all.begin(), all.end()));
          OnDevice<ClipNumbers> d_numbers(std::vector<ClipNumbers>{{0.5, 1.25, 4.0}});
          OnDevice<Clip> out(1);
          kernels::cuda::clip_by_norm(on, words.data(), d_numbers.data(), out.data());
          const double norm = std::sqrt(wanted.value()) / 4.0 * 1.25;
          const Clip clip = out.values()[0];
          CHECK(clip.norm == norm);
          CHECK(clip.finite == 1);
          CHECK(clip.grad_scale == static_cast<float>(std::min(1.0, 0.5 / (norm + 1e-6)) * 1.25 / 4.0));
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
    kernels::add_squares_of_runs(x.data(), runs.data(), std::ssize(runs), wanted);
    in_every_order([&] {
      OnDevice<float> d_x(x);
      OnDevice<kernels::ElemRun> d_runs(runs);
      OnDevice<double> partials(kernels::cuda::kSquaresPartials), words(kWords);
      Queue on;
      kernels::cuda::add_squares_of_runs(on, d_x.data(), d_runs.data(), std::ssize(runs), partials.data(),
                                         words.data());
      CHECK(words.values() == wanted);
    });
  }

  TEST_CASE("a gradient that is infinite or no number makes the norm so") {
    for (const float bad : {INFINITY, NAN}) {
      std::vector<float> grad(100, 1.0f);
      grad[77] = bad;
      OnDevice<float> d_grad(grad);
      OnDevice<kernels::cuda::Floats> table(std::vector<kernels::cuda::Floats>{{d_grad.data(), 100}});
      OnDevice<Chunk> chunks(kernels::cuda::chunks_of(std::vector<int64_t>{100}));
      OnDevice<int32_t> begins(std::vector<int32_t>{0, 1});
      OnDevice<double> partials(kWords), words(kWords);
      OnDevice<ClipNumbers> d_numbers(std::vector<ClipNumbers>{{}});
      OnDevice<Clip> out(1);
      Queue on;
      kernels::cuda::squares(on, table.data(), chunks.data(), 1, partials.data());
      kernels::cuda::add_words(on, partials.data(), begins.data(), 1, 1, words.data());
      kernels::cuda::clip_by_norm(on, words.data(), d_numbers.data(), out.data());
      CHECK(out.values()[0].finite == 0);
      CHECK(std::isnan(out.values()[0].norm) == std::isnan(bad));
    }
  }

  TEST_CASE("AdamW over many runs is the CPU's; where the norm is not finite nothing is written") {
    const std::vector<Chunk> chunks = kernels::cuda::chunks_of(kCounts);
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
        OnDevice<UpdateRun> table(there.table);
        OnDevice<Chunk> d_chunks(chunks);
        OnDevice<UpdateNumbers> d_numbers(numbers());
        OnDevice<Clip> clip(std::vector<Clip>{{1, 0.5f, 0}});
        Queue on;
        const kernels::cuda::UpdateTables tables{table.data(), d_chunks.data(), std::ssize(chunks), d_numbers.data()};
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
    const std::vector<Chunk> chunks = kernels::cuda::chunks_of(kCounts);
    const std::vector<int32_t> tensors = {0, 0, 1};
    const Runs before;
    Runs after = before;
    std::vector<double> norm_words(2 * kernels::TensorNorms::kWords);
    const auto norms_of = [&](int32_t tensor) {
      return kernels::TensorNorms{
          std::span(norm_words).subspan(tensor * kernels::TensorNorms::kWords, kernels::TensorNorms::kWords)};
    };
    for (size_t run = 0; run < kCounts.size(); ++run) {
      kernels::lamb_moments(args_of(run == 0 ? 0 : 1), before.grad.data() + before.begins[run], arrays_of(after, run),
                            arrays_of(after, run), kCounts[run], norms_of(tensors[run]));
    }
    std::vector<float> trust;
    for (const int32_t tensor : {0, 1}) {
      const kernels::TensorNorms norm = norms_of(tensor);
      trust.push_back(static_cast<float>(std::sqrt(norm.weight().value()) / std::sqrt(norm.step().value())));
    }
    for (size_t run = 0; run < kCounts.size(); ++run) {
      kernels::lamb_step(args_of(run == 0 ? 0 : 1), trust[tensors[run]], arrays_of(after, run), arrays_of(after, run),
                         kCounts[run]);
    }
    in_every_order([&] {
      OnDeviceRuns there(before);
      OnDevice<UpdateRun> table(there.table);
      OnDevice<Chunk> d_chunks(chunks);
      OnDevice<int32_t> begins(kernels::cuda::chunk_begins(chunks, tensors, 2));
      OnDevice<UpdateNumbers> d_numbers(numbers());
      OnDevice<Clip> clip(std::vector<Clip>{{1, 0.5f, 0}});
      OnDevice<double> partials(std::ssize(chunks) * 2 * kWords), words(2 * 2 * kWords);
      OnDevice<float> d_trust(2);
      Queue on;
      const kernels::cuda::UpdateTables tables{table.data(), d_chunks.data(), std::ssize(chunks), d_numbers.data()};
      const auto step = [&] {
        kernels::cuda::lamb_moments(on, tables, clip.data(), partials.data());
        kernels::cuda::add_words(on, partials.data(), begins.data(), 2, 2, words.data());
        kernels::cuda::lamb_trust(on, words.data(), 2, d_trust.data());
        kernels::cuda::lamb_step(on, tables, clip.data(), d_trust.data());
      };
      step();
      CHECK(same_bits(there.master.values(), before.master));
      CHECK(same_bits(there.exp_avg.values(), before.exp_avg));
      CHECK(d_trust.values() == std::vector<float>{1, 1});
      clip.data()->finite = 1;
      step();
      check_alike(d_trust.values(), trust, pointwise<float>());
      check_alike(there.exp_avg.values(), after.exp_avg, pointwise<float>());
      check_alike(there.master.values(), after.master, pointwise<float>());
      check_weights(there.master.values(), there.low.values(), before.begins[0], kCounts[0]);
    });
  }
}
