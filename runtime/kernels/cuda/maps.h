#pragma once
// Pointwise kernels for CUDA: those of runtime/kernels/elementwise.h, whose words and formulas these are. An output may
// be the very array of an input of its shape. T is float, bf16 or f16.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/elementwise.h"

namespace cairn::kernels::cuda {

template <typename T>
void add(Queue& on, const T* a, const T* b, T* out, int64_t count);
template <typename T>
void add_bias(Queue& on, T* x, const T* bias, int64_t rows, int64_t width);
template <typename T>
void scale(Queue& on, T* x, float factor, int64_t count);
template <typename T>
void add_scaled(Queue& on, const T* a, float factor, const T* b, T* out, int64_t count);
template <typename T>
void cap(Queue& on, T* x, float limit, int64_t count);
template <typename T>
void clip(Queue& on, T* x, float limit, int64_t count);
template <typename T>
void clip_backward(Queue& on, const T* x, T* dx, float limit, int64_t count);
void add_to(Queue& on, float* x, const float* y, int64_t count);
void scale_floats(Queue& on, float* x, float factor, int64_t count);
/// x [rows, stride]; of each row the first `width`.
template <typename T>
void add_bias_to_floats(Queue& on, float* x, int64_t stride, const T* bias, int64_t rows, int64_t width);

/// By the gate's function, of which a plain activation is one.
template <typename T>
void activation_forward(Queue& on, Gate act, const T* x, T* y, int64_t count);
template <typename T>
void activation_backward(Queue& on, Gate act, const T* dy, const T* x, T* dx, int64_t count);
/// dy becomes dx.
template <typename T>
void activation_both(Queue& on, Gate act, const T* x, T* dy, T* y, int64_t count);
template <typename T>
void gated_forward(Queue& on, Gate act, const T* gate_up, T* y, int64_t rows, int64_t ffn);
template <typename T>
void gated_backward(Queue& on, Gate act, const T* dy, const T* gate_up, T* dgate_up, int64_t rows, int64_t ffn);
template <typename T>
void clamped_gate_forward(Queue& on, const ClampedGate& of, const T* gate_up, T* y, int64_t rows, int64_t ffn);
template <typename T>
void clamped_gate_backward(Queue& on, const ClampedGate& of, const T* dy, const T* gate_up, T* dgate_up, int64_t rows,
                           int64_t ffn);

}  // namespace cairn::kernels::cuda
