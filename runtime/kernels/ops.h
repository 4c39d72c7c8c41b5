#pragma once
// The kernels of a device for one element type. Ops is a table of functions, filled by each device's folder; Exec is
// the table bound to a stream, by which layers call: on.add(a, b, out, n). A call orders the work on the stream; it is
// done when the stream is settled, on a CPU when the call returns.
//
// A kernel is declared once, for the CPU, in its header here, which says what it computes; in the tables its addresses
// are DevicePtr and the stream comes first. To add one: its name in a list below and an implementation for each device
// (CONTRIBUTING.md).

#include <cstdint>
#include <span>
#include <type_traits>

#include "runtime/device/stream.h"
#include "runtime/kernels/attention.h"
#include "runtime/kernels/cross_entropy.h"
#include "runtime/kernels/dropout.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/embedding.h"
#include "runtime/kernels/matmul.h"
#include "runtime/kernels/norm.h"
#include "runtime/kernels/router.h"
#include "runtime/kernels/rows.h"

namespace cairn::kernels {

/// Templates over the element type T.
// clang-format off
#define RT_KERNELS_OF_T(X)                                                                                           \
  X(add) X(add_bias) X(add_scaled) X(scale) X(bias_backward)                                                         \
  X(gelu_tanh_forward) X(gelu_erf_forward) X(gelu_quick_forward) X(relu_forward) X(relu2_forward) X(silu_forward)    \
  X(gelu_tanh_backward) X(gelu_erf_backward) X(gelu_quick_backward) X(relu_backward) X(relu2_backward)               \
  X(silu_backward)                                                                                                   \
  X(gelu_tanh_both) X(gelu_erf_both) X(gelu_quick_both) X(relu_both) X(relu2_both) X(silu_both)                      \
  X(gated_forward) X(gated_backward)                                                                                 \
  X(rotary) X(dropout)                                                                                               \
  X(layer_norm_forward) X(layer_norm_backward) X(rms_norm_forward) X(rms_norm_backward)                              \
  X(head_norm_forward) X(head_norm_backward)                                                                         \
  X(attention_forward) X(attention_decode) X(attention_backward_sums)                                                \
  X(embedding_forward) X(embedding_backward) X(embedding_backward_parts)                                             \
  X(positions_forward) X(positions_backward) X(positions_look_up)                                                    \
  X(row_sums) X(cross_entropy_backward)                                                                              \
  X(route_backward) X(rows_to_experts) X(rows_to_tokens) X(dot_and_scale_rows)                                       \
  X(copy) X(clear) X(copy_rows) X(round_rows) X(scatter_rows) X(to_floats) X(from_floats) X(rows_to_host)
/// The same whatever T is.
#define RT_KERNELS(X)                                                                                                \
  X(matmul) X(matmul_groups)                                                                                         \
  X(rotary_table) X(alibi_slopes)                                                                                    \
  X(join_maxima) X(rescale_sums) X(row_losses) X(row_scales)                                                         \
  X(route_forward) X(count_choices) X(place_choices)                                                                 \
  X(add_to) X(scale_floats) X(copy_floats) X(copy_ints) X(clear_floats) X(gather_floats) X(scatter_floats)           \
  X(floats_to_host) X(ints_to_host)
// clang-format on

/// How a parameter of a CPU's kernel stands in the tables.
template <typename A>
struct Param {
  using Type = A;
  static A on_cpu(A a) { return a; }
};
template <typename T>
struct Param<T*> {
  using Type = DevicePtr<T>;
  static T* on_cpu(DevicePtr<T> a) { return a.address(); }
};

/// A kernel in the tables, from the type of the CPU's.
template <typename Cpu>
struct Kernel;
template <typename... A>
struct Kernel<void(A...)> {
  using Function = void (*)(Stream&, typename Param<A>::Type...);
  /// Bound to a stream.
  class Bound {
   public:
    Bound(Function function, Stream& stream) : function_(function), stream_(&stream) {}
    void operator()(typename Param<A>::Type... of) const { function_(*stream_, of...); }

   private:
    Function function_;
    Stream* stream_;
  };
};

#define RT_TYPE_OF_T(name) Kernel<std::remove_pointer_t<decltype(&kernels::name<T>)>>
#define RT_TYPE(name) Kernel<std::remove_pointer_t<decltype(&kernels::name)>>

/// attention_backward() is a template over two types.
template <typename T>
using AttentionBackward = void(const AttentionDims& dims, const T* q, const T* k, const T* v, const T* out,
                               const float* logsumexp, const T* dout, T* dq, T* dk, T* dv, float* scratch);

template <typename T>
struct Ops {
#define RT_MEMBER(name) typename RT_TYPE_OF_T(name)::Function name = nullptr;
  RT_KERNELS_OF_T(RT_MEMBER)
#undef RT_MEMBER
#define RT_MEMBER(name) typename RT_TYPE(name)::Function name = nullptr;
  RT_KERNELS(RT_MEMBER)
#undef RT_MEMBER
  typename Kernel<AttentionBackward<T>>::Function attention_backward = nullptr;
};

template <typename T>
struct Exec {
  Exec(const Ops<T>& ops, Stream& on)
      : stream(on)
#define RT_BIND(name) , name(ops.name, on)
            RT_KERNELS_OF_T(RT_BIND) RT_KERNELS(RT_BIND),
        attention_backward(ops.attention_backward, on) {
  }
#undef RT_BIND

  Stream& stream;
#define RT_MEMBER(name) typename RT_TYPE_OF_T(name)::Bound name;
  RT_KERNELS_OF_T(RT_MEMBER)
#undef RT_MEMBER
#define RT_MEMBER(name) typename RT_TYPE(name)::Bound name;
  RT_KERNELS(RT_MEMBER)
#undef RT_MEMBER
  typename Kernel<AttentionBackward<T>>::Bound attention_backward;
};

#undef RT_TYPE_OF_T
#undef RT_TYPE

/// The kernels of the stream's device.
template <typename T>
Exec<T> exec_on(Stream& stream);

}  // namespace cairn::kernels
