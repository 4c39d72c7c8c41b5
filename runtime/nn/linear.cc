#include "runtime/nn/linear.h"

#include <algorithm>
#include <utility>

#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/few_rows.h"
#include "runtime/kernels/matmul.h"

namespace cairn::nn {

namespace {

/// x W^T and dy W; where they go is for the caller to say.
template <typename Real>
kernels::MatmulArgs output_of(const Linear<Real>& linear, const Real* x, int64_t rows) {
  return {.m = rows,
          .n = linear.out,
          .k = linear.in,
          .a = x,
          .lda = linear.in,
          .b = linear.weight.weight,
          .ldb = linear.in,
          .trans_b = true,
          .ldc = linear.out,
          .ab_dtype = DTypeOf<Real>::value,
          .c_dtype = DTypeOf<Real>::value};
}

template <typename Real>
kernels::MatmulArgs input_gradient_of(const Linear<Real>& linear, const Real* dy, int64_t dy_stride, int64_t rows) {
  return {.m = rows,
          .n = linear.in,
          .k = linear.out,
          .a = dy,
          .lda = dy_stride,
          .b = linear.weight.weight,
          .ldb = linear.in,
          .ldc = linear.in,
          .ab_dtype = DTypeOf<Real>::value,
          .c_dtype = DTypeOf<Real>::value};
}

template <typename Real>
kernels::MatmulArgs weight_gradient_of(const Linear<Real>& linear, const Real* dy, int64_t dy_stride, const Real* x,
                                       int64_t rows) {
  return {.m = linear.out,
          .n = linear.in,
          .k = rows,
          .a = dy,
          .lda = dy_stride,
          .trans_a = true,
          .b = x,
          .ldb = linear.in,
          .ldc = linear.in,
          .ab_dtype = DTypeOf<Real>::value,
          .c_dtype = DType::kF32};
}

void matmul_into(const PartialSum& sum, kernels::MatmulArgs product) {
  product.c = sum.data;
  product.c_dtype = sum.dtype;
  product.parts = sum.parts;
  kernels::matmul(product);
}

}  // namespace

template <typename Real>
void Linear<Real>::forward(const Real* x, Real* y, int64_t y_stride, int64_t rows, bool accumulate) const {
  // Without gradients only: in training the bits must not depend on how many rows a rank happens to have.
  if (rows <= kernels::kFewRows && weight.grad == nullptr && !accumulate) {
    kernels::few_rows_matmul(x, weight.weight, bias.weight, y, y_stride, rows, out, in);
    return;
  }
  kernels::MatmulArgs product = output_of(*this, x, rows);
  product.c = y;
  product.ldc = y_stride;
  product.accumulate = accumulate;
  product.bias = bias.weight;
  kernels::matmul(product);
}

template <typename Real>
void Linear<Real>::backward_input(const Real* dy, int64_t dy_stride, Real* dx, bool accumulate, int64_t rows) const {
  kernels::MatmulArgs product = input_gradient_of(*this, dy, dy_stride, rows);
  product.c = dx;
  product.accumulate = accumulate;
  kernels::matmul(product);
}

template <typename Real>
void Linear<Real>::forward_partial(const Real* x, const PartialSum& y, int64_t rows) const {
  const bool few = rows <= kernels::kFewRows && weight.grad == nullptr && y.dtype == DTypeOf<Real>::value;
  if (!y.tree || few) return forward(x, static_cast<Real*>(y.data), out, rows);
  matmul_into(y, output_of(*this, x, rows));
}

template <typename Real>
void Linear<Real>::backward_input_partial(const Real* dy, int64_t dy_stride, const PartialSum& dx, int64_t rows) const {
  if (!dx.tree) return backward_input(dy, dy_stride, static_cast<Real*>(dx.data), false, rows);
  matmul_into(dx, input_gradient_of(*this, dy, dy_stride, rows));
}

template <typename Real>
void Linear<Real>::backward_weight(const Real* dy, int64_t dy_stride, const Real* x, int64_t rows,
                                   int64_t parts) const {
  kernels::MatmulArgs product = weight_gradient_of(*this, dy, dy_stride, x, rows);
  product.c = weight.grad;
  product.accumulate = weight.unwritten == nullptr || std::exchange(*weight.unwritten, 0) == 0;
  product.parts = parts;
  kernels::matmul(product);
}

template <typename Real>
void Linear<Real>::weight_sum(const Real* dy, int64_t dy_stride, const Real* x, int64_t rows, int64_t parts,
                              float* sum) const {
  kernels::MatmulArgs product = weight_gradient_of(*this, dy, dy_stride, x, rows);
  product.c = sum;
  product.parts = parts;
  kernels::matmul(product);
}

template <typename Real>
ColumnGroup<Real>::ColumnGroup(const std::vector<Linear<Real>>& parts) : ColumnGroup(parts, 0, 0) {
  for (const Linear<Real>& part : parts) stride_ += part.out;
}

template <typename Real>
ColumnGroup<Real>::ColumnGroup(const std::vector<Linear<Real>>& parts, int64_t first, int64_t stride)
    : first_(first), stride_(stride) {
  for (const Linear<Real>& part : parts) {
    weights_.push_back({part.weight.weight, part.out});
    if (!parts_.empty()) {
      Linear<Real>& last = parts_.back();
      // Gradients have the same offsets as weights, so they touch when the weights do.
      const bool touching = last.weight.weight + last.out * last.in == part.weight.weight &&
                            (!part.bias || last.bias.weight + last.out == part.bias.weight);
      if (touching) {
        last.out += part.out;
        if (part.weight.unwritten != nullptr) merged_.push_back(part.weight.unwritten);
        continue;
      }
    }
    parts_.push_back(part);
  }
}

template <typename Real>
void ColumnGroup<Real>::forward(const Real* x, Real* y, int64_t rows) const {
  y += first_;
  for (const Linear<Real>& part : parts_) {
    part.forward(x, y, stride_, rows);
    y += part.out;
  }
}

template <typename Real>
void ColumnGroup<Real>::backward_input(const Real* dy, Real* dx, int64_t rows, bool accumulate) const {
  dy += first_;
  for (const Linear<Real>& part : parts_) {
    part.backward_input(dy, stride_, dx, accumulate, rows);
    dy += part.out;
    accumulate = true;
  }
}

template <typename Real>
void ColumnGroup<Real>::backward_input_partial(const Real* dy, const PartialSum& dx, int64_t rows) const {
  constexpr DType dtype = DTypeOf<Real>::value;
  if (!dx.tree) return backward_input(dy, static_cast<Real*>(dx.data), rows);
  int64_t out = 0;
  for (const kernels::MatmulStretch& weight : weights_) out += weight.k;
  kernels::matmul({.m = rows,
                   .n = parts_.front().in,
                   .k = out,
                   .a = dy + first_,
                   .lda = stride_,
                   .ldb = parts_.front().in,
                   .c = dx.data,
                   .ldc = parts_.front().in,
                   .ab_dtype = dtype,
                   .c_dtype = dx.dtype,
                   .parts = dx.parts,
                   .stretches = weights_});
}

template <typename Real>
void ColumnGroup<Real>::backward_weight(const Real* dy, const Real* x, float* dbias_scratch, int64_t rows,
                                        const TreeParts& parts) const {
  const Real* dy_part = dy + first_;
  for (const Linear<Real>& part : parts_) {
    part.backward_weight(dy_part, stride_, x, rows, parts.count);
    dy_part += part.out;
  }
  for (uint8_t* unwritten : merged_) *unwritten = 0;
  if (!parts_.front().bias) return;
  std::fill_n(dbias_scratch, stride_, 0.0f);  // the sums run over whole rows: one pass for all parts
  kernels::bias_backward(dy, dbias_scratch, rows, stride_, parts);
  const float* dbias = dbias_scratch + first_;
  for (const Linear<Real>& part : parts_) {
    kernels::add_to(part.bias.grad, dbias, part.out);
    dbias += part.out;
  }
}

template struct Linear<float>;
template struct Linear<bf16>;
template struct Linear<f16>;
template class ColumnGroup<float>;
template class ColumnGroup<bf16>;
template class ColumnGroup<f16>;

}  // namespace cairn::nn
