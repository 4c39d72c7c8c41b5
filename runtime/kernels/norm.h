#pragma once
// LayerNorm and RMSNorm over rows of `width` elements. Statistics in float. A weight may count from another number than
// 0: then the factor of a channel is weight + `offset`. `weight` and its gradient may be null: the factors are 1.

#include <cstdint>

#include "runtime/kernels/sums_over_rows.h"
#include "runtime/kernels/views.h"

namespace cairn::kernels {

/// Rows that are normalised, each by itself, [rows, width].
struct NormRows {
  int64_t rows = 0, width = 0;
  float eps = 0, offset = 0;
  bool adds = false;  // of a backward pass: the gradient, rounded, is added to what dx holds
};
inline void add_dims(OpDims& to, const NormRows& of) {
  to.add(of.rows);
  to.add(of.width);
  to.say_if(of.adds, "adds");
}
/// Where gradients [width] are added, by a tree of `parts`; null: nobody wants them.
struct NormGradients {
  DevicePtr<float> weight, bias;
  TreeParts parts;
};
inline void add_dims(OpDims& to, const NormGradients& of) { add_dims(to, of.parts); }

/// y = (x - mean) * rstd * weight + bias. mean, rstd: [rows] float, kept for the backward pass. bias may be null.
template <typename T>
void layer_norm_forward(const NormRows& of, const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd);
/// dx is overwritten, and may be dy; with NormRows::adds it is added to, and is not dy.
template <typename T>
void layer_norm_backward(const NormRows& of, const T* dy, const T* x, const T* weight, const float* mean,
                         const float* rstd, T* dx, const NormGradients& to);

/// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps).
template <typename T>
void rms_norm_forward(const NormRows& of, const T* x, const T* weight, T* y, float* rstd);
template <typename T>
void rms_norm_backward(const NormRows& of, const T* dy, const T* x, const T* weight, const float* rstd, T* dx,
                       const NormGradients& to);

/// Norms of each head's channels: RMSNorm, or centred LayerNorm.
struct HeadNorm {
  int64_t rows = 0, heads = 0, head_dim = 0;
  float eps = 0, offset = 0;
  bool centred = false;
  bool own_weights = false;  // weight [heads, D], of each head; else [D], of all
};
inline void add_dims(OpDims& to, const HeadNorm& of) {
  to.add(of.rows);
  to.add(of.heads);
  to.add(of.head_dim);
}
/// x and y: [rows, heads, D]. y may be x. bias, of LayerNorm with one weight for all heads, [D]; may be null.
template <typename T>
void head_norm_forward(const HeadNorm& d, const Rows<const T>& x, const T* weight, const T* bias, const Rows<T>& y);
/// dx is overwritten and may be dy; gradients are added to, those of weights of each head by `to.parts`, the others in
/// the order of rows. stats [2, rows, heads] is scratch.
template <typename T>
void head_norm_backward(const HeadNorm& d, const Rows<const T>& dy, const Rows<const T>& x, const T* weight,
                        const Rows<T>& dx, const NormGradients& to, float* stats);

/// RMSNorm of rows of which this rank has `width` of `channels` channels. Sums over all of them come from row_dots()
/// and the ranks' sum, in which each channel is `copies` times.
struct WholeNorm {
  int64_t rows = 0, width = 0, channels = 0, copies = 1;
  float eps = 0, offset = 0;
};
inline void add_dims(OpDims& to, const WholeNorm& of) {
  to.add(of.rows);
  to.add(of.width);
  to.add(of.channels);
}
/// Sums over the channels of each row, of equal parts of them by themselves: part p of row r at p * stride + r.
struct RowDots {
  int64_t rows = 0, width = 0, parts = 1, stride = 0;
};
inline void add_dims(OpDims& to, const RowDots& of) {
  to.add(of.rows);
  to.add(of.width);
  to.add(of.parts);
}
/// sums: of a * b. With `weight` [width] a channel counts weight + offset times.
template <typename T>
void row_dots(const RowDots& d, const Rows<const T>& a, const Rows<const T>& b, const T* weight, float offset,
              float* sums);
/// squares [rows]: of x * x over all channels. y may be x.
template <typename T>
void whole_norm_forward(const WholeNorm& d, const Rows<const T>& x, const T* weight, const float* squares,
                        const Rows<T>& y);
/// dots [rows]: of dy * x * weight over all channels. dx may be dy.
template <typename T>
void whole_norm_backward(const WholeNorm& d, const Rows<const T>& dy, const Rows<const T>& x, const T* weight,
                         const float* squares, const float* dots, const Rows<T>& dx, const NormGradients& to);

}  // namespace cairn::kernels
