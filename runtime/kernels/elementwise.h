#pragma once
// Pointwise maps and small reductions. T is float, bf16 or f16; sums are in float. All are deterministic for a given
// thread count, and the reductions over rows do not depend on it. A map's output may be the very array of an input of
// its shape. A NaN comes out where one went in.

#include <cstdint>
#include <span>

#include "runtime/core/dtype.h"
#include "runtime/core/exact_sum.h"
#include "runtime/kernels/sums_over_rows.h"

namespace cairn::kernels {

template <typename T>
void add(const T* a, const T* b, T* out, int64_t count);  // out = a + b; out may be a or b

/// x[r, c] += bias[c].
template <typename T>
void add_bias(T* x, const T* bias, int64_t rows, int64_t width);
/// dbias[c] += sum over r of dy[r, c], by a tree of `parts`.
template <typename T>
void bias_backward(const T* dy, float* dbias, int64_t rows, int64_t width, const TreeParts& parts = {});

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

template <typename T>
void gelu_quick_forward(const T* x, T* y, int64_t count);  // x sigmoid(1.702 x)
template <typename T>
void gelu_quick_backward(const T* dy, const T* x, T* dx, int64_t count);
template <typename T>
void relu2_forward(const T* x, T* y, int64_t count);  // max(x, 0)^2
template <typename T>
void relu2_backward(const T* dy, const T* x, T* dx, int64_t count);
template <typename T>
void silu_forward(const T* x, T* y, int64_t count);  // x sigmoid(x)
template <typename T>
void silu_backward(const T* dy, const T* x, T* dx, int64_t count);

/// Forward and backward in one pass, with their bits: dy becomes dx.
template <typename T>
void gelu_tanh_both(const T* x, T* dy, T* y, int64_t count);
template <typename T>
void gelu_erf_both(const T* x, T* dy, T* y, int64_t count);
template <typename T>
void gelu_quick_both(const T* x, T* dy, T* y, int64_t count);
template <typename T>
void relu_both(const T* x, T* dy, T* y, int64_t count);
template <typename T>
void relu2_both(const T* x, T* dy, T* y, int64_t count);
template <typename T>
void silu_both(const T* x, T* dy, T* y, int64_t count);

/// gate_up is [rows, 2F]: gate in columns [0, F), up in [F, 2F). y[rows, F] = act(gate) * up.
enum class Gate { kSilu, kGeluErf, kGeluTanh, kRelu, kGeluQuick, kRelu2 };
template <typename T>
void gated_forward(Gate gate, const T* gate_up, T* y, int64_t rows, int64_t ffn);
template <typename T>
void gated_backward(Gate gate, const T* dy, const T* gate_up, T* dgate_up, int64_t rows, int64_t ffn);

/// gpt-oss' gate: y = (u + 1) g sigmoid(alpha g), g the gate and at most `limit`, u up within +-limit. No gradient goes
/// through what was beyond it.
struct ClampedGate {
  float alpha = 0, limit = 0;
};
inline void add_dims(OpDims& /*to*/, const ClampedGate& /*of*/) {}
template <typename T>
void clamped_gate_forward(const ClampedGate& of, const T* gate_up, T* y, int64_t rows, int64_t ffn);
template <typename T>
void clamped_gate_backward(const ClampedGate& of, const T* dy, const T* gate_up, T* dgate_up, int64_t rows,
                           int64_t ffn);

/// Rotary positions: pairs of channels of each of `heads` heads in rows of stride `stride` are turned in place. Row r
/// has position r % tokens of the table, or positions[r].
struct RotaryDims {
  int64_t rows = 0, tokens = 0, heads = 0, head_dim = 0, stride = 0;
  int64_t turning = 0;                 // channels of a head that turn, its first; even
  bool interleaved = false;            // pairs (2i, 2i+1), not (i, i + turning/2)
  DevicePtr<const int32_t> positions;  // [rows], or none
};
inline void add_dims(OpDims& to, const RotaryDims& of) {
  to.add(of.rows);
  to.add(of.heads);
  to.add(of.head_dim);
}
/// cos and sin: table [tokens, pairs, 2] for pairs = frequencies.size(), position p turning pair i by the float
/// p * frequencies[i]. Both are multiplied by `factor`, and rounded once.
void rotary_table(float* table, int64_t first_position, int64_t tokens, std::span<const float> frequencies,
                  double factor);
/// `inverse` turns back (the backward pass; the factor stays).
template <typename T>
void rotary(const RotaryDims& dims, T* x, const float* table, bool inverse);

void cast(const float* in, bf16* out, int64_t count);
void cast(const bf16* in, float* out, int64_t count);
void cast(const float* in, f16* out, int64_t count);
void cast(const f16* in, float* out, int64_t count);
template <typename T>
void scale(T* x, float factor, int64_t count);
/// x = limit * tanh(x / limit).
template <typename T>
void cap(T* x, float limit, int64_t count);
/// x is brought within +- limit.
template <typename T>
void clip(T* x, float limit, int64_t count);
/// dx becomes 0 where x is outside of +- limit.
template <typename T>
void clip_backward(const T* x, T* dx, float limit, int64_t count);
/// out = a + factor * b; out may be a or b.
template <typename T>
void add_scaled(const T* a, float factor, const T* b, T* out, int64_t count);
void add_to(float* x, const float* y, int64_t count);  // x += y
void scale_floats(float* x, float factor, int64_t count);
/// Adds the squares of x. Blocks of 16 elements are summed in double first, so cuts at multiples of 16 change no bit.
void add_squares(const float* x, int64_t count, ExactSum& sum);

}  // namespace cairn::kernels
