#include "runtime/kernels/cuda/maps.h"

#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

template <typename T>
struct Add {
  const T *a, *b;
  T* out;
  template <int N>
  __device__ void at(int64_t i) const {
    const auto x = load_pack<N>(a + i), y = load_pack<N>(b + i);
    Pack<T, N> z;
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&z.at[k], load_f32(x.at[k]) + load_f32(y.at[k]));
    store_pack<N>(out + i, z);
  }
};

template <typename T>
struct AddScaled {
  const T *a, *b;
  T* out;
  float factor;
  template <int N>
  __device__ void at(int64_t i) const {
    const auto x = load_pack<N>(a + i), y = load_pack<N>(b + i);
    Pack<T, N> z;
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&z.at[k], load_f32(x.at[k]) + factor * load_f32(y.at[k]));
    store_pack<N>(out + i, z);
  }
};

template <typename T>
struct Scale {
  T* x;
  float factor;
  template <int N>
  __device__ void at(int64_t i) const {
    auto z = load_pack<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&z.at[k], factor * load_f32(z.at[k]));
    store_pack<N>(x + i, z);
  }
};

template <typename T>
struct Cap {
  T* x;
  float limit, inverse;
  template <int N>
  __device__ void at(int64_t i) const {
    auto z = load_pack<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&z.at[k], limit * tanhf(load_f32(z.at[k]) * inverse));
    store_pack<N>(x + i, z);
  }
};

/// A NaN stays one: no comparison holds.
template <typename T>
struct ClipTo {
  T* x;
  float limit;
  template <int N>
  __device__ void at(int64_t i) const {
    auto z = load_pack<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float v = load_f32(z.at[k]);
      store_f32(&z.at[k], v > limit ? limit : v < -limit ? -limit : v);
    }
    store_pack<N>(x + i, z);
  }
};

template <typename T>
struct ClipGradient {
  const T* x;
  T* dx;
  float limit;
  template <int N>
  __device__ void at(int64_t i) const {
    const auto of = load_pack<N>(x + i);
    auto z = load_pack<N>(dx + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float v = load_f32(of.at[k]);
      if (v > limit || v < -limit) store_f32(&z.at[k], 0.0f);
    }
    store_pack<N>(dx + i, z);
  }
};

template <typename T>
struct AddBias {
  T* x;
  const T* bias;
  int64_t width;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    auto z = load_pack<N>(x + row * width + c);
    const auto b = load_pack<N>(bias + c);
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&z.at[k], load_f32(z.at[k]) + load_f32(b.at[k]));
    store_pack<N>(x + row * width + c, z);
  }
};

template <typename T>
struct AddBiasToFloats {
  float* x;
  int64_t stride;
  const T* bias;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    static_assert(N == 1);
    x[row * stride + c] += load_f32(bias[c]);
  }
};

// --- activations: the value, and the slope where it is asked for
// ------------------------------------------------------

__device__ __forceinline__ float fast_sigmoid(float x) { return fast_ratio(1.0f, 1.0f + fast_exp(-x)); }

/// sqrt(2/pi) (x + 0.044715 x^3), twice: Hendrycks & Gimpel 2016.
__device__ __forceinline__ float gelu_tanh(float x, float* slope) {
  constexpr float kTwoSqrtTwoOverPi = 1.5957691216f, kCubic = 0.044715f;
  const float s = fast_sigmoid(kTwoSqrtTwoOverPi * (x + kCubic * x * x * x));
  *slope = s + x * (s * (1.0f - s)) * (kTwoSqrtTwoOverPi * (1.0f + 3.0f * kCubic * x * x));
  return x * s;
}
__device__ __forceinline__ float gelu_erf(float x, float* slope) {
  constexpr float kOneOverSqrtTwo = 0.7071067812f, kOneOverSqrtTwoPi = 0.3989422804f;
  const float cdf = 0.5f + 0.5f * erff(kOneOverSqrtTwo * x);
  *slope = cdf + x * (kOneOverSqrtTwoPi * fast_exp(-0.5f * x * x));
  return x * cdf;
}
/// x sigmoid(factor x).
__device__ __forceinline__ float swish(float factor, float x, float* slope) {
  const float s = fast_sigmoid(factor * x), value = x * s;
  *slope = s + factor * value * (1.0f - s);
  return value;
}
/// A NaN stays one, in the slope too.
__device__ __forceinline__ float relu(float x, float* slope) {
  *slope = x <= 0.0f ? 0.0f : (x > 0.0f ? 1.0f : x);
  return x < 0.0f ? 0.0f : x;
}
__device__ __forceinline__ float relu2(float x, float* slope) {
  *slope = x < 0.0f ? 0.0f : 2.0f * x;
  return x < 0.0f ? 0.0f : x * x;
}

/// All threads of a launch have the same function: the branch costs nothing that a memory-bound kernel would notice.
__device__ __forceinline__ float activate(Gate act, float x, float* slope) {
  switch (act) {
    case Gate::kSilu:
      return swish(1.0f, x, slope);
    case Gate::kGeluErf:
      return gelu_erf(x, slope);
    case Gate::kGeluTanh:
      return gelu_tanh(x, slope);
    case Gate::kRelu:
      return relu(x, slope);
    case Gate::kGeluQuick:
      return swish(1.702f, x, slope);
    case Gate::kRelu2:
      return relu2(x, slope);
  }
  return *slope = x;
}

template <typename T>
struct Forward {
  Gate act;
  const T* x;
  T* y;
  template <int N>
  __device__ void at(int64_t i) const {
    auto z = load_pack<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float slope;
      store_f32(&z.at[k], activate(act, load_f32(z.at[k]), &slope));
    }
    store_pack<N>(y + i, z);
  }
};

template <typename T>
struct Backward {
  Gate act;
  const T *dy, *x;
  T* dx;
  template <int N>
  __device__ void at(int64_t i) const {
    auto z = load_pack<N>(dy + i);
    const auto of = load_pack<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float slope;
      activate(act, load_f32(of.at[k]), &slope);
      store_f32(&z.at[k], load_f32(z.at[k]) * slope);
    }
    store_pack<N>(dx + i, z);
  }
};

template <typename T>
struct Both {
  Gate act;
  const T* x;
  T *dy, *y;
  template <int N>
  __device__ void at(int64_t i) const {
    auto z = load_pack<N>(dy + i), of = load_pack<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float slope;
      const float value = activate(act, load_f32(of.at[k]), &slope);
      store_f32(&z.at[k], load_f32(z.at[k]) * slope);
      store_f32(&of.at[k], value);
    }
    store_pack<N>(dy + i, z);
    store_pack<N>(y + i, of);
  }
};

template <typename T>
struct GatedForward {
  Gate act;
  const T* gate_up;
  T* y;
  int64_t ffn;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const T* const gate = gate_up + row * 2 * ffn + c;
    auto g = load_pack<N>(gate);
    const auto up = load_pack<N>(gate + ffn);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float slope;
      store_f32(&g.at[k], activate(act, load_f32(g.at[k]), &slope) * load_f32(up.at[k]));
    }
    store_pack<N>(y + row * ffn + c, g);
  }
};

template <typename T>
struct GatedBackward {
  Gate act;
  const T *dy, *gate_up;
  T* dgate_up;
  int64_t ffn;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const int64_t gate = row * 2 * ffn + c;
    const auto d = load_pack<N>(dy + row * ffn + c);
    auto g = load_pack<N>(gate_up + gate), up = load_pack<N>(gate_up + gate + ffn);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float slope;
      const float value = activate(act, load_f32(g.at[k]), &slope), by = load_f32(d.at[k]);
      store_f32(&g.at[k], by * load_f32(up.at[k]) * slope);
      store_f32(&up.at[k], by * value);
    }
    store_pack<N>(dgate_up + gate, g);
    store_pack<N>(dgate_up + gate + ffn, up);
  }
};

/// Written so that a NaN passes.
struct Clamped {
  float gate, factor, sigmoid_of_gate;  // at most `limit`; up, brought within it, + 1
  __device__ __forceinline__ Clamped(const ClampedGate& of, float gate_in, float up)
      : gate(gate_in > of.limit ? of.limit : gate_in) {
    const float below = up > of.limit ? of.limit : up;
    factor = (below < -of.limit ? -of.limit : below) + 1.0f;
    sigmoid_of_gate = sigmoid(of.alpha * gate);
  }
};

template <typename T>
struct ClampedForward {
  ClampedGate of;
  const T* gate_up;
  T* y;
  int64_t ffn;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const T* const gate = gate_up + row * 2 * ffn + c;
    auto g = load_pack<N>(gate);
    const auto up = load_pack<N>(gate + ffn);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const Clamped at(of, load_f32(g.at[k]), load_f32(up.at[k]));
      store_f32(&g.at[k], at.factor * (at.gate * at.sigmoid_of_gate));
    }
    store_pack<N>(y + row * ffn + c, g);
  }
};

template <typename T>
struct ClampedBackward {
  ClampedGate of;
  const T *dy, *gate_up;
  T* dgate_up;
  int64_t ffn;
  template <int N>
  __device__ void at(int64_t row, int64_t c) const {
    const int64_t gate = row * 2 * ffn + c;
    const auto d = load_pack<N>(dy + row * ffn + c);
    auto g = load_pack<N>(gate_up + gate), up = load_pack<N>(gate_up + gate + ffn);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float gate_in = load_f32(g.at[k]), up_in = load_f32(up.at[k]), by = load_f32(d.at[k]);
      const Clamped at(of, gate_in, up_in);
      const float s = at.sigmoid_of_gate;
      const float slope = s * (1.0f + of.alpha * at.gate * (1.0f - s));
      store_f32(&g.at[k], gate_in > of.limit ? 0.0f : by * at.factor * slope);
      store_f32(&up.at[k], fabsf(up_in) > of.limit ? 0.0f : by * at.gate * s);
    }
    store_pack<N>(dgate_up + gate, g);
    store_pack<N>(dgate_up + gate + ffn, up);
  }
};

}  // namespace

template <typename T>
void add(Queue& on, const T* a, const T* b, T* out, int64_t count) {
  map<kWide<T>>(on, Add<T>{a, b, out}, count, aligned_to(16, a, b, out));
}
template <typename T>
void add_bias(Queue& on, T* x, const T* bias, int64_t rows, int64_t width) {
  map_rows<kWide<T>>(on, AddBias<T>{x, bias, width}, rows, width, aligned_to(16, x, bias));
}
template <typename T>
void scale(Queue& on, T* x, float factor, int64_t count) {
  map<kWide<T>>(on, Scale<T>{x, factor}, count, aligned_to(16, x));
}
template <typename T>
void add_scaled(Queue& on, const T* a, float factor, const T* b, T* out, int64_t count) {
  map<kWide<T>>(on, AddScaled<T>{a, b, out, factor}, count, aligned_to(16, a, b, out));
}
void add_to(Queue& on, float* x, const float* y, int64_t count) { add<float>(on, x, y, x, count); }
template <typename T>
void add_bias_to_floats(Queue& on, float* x, int64_t stride, const T* bias, int64_t rows, int64_t width) {
  map_rows<1>(on, AddBiasToFloats<T>{x, stride, bias}, rows, width, true);
}
template <typename T>
void cap(Queue& on, T* x, float limit, int64_t count) {
  map<kWide<T>>(on, Cap<T>{x, limit, 1.0f / limit}, count, aligned_to(16, x));
}
template <typename T>
void clip(Queue& on, T* x, float limit, int64_t count) {
  map<kWide<T>>(on, ClipTo<T>{x, limit}, count, aligned_to(16, x));
}
template <typename T>
void clip_backward(Queue& on, const T* x, T* dx, float limit, int64_t count) {
  map<kWide<T>>(on, ClipGradient<T>{x, dx, limit}, count, aligned_to(16, x, dx));
}
void scale_floats(Queue& on, float* x, float factor, int64_t count) { scale<float>(on, x, factor, count); }

template <typename T>
void activation_forward(Queue& on, Gate act, const T* x, T* y, int64_t count) {
  map<kWide<T>>(on, Forward<T>{act, x, y}, count, aligned_to(16, x, y));
}
template <typename T>
void activation_backward(Queue& on, Gate act, const T* dy, const T* x, T* dx, int64_t count) {
  map<kWide<T>>(on, Backward<T>{act, dy, x, dx}, count, aligned_to(16, dy, x, dx));
}
template <typename T>
void activation_both(Queue& on, Gate act, const T* x, T* dy, T* y, int64_t count) {
  map<kWide<T>>(on, Both<T>{act, x, dy, y}, count, aligned_to(16, x, dy, y));
}
template <typename T>
void gated_forward(Queue& on, Gate act, const T* gate_up, T* y, int64_t rows, int64_t ffn) {
  map_rows<kWide<T>>(on, GatedForward<T>{act, gate_up, y, ffn}, rows, ffn, aligned_to(16, gate_up, y));
}
template <typename T>
void gated_backward(Queue& on, Gate act, const T* dy, const T* gate_up, T* dgate_up, int64_t rows, int64_t ffn) {
  map_rows<kWide<T>>(on, GatedBackward<T>{act, dy, gate_up, dgate_up, ffn}, rows, ffn,
                     aligned_to(16, dy, gate_up, dgate_up));
}
template <typename T>
void clamped_gate_forward(Queue& on, const ClampedGate& of, const T* gate_up, T* y, int64_t rows, int64_t ffn) {
  map_rows<kWide<T>>(on, ClampedForward<T>{of, gate_up, y, ffn}, rows, ffn, aligned_to(16, gate_up, y));
}
template <typename T>
void clamped_gate_backward(Queue& on, const ClampedGate& of, const T* dy, const T* gate_up, T* dgate_up, int64_t rows,
                           int64_t ffn) {
  map_rows<kWide<T>>(on, ClampedBackward<T>{of, dy, gate_up, dgate_up, ffn}, rows, ffn,
                     aligned_to(16, dy, gate_up, dgate_up));
}

#define RT_INSTANTIATE(T)                                                                            \
  template void add<T>(Queue&, const T*, const T*, T*, int64_t);                                     \
  template void add_bias<T>(Queue&, T*, const T*, int64_t, int64_t);                                 \
  template void scale<T>(Queue&, T*, float, int64_t);                                                \
  template void add_scaled<T>(Queue&, const T*, float, const T*, T*, int64_t);                       \
  template void cap<T>(Queue&, T*, float, int64_t);                                                  \
  template void clip<T>(Queue&, T*, float, int64_t);                                                 \
  template void clip_backward<T>(Queue&, const T*, T*, float, int64_t);                              \
  template void activation_forward<T>(Queue&, Gate, const T*, T*, int64_t);                          \
  template void activation_backward<T>(Queue&, Gate, const T*, const T*, T*, int64_t);               \
  template void activation_both<T>(Queue&, Gate, const T*, T*, T*, int64_t);                         \
  template void gated_forward<T>(Queue&, Gate, const T*, T*, int64_t, int64_t);                      \
  template void gated_backward<T>(Queue&, Gate, const T*, const T*, T*, int64_t, int64_t);           \
  template void add_bias_to_floats<T>(Queue&, float*, int64_t, const T*, int64_t, int64_t);          \
  template void clamped_gate_forward<T>(Queue&, const ClampedGate&, const T*, T*, int64_t, int64_t); \
  template void clamped_gate_backward<T>(Queue&, const ClampedGate&, const T*, const T*, T*, int64_t, int64_t)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
