#include "runtime/kernels/state_copies.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "runtime/core/check.h"
#include "runtime/core/finite.h"
#include "runtime/core/random.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/parallel.h"

namespace cairn::kernels {
namespace {

/// Before this process writes memory that it shares and may not have touched: a page that is first read is mapped
/// together with its neighbours, one that is first written alone, and that takes longer than the writing.
void map_pages(const std::byte* area, int64_t bytes) {
  constexpr int64_t kMappedAtOnce = int64_t{64} << 10;  // Linux' fault_around_bytes
  parallel_elements(bytes, [=](int64_t at, int64_t end) {
    for (; at < end; at += kMappedAtOnce) static_cast<void>(*static_cast<const volatile std::byte*>(area + at));
  });
}

}  // namespace

void copy_state(const float* from, float* to, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { std::copy(from + i, from + end, to + i); });
}

void copy_summed(const float* from, float* to, int64_t count, const BlockSums& sums) {
  if (to != from) copy_state(from, to, count);
  if (!sums.sums.empty()) sums.put(0, word_sums(reinterpret_cast<const std::byte*>(to), count));
}

void put_weights(const float* master, int64_t count, DType dtype, void* weights) {
  switch (dtype) {
    case DType::kBf16:
      return cast(master, static_cast<bf16*>(weights), count);
    case DType::kF16:
      return cast(master, static_cast<f16*>(weights), count);
    case DType::kF32:
      return copy_state(master, static_cast<float*>(weights), count);
    default:
      RT_CHECK(false, "weights of type {}", static_cast<int>(dtype));
  }
}

void put_first_weights(const float* master, int64_t count, DType dtype, void* weights) {
  map_pages(static_cast<const std::byte*>(weights), count * dtype_size_bytes(dtype));
  put_weights(master, count, dtype, weights);
}

void draw_weights(const FirstWeights& box, float* out) {
  constexpr int64_t kWork = 32;  // of a normal number, in elements touched
  if (box.kind != FirstWeights::Kind::kNormal) {
    const float all = box.kind == FirstWeights::Kind::kOnes ? 1.0f : 0.0f;
    return parallel_elements(box.rows * box.width, [=](int64_t i, int64_t end) { std::fill(out + i, out + end, all); });
  }
  parallel_ranges(box.rows * box.width, 16, kWork, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t number = box.first + i / box.width * box.stride + i % box.width;
      out[i] = box.std * normal_at(box.key, static_cast<uint64_t>(number));
    }
  });
}

void balance_bias(float rate, float mean, const Clip* clip, const float* choices, const float* from, float* to,
                  int64_t count) {
  if (clip != nullptr && clip->finite == 0) return;
  for (int64_t i = 0; i < count; ++i) {
    const float step = choices[i] < mean ? rate : choices[i] > mean ? -rate : 0.0f;
    to[i] = from[i] + step;
  }
}

void add_squares_of_runs(const float* x, const ElemRun* runs, int64_t run_count, double* words) {
  ExactSum sum;
  for (const ElemRun& run : std::span(runs, static_cast<size_t>(run_count))) {
    RT_CHECK(run.begin % 16 == 0, "a run of squares begins at element {}", run.begin);
    add_squares(x + run.begin, run.count, sum);
  }
  std::ranges::copy(sum.words(), words);
}

void fill_doubles(double value, double* numbers, int64_t count) { std::fill_n(numbers, count, value); }

void doubles_to_host(const double* from, std::span<double> host) { std::copy_n(from, host.size(), host.data()); }

void count_not_finite(const float* x, int64_t count, std::span<int64_t> counts) {
  std::atomic<int64_t> found = 0;
  parallel_elements(count, [&](int64_t begin, int64_t end) {
    found += cairn::count_not_finite({x + begin, static_cast<size_t>(end - begin)});
  });
  counts[0] += found;
}

}  // namespace cairn::kernels
