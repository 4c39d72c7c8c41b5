#pragma once
// Pointwise maps and small reductions. T is float, bf16 or f16; sums are in float. All are deterministic for a given
// thread count, and the reductions over rows do not depend on it. A map's output may be the very array of an input of
// its shape. A NaN comes out where one went in.

#include <cstdint>

#include "runtime/core/dtype.h"
#include "runtime/core/exact_sum.h"

namespace cairn::kernels {

template <typename T>
void add(const T* a, const T* b, T* out, int64_t count);  // out = a + b; out may be a or b

/// x[r, c] += bias[c].
template <typename T>
void add_bias(T* x, const T* bias, int64_t rows, int64_t width);
/// dbias[c] += sum over r of dy[r, c].
template <typename T>
void bias_backward(const T* dy, float* dbias, int64_t rows, int64_t width);

template <typename T>
void gelu_tanh_forward(const T* x, T* y, int64_t count);
template <typename T>
void gelu_tanh_backward(const T* dy, const T* x, T* dx, int64_t count);
template <typename T>
void gelu_erf_forward(const T* x, T* y, int64_t count);
template <typename T>
void gelu_erf_backward(const T* dy, const T* x, T* dx, int64_t count);
template <typename T>
void relu_forward(const T* x, T* y, int64_t count);
template <typename T>
void relu_backward(const T* dy, const T* x, T* dx, int64_t count);

/// gate_up is [rows, 2F]: gate in columns [0, F), up in [F, 2F). y[rows, F] = silu(gate) * up.
template <typename T>
void swiglu_forward(const T* gate_up, T* y, int64_t rows, int64_t ffn);
template <typename T>
void swiglu_backward(const T* dy, const T* gate_up, T* dgate_up, int64_t rows, int64_t ffn);

/// Rotates pairs (x_i, x_{i + D/2}) of each of `heads` heads in rows of stride `stride`, in place. Row r has position
/// first_position + r % tokens. `inverse` rotates back (the backward pass). cos and sin are computed in double once
/// per position and kept by the caller: table [tokens, D/2, 2] from rotary_table().
void rotary_table(float* table, int64_t first_position, int64_t tokens, int64_t head_dim, double theta);
template <typename T>
void rotary(T* x, const float* table, int64_t rows, int64_t tokens, int64_t heads, int64_t head_dim, int64_t stride,
            bool inverse);

void cast(const float* in, bf16* out, int64_t count);
void cast(const bf16* in, float* out, int64_t count);
void cast(const float* in, f16* out, int64_t count);
void cast(const f16* in, float* out, int64_t count);
void scale(float* x, float factor, int64_t count);
void add_to(float* x, const float* y, int64_t count);  // x += y
/// Adds the squares of x. Blocks of 16 elements are summed in double first, so cuts at multiples of 16 change no bit.
void add_squares(const float* x, int64_t count, ExactSum& sum);

}  // namespace cairn::kernels
