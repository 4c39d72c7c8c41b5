#pragma once
// Bytes of device memory that an op reads and writes, by the sizes of its call: each array once, partial sums and other
// small ones left out. Products and attention have 0: no size is a measure of them. An op that has no line here, or
// whose parameters have changed, is found out when a step calls it.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>

#include "runtime/core/dtype.h"
#include "runtime/kernels/ops.h"
#include "runtime/kernels/state_ops.h"

namespace cairn::testing {

template <size_t N>
struct Text {
  char at[N] = {};
  constexpr Text(const char (&text)[N]) { std::copy_n(text, N, at); }  // NOLINT: to be written as a literal
};
template <Text kName>
struct Op {
  static constexpr const char* name() { return kName.at; }
};

/// Bytes that the host has given the device at this address.
using Given = std::function<std::span<const std::byte>(const void*)>;

namespace op_bytes {

using kernels::NormGradients;
using kernels::NormRows;
template <typename T>
using In = DevicePtr<const T>;
template <typename T>
using Out = DevicePtr<T>;
constexpr int64_t kFloat = 4, kInt = 4;
template <typename T>
constexpr int64_t kElem = static_cast<int64_t>(sizeof(T));

/// Elements of runs that the host has given; 0 where it has not.
inline int64_t elems_of(const Given& given, In<kernels::ElemRun> runs, int64_t count) {
  const std::span<const std::byte> bytes = given ? given(runs.address()) : std::span<const std::byte>();
  if (std::ssize(bytes) < count * static_cast<int64_t>(sizeof(kernels::ElemRun))) return 0;
  const auto* const run = reinterpret_cast<const kernels::ElemRun*>(bytes.data());
  return std::accumulate(run, run + count, int64_t{0}, [](int64_t sum, const auto& of) { return sum + of.count; });
}

// --- products and attention
int64_t moved(const Given&, Op<"matmul">, const auto&...) { return 0; }
int64_t moved(const Given&, Op<"matmul_groups">, const auto&...) { return 0; }
int64_t moved(const Given&, Op<"attention_forward">, const auto&...) { return 0; }
int64_t moved(const Given&, Op<"attention_backward">, const auto&...) { return 0; }
int64_t moved(const Given&, Op<"attention_backward_sums">, const auto&...) { return 0; }
int64_t moved(const Given&, Op<"attention_decode">, const auto&...) { return 0; }

// --- element by element
template <typename T>
int64_t moved(const Given&, Op<"add">, In<T>, In<T>, Out<T>, int64_t count) {
  return 3 * kElem<T> * count;
}
template <typename T>
int64_t moved(const Given&, Op<"add_scaled">, In<T>, float, In<T>, Out<T>, int64_t count) {
  return 3 * kElem<T> * count;
}
template <typename T>
int64_t moved(const Given&, Op<"add_bias">, Out<T>, In<T>, int64_t rows, int64_t width) {
  return 2 * kElem<T> * rows * width;
}
template <typename T>
int64_t moved(const Given&, Op<"bias_backward">, In<T>, Out<float>, int64_t rows, int64_t width, const auto&) {
  return kElem<T> * rows * width;
}
template <typename T>
int64_t moved(const Given&, Op<"scale">, Out<T>, float, int64_t count) {
  return 2 * kElem<T> * count;
}
#define RT_ACTIVATION_BYTES(name)                                                           \
  template <typename T>                                                                     \
  int64_t moved(const Given&, Op<#name "_forward">, In<T>, Out<T>, int64_t count) {         \
    return 2 * kElem<T> * count;                                                            \
  }                                                                                         \
  template <typename T>                                                                     \
  int64_t moved(const Given&, Op<#name "_backward">, In<T>, In<T>, Out<T>, int64_t count) { \
    return 3 * kElem<T> * count;                                                            \
  }                                                                                         \
  template <typename T>                                                                     \
  int64_t moved(const Given&, Op<#name "_both">, In<T>, Out<T>, Out<T>, int64_t count) {    \
    return 4 * kElem<T> * count;                                                            \
  }
RT_ACTIVATION_BYTES(gelu_tanh)
RT_ACTIVATION_BYTES(silu)
#undef RT_ACTIVATION_BYTES
template <typename T>
int64_t moved(const Given&, Op<"gated_forward">, kernels::Gate, In<T>, Out<T>, int64_t rows, int64_t ffn) {
  return 3 * kElem<T> * rows * ffn;
}
template <typename T>
int64_t moved(const Given&, Op<"gated_backward">, kernels::Gate, In<T>, In<T>, Out<T>, int64_t rows, int64_t ffn) {
  return 5 * kElem<T> * rows * ffn;
}
template <typename T>
int64_t moved(const Given&, Op<"rotary">, const kernels::RotaryDims& of, Out<T>, In<float>, bool) {
  return of.rows * of.heads * of.turning * 2 * kElem<T> + of.tokens * of.turning * kFloat;
}

// --- norms
template <typename T>
int64_t moved(const Given&, Op<"layer_norm_forward">, const NormRows& of, In<T>, const auto&...) {
  return of.rows * (2 * kElem<T> * of.width + 2 * kFloat);
}
template <typename T>
int64_t moved(const Given&, Op<"rms_norm_forward">, const NormRows& of, In<T>, const auto&...) {
  return of.rows * (2 * kElem<T> * of.width + kFloat);
}
template <typename T>
int64_t moved(const Given&, Op<"layer_norm_backward">, const NormRows& of, In<T>, const auto&...) {
  return of.rows * ((of.adds ? 4 : 3) * kElem<T> * of.width + 2 * kFloat);
}
template <typename T>
int64_t moved(const Given&, Op<"rms_norm_backward">, const NormRows& of, In<T>, const auto&...) {
  return of.rows * ((of.adds ? 4 : 3) * kElem<T> * of.width + kFloat);
}

// --- look-ups and losses
template <typename T>
int64_t moved(const Given&, Op<"embedding_forward">, In<int32_t>, int64_t rows, const kernels::TableRange& of, In<T>,
              Out<T>) {
  return rows * (2 * kElem<T> * of.width + kInt);
}
template <typename T>
int64_t moved(const Given&, Op<"embedding_backward">, In<int32_t>, int64_t rows, const kernels::TableRange& of, In<T>,
              Out<float>, float) {
  return rows * (kElem<T> * of.width + kInt) + std::min(rows, of.count) * of.width * 2 * kFloat;
}
template <typename T>
int64_t moved(const Given&, Op<"positions_forward">, Out<T>, In<T>, const kernels::RowPositions&, int64_t rows,
              int64_t width) {
  return 3 * kElem<T> * rows * width;
}
template <typename T>
int64_t moved(const Given&, Op<"positions_backward">, In<T>, Out<float>, const kernels::RowPositions& positions,
              int64_t rows, int64_t width) {
  return rows * width * kElem<T> + std::min(rows, positions.tokens.tokens) * width * 2 * kFloat;
}
template <typename T>
int64_t moved(const Given&, Op<"row_sums">, const kernels::LogitRows& of, In<T>, const auto&...) {
  return of.rows * (kElem<T> * of.cols + 3 * kFloat + kInt);
}
template <typename T>
int64_t moved(const Given&, Op<"cross_entropy">, const kernels::LogitRows& of, Out<T>, const auto&...) {
  return 2 * kElem<T> * of.rows * of.cols;
}
template <typename T>
int64_t moved(const Given&, Op<"cross_entropy_backward">, const kernels::LogitRows& of, Out<T>, const auto&...) {
  return of.rows * (2 * kElem<T> * of.cols + 3 * kFloat + kInt);
}
inline int64_t moved(const Given&, Op<"join_maxima">, In<float>, int64_t parts, int64_t rows, Out<float>) {
  return (parts + 1) * rows * kFloat;
}
inline int64_t moved(const Given&, Op<"rescale_sums">, In<float>, In<float>, int64_t parts, int64_t, int64_t rows,
                     Out<float>) {
  return 3 * parts * rows * kFloat;
}
inline int64_t moved(const Given&, Op<"row_losses">, In<int32_t>, In<float>, In<float>, int64_t rows, Out<float>) {
  return 4 * rows * kFloat;
}
inline int64_t moved(const Given&, Op<"row_scales">, In<int32_t>, In<float> weights, float, int64_t rows, Out<float>) {
  return (weights ? 3 : 2) * rows * kFloat;
}

// --- experts
inline int64_t moved(const Given&, Op<"route_forward">, const kernels::RouterDims& d, Out<float>, Out<int32_t>,
                     Out<float>, Out<float>) {
  return d.tokens * (2 * kFloat * d.experts + (kInt + kFloat) * d.choices + kFloat);
}
template <typename T>
int64_t moved(const Given&, Op<"route_backward">, const kernels::RouterDims& d, In<float>, In<int32_t>, In<float>,
              const kernels::RouterLosses&, Out<T>) {
  return d.tokens * ((kInt + kFloat) * d.choices + d.experts * (kFloat + kElem<T>));
}
inline int64_t moved(const Given&, Op<"count_choices">, In<int32_t>, int64_t choices, std::span<int32_t>) {
  return choices * kInt;
}
inline int64_t moved(const Given&, Op<"place_choices">, In<int32_t>, int64_t choices, std::span<int64_t>,
                     Out<int32_t>) {
  return 2 * choices * kInt;
}
template <typename T>
int64_t moved(const Given&, Op<"rows_to_experts">, In<T>, In<int32_t>, int64_t tokens, int64_t choices, int64_t width,
              Out<T>) {
  return tokens * (kElem<T> * (1 + choices) * width + kInt * choices);
}
template <typename T>
int64_t moved(const Given&, Op<"rows_to_tokens">, In<T>, In<int32_t>, In<float>, int64_t tokens, int64_t choices,
              int64_t width, Out<T>) {
  return tokens * (kElem<T> * (1 + choices) * width + (kInt + kFloat) * choices);
}
template <typename T>
int64_t moved(const Given&, Op<"scale_expert_rows">, Out<T>, In<int32_t>, In<float>, int64_t choices, int64_t width) {
  return choices * (2 * kElem<T> * width + kInt + kFloat);
}
template <typename T>
int64_t moved(const Given&, Op<"dot_and_scale_rows">, Out<T>, Out<T>, In<int32_t>, In<float>, int64_t tokens,
              int64_t choices, int64_t width, Out<float>) {
  return tokens * choices * (4 * kElem<T> * width + kInt + 2 * kFloat);
}

// --- copies and clears
template <typename T>
int64_t moved(const Given&, Op<"copy">, In<T>, Out<T>, int64_t count) {
  return 2 * kElem<T> * count;
}
template <typename T>
int64_t moved(const Given&, Op<"clear">, Out<T>, int64_t count) {
  return kElem<T> * count;
}
inline int64_t moved(const Given&, Op<"clear_floats">, Out<float>, int64_t count) { return kFloat * count; }
inline int64_t moved(const Given& given, Op<"clear_floats_of_runs">, Out<float>, In<kernels::ElemRun> runs,
                     int64_t count) {
  return kFloat * elems_of(given, runs, count);
}
inline int64_t moved(const Given&, Op<"copy_floats">, In<float>, Out<float>, int64_t count) {
  return 2 * kFloat * count;
}
inline int64_t moved(const Given&, Op<"copy_ints">, In<int32_t>, Out<int32_t>, int64_t count) {
  return 2 * kInt * count;
}
inline int64_t moved(const Given&, Op<"add_to">, Out<float>, In<float>, int64_t count) { return 3 * kFloat * count; }
inline int64_t moved(const Given&, Op<"scale_floats">, Out<float>, float, int64_t count) { return 2 * kFloat * count; }
template <typename T>
int64_t moved(const Given&, Op<"copy_rows">, In<T>, int64_t, Out<T>, int64_t, int64_t rows, int64_t width) {
  return 2 * kElem<T> * rows * width;
}
template <typename T>
int64_t moved(const Given&, Op<"round_rows">, In<float>, int64_t, Out<T>, int64_t, int64_t rows, int64_t width) {
  return rows * width * (kFloat + kElem<T>);
}
template <typename T>
int64_t moved(const Given&, Op<"to_floats">, In<T>, Out<float>, int64_t count) {
  return count * (kFloat + kElem<T>);
}
template <typename T>
int64_t moved(const Given&, Op<"from_floats">, In<float>, Out<T>, int64_t count) {
  return count * (kFloat + kElem<T>);
}
inline int64_t moved(const Given&, Op<"floats_to_host">, In<float>, std::span<float> host) {
  return kFloat * std::ssize(host);
}
inline int64_t moved(const Given&, Op<"ints_to_host">, In<int32_t>, std::span<int32_t> host) {
  return kInt * std::ssize(host);
}

inline int64_t moved(const Given&, Op<"group_choices">, const kernels::GroupDims& of, const auto&...) {
  return 2 * kInt * of.choices;
}
template <typename T>
int64_t moved(const Given&, Op<"clear_padding">, In<kernels::GroupRows>, int64_t, int64_t, Out<T>) {
  return 0;  // how many rows it is the device knows: fewer than 32 of each group
}

template <typename T>
int64_t moved(const Given&, Op<"fill_groups">, In<kernels::GroupRows>, int64_t all_rows,
              std::span<const DevicePtr<const T>>, int64_t width, Out<T>) {
  return kElem<T> * all_rows * width;
}
template <typename T>
int64_t moved(const Given&, Op<"add_rows_of_groups">, In<kernels::GroupRows>, int64_t all_rows, In<T>, int64_t,
              int64_t width, std::span<const DevicePtr<float>>) {
  return kElem<T> * all_rows * width;
}

// --- training state
inline int64_t moved(const Given&, Op<"clip_by_norm">, const auto&...) { return 0; }
inline int64_t moved(const Given& given, Op<"add_squares_of_runs">, In<float>, In<kernels::ElemRun> runs, int64_t count,
                     Out<double>) {
  return kFloat * elems_of(given, runs, count);
}
inline int64_t moved(const Given&, Op<"doubles_to_host">, const auto&...) { return 0; }
inline int64_t moved(const Given&, Op<"fill_doubles">, const auto&...) { return 0; }
inline int64_t moved(const Given&, Op<"note_not_finite">, In<float>, int64_t count, bool, Out<double>) {
  return kFloat * count;
}
inline int64_t moved(const Given&, Op<"add_norms_of_runs">, const auto&...) { return 0; }
inline int64_t moved(const Given&, Op<"lamb_moments_of_runs">, std::span<const kernels::AdamRun> runs, Out<double>) {
  constexpr int64_t kArrays = 1 + 1 + 2 * 2;  // gradient, weights, moments twice
  int64_t bytes = 0;
  for (const kernels::AdamRun& run : runs) bytes += run.count * kArrays * kFloat;
  return bytes;
}
inline int64_t moved(const Given&, Op<"lamb_step_of_runs">, std::span<const kernels::AdamRun> runs, In<double>) {
  constexpr int64_t kArrays = 2 + 2;  // moments, weights twice
  int64_t bytes = 0;
  for (const kernels::AdamRun& run : runs)
    bytes += run.count * (kArrays * kFloat + (run.weights ? dtype_size_bytes(run.dtype) : 0));
  return bytes;
}
inline int64_t moved(const Given&, Op<"adamw_of_runs">, std::span<const kernels::AdamRun> runs) {
  constexpr int64_t kArrays = 3;
  int64_t bytes = 0;
  for (const kernels::AdamRun& run : runs)
    bytes += run.count * ((1 + 2 * kArrays) * kFloat + (run.weights ? dtype_size_bytes(run.dtype) : 0));
  return bytes;
}
inline int64_t moved(const Given&, Op<"copy_summed">, In<float> from, Out<float> to, int64_t count,
                     const kernels::BlockSums& sums) {
  const int64_t arrays = (In<float>(to) == from ? 0 : 2) + (sums.sums.empty() ? 0 : 1);
  return arrays * kFloat * count;
}
inline int64_t moved(const Given&, Op<"head_factors">, const auto&...) { return 0; }
inline int64_t moved(const Given&, Op<"scale_heads_of_runs">, std::span<const kernels::HeadRun> runs, In<float>,
                     In<kernels::Clip>) {
  int64_t bytes = 0;
  for (const kernels::HeadRun& run : runs) bytes += run.count * (2 * kFloat + dtype_size_bytes(run.dtype));
  return bytes;
}
inline int64_t squared_bytes(std::span<const kernels::SquaresRun> runs) {
  int64_t bytes = 0;
  for (const kernels::SquaresRun& run : runs) bytes += 2 * kFloat * run.matrix.count;  // for rows, and for columns
  return bytes;
}
inline int64_t moved(const Given&, Op<"adafactor_squares_of_runs">, std::span<const kernels::SquaresRun> runs) {
  return squared_bytes(runs);
}
inline int64_t moved(const Given&, Op<"adafactor_moments">, const kernels::AdafactorDecay&,
                     std::span<const kernels::SquaresRun> runs, const auto&) {
  return squared_bytes(runs);
}
inline int64_t moved(const Given&, Op<"adafactor_factors_of_tensors">, const auto&...) { return 0; }
inline int64_t moved(const Given&, Op<"adafactor_rates">, const auto&...) { return 0; }
inline int64_t moved(const Given&, Op<"adafactor_rates_of_runs">, const auto&...) { return 0; }
inline int64_t moved(const Given&, Op<"adafactor_norms_of_runs">, std::span<const kernels::AdafactorRun> runs,
                     Out<double>) {
  int64_t bytes = 0;
  for (const kernels::AdafactorRun& run : runs) bytes += run.matrix.count * 2 * kFloat;
  return bytes;
}
inline int64_t moved(const Given&, Op<"adafactor_step_of_runs">, std::span<const kernels::AdafactorRun> runs,
                     In<float>) {
  int64_t bytes = 0;
  for (const kernels::AdafactorRun& run : runs) {
    const int64_t arrays = 3 + (run.to.exp_avg ? 2 : 0);  // gradient, weights twice, averages twice
    bytes += run.matrix.count * (arrays * kFloat + (run.weights ? dtype_size_bytes(run.dtype) : 0));
  }
  return bytes;
}
inline int64_t moved(const Given&, Op<"ema_of_runs">, double, std::span<const kernels::EmaRun> runs) {
  int64_t bytes = 0;
  for (const kernels::EmaRun& run : runs) bytes += run.count * 3 * kFloat;
  return bytes;
}
inline int64_t moved(const Given&, Op<"put_weights">, In<float>, int64_t count, DType dtype, Out<void>) {
  return count * (kFloat + dtype_size_bytes(dtype));
}

}  // namespace op_bytes
}  // namespace cairn::testing
