#pragma once
// The kernels of a device for one element type. Ops is a table of functions, filled by each device's folder; Exec is
// the table bound to a stream, by which layers call: on.add(a, b, out, n). A call orders the work on the stream; it is
// done when the stream is settled, on a CPU when the call returns.
//
// To add one: its name in a list below and an implementation for each device (runtime/kernels/table.h,
// CONTRIBUTING.md).

#include <cstdint>
#include <span>

#include "runtime/kernels/attention.h"
#include "runtime/kernels/cross_entropy.h"
#include "runtime/kernels/dropout.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/embedding.h"
#include "runtime/kernels/latent.h"
#include "runtime/kernels/matmul.h"
#include "runtime/kernels/norm.h"
#include "runtime/kernels/router.h"
#include "runtime/kernels/rows.h"
#include "runtime/kernels/table.h"

namespace cairn::kernels {

/// Templates over the element type T.
// clang-format off
#define RT_KERNELS_OF_T(X)                                                                                           \
  X(add) X(add_bias) X(add_scaled) X(scale) X(bias_backward) X(cap) X(clip) X(clip_backward)                         \
  X(gelu_tanh_forward) X(gelu_erf_forward) X(gelu_quick_forward) X(relu_forward) X(relu2_forward) X(silu_forward)    \
  X(gelu_tanh_backward) X(gelu_erf_backward) X(gelu_quick_backward) X(relu_backward) X(relu2_backward)               \
  X(silu_backward)                                                                                                   \
  X(gelu_tanh_both) X(gelu_erf_both) X(gelu_quick_both) X(relu_both) X(relu2_both) X(silu_both)                      \
  X(gated_forward) X(gated_backward) X(clamped_gate_forward) X(clamped_gate_backward)                                \
  X(rotary) X(dropout)                                                                                               \
  X(layer_norm_forward) X(layer_norm_backward) X(rms_norm_forward) X(rms_norm_backward)                              \
  X(head_norm_forward) X(head_norm_backward) X(row_dots) X(whole_norm_forward) X(whole_norm_backward)                \
  X(attention_forward) X(attention_decode) X(attention_backward_sums)                                                \
  X(join_latent_heads) X(split_latent_heads)                                                                         \
  X(embedding_forward) X(embedding_backward) X(embedding_backward_parts)                                             \
  X(positions_forward) X(positions_backward) X(positions_look_up)                                                    \
  X(row_sums) X(cross_entropy_backward) X(cross_entropy)                                                             \
  X(route_backward) X(clear_padding) X(fill_groups) X(add_rows_of_groups) X(rows_to_experts) X(scale_expert_rows) X(rows_to_tokens) X(dot_and_scale_rows)                  \
  X(gate_rows) X(gate_backward)                                                                                      \
  X(copy) X(clear) X(copy_rows) X(round_rows) X(scatter_rows) X(to_floats) X(from_floats) X(rows_to_host)
/// The same whatever T is.
#define RT_KERNELS(X)                                                                                                \
  X(matmul) X(matmul_groups)                                                                                         \
  X(rotary_table) X(alibi_slopes) X(sink_gradients)                                                                  \
  X(join_maxima) X(rescale_sums) X(row_losses) X(row_scales)                                                         \
  X(route_forward) X(count_choices) X(place_choices) X(group_choices)                                                                 \
  X(add_to) X(scale_floats) X(copy_floats) X(copy_ints) X(clear_floats) X(clear_floats_of_runs)                      \
  X(gather_floats) X(scatter_floats)                                                                                 \
  X(floats_to_host) X(ints_to_host) X(note_not_finite)
// clang-format on

/// attention_backward() is a template over two types.
template <typename T>
using AttentionBackward = void(const AttentionDims& dims, const T* q, const T* k, const T* v, const T* out,
                               const float* logsumexp, const T* dout, T* dq, T* dk, T* dv, float* scratch);

template <typename T>
struct Ops {
  RT_KERNELS_OF_T(RT_FUNCTION_OF_T)
  RT_KERNELS(RT_FUNCTION)
  typename Kernel<AttentionBackward<T>>::Function attention_backward = nullptr;
  /// matmul() does what its arguments ask for beside a sum and a bias while it writes the result. Where not, layers
  /// call the kernels of their own for it.
  bool fuses_products = false;
  /// matmul_groups() takes MatmulGroups::places: experts' counts may stay on the device.
  bool places_groups = false;
};

template <typename T>
struct Exec {
  Exec(const Ops<T>& ops, Stream& on)
      : stream(on) RT_KERNELS_OF_T(RT_BIND) RT_KERNELS(RT_BIND),
        attention_backward(ops.attention_backward, on, "attention_backward"),
        fuses_products(ops.fuses_products),
        places_groups(ops.places_groups) {}

  Stream& stream;
  RT_KERNELS_OF_T(RT_BOUND_OF_T)
  RT_KERNELS(RT_BOUND)
  typename Kernel<AttentionBackward<T>>::Bound attention_backward;
  bool fuses_products, places_groups;
};

/// The kernels of the stream's device.
template <typename T>
Exec<T> exec_on(Stream& stream);

/// Streams of CUDA devices have these kernels from now on; they outlive the streams. runtime/cuda/ops gives them.
template <typename T>
void serve_cuda_ops(const Ops<T>& ops);

}  // namespace cairn::kernels
