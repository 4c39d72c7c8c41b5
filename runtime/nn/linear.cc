#include "runtime/nn/linear.h"

#include <utility>

#include "runtime/core/check.h"
#include "runtime/kernels/few_rows.h"

namespace cairn::nn {

namespace {

/// x W^T and dy W; where they go is for the caller to say.
template <typename Real>
kernels::MatmulArgs output_of(const Linear<Real>& linear, DevicePtr<const Real> x, int64_t rows) {
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
kernels::MatmulArgs input_gradient_of(const Linear<Real>& linear, DevicePtr<const Real> dy, int64_t dy_stride,
                                      int64_t rows) {
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
kernels::MatmulArgs weight_gradient_of(const Linear<Real>& linear, DevicePtr<const Real> dy, int64_t dy_stride,
                                       DevicePtr<const Real> x, int64_t rows) {
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

template <typename Real>
void matmul_into(const kernels::Exec<Real>& on, const PartialSum& sum, kernels::MatmulArgs product) {
  product.c = sum.data;
  product.c_dtype = sum.dtype;
  product.parts = sum.parts;
  on.matmul(product);
}

}  // namespace

template <typename Real>
kernels::MatmulArgs Linear<Real>::forward_product(DevicePtr<const Real> x, DevicePtr<Real> y, int64_t y_stride,
                                                  int64_t rows) const {
  kernels::MatmulArgs product = output_of(*this, x, rows);
  product.c = y;
  product.ldc = y_stride;
  product.bias = bias.weight;
  // Without gradients only: in training the bits must not depend on how many rows a rank happens to have.
  product.few_rows = !weight.grad;
  return product;
}

template <typename Real>
void Linear<Real>::forward(DevicePtr<const Real> x, DevicePtr<Real> y, int64_t y_stride, int64_t rows,
                           bool accumulate) const {
  kernels::MatmulArgs product = forward_product(x, y, y_stride, rows);
  product.accumulate = accumulate;
  product.few_rows = product.few_rows && !accumulate;
  on->matmul(product);
}

template <typename Real>
void Linear<Real>::forward_added(DevicePtr<const Real> x, DevicePtr<const Real> base, DevicePtr<Real> y,
                                 int64_t rows) const {
  kernels::MatmulArgs product = forward_product(x, y, out, rows);
  product.residual = base;
  product.few_rows = false;
  on->matmul(product);
}

template <typename Real>
void Linear<Real>::forward_gelu(DevicePtr<const Real> x, DevicePtr<Real> pre, DevicePtr<Real> y, int64_t rows) const {
  kernels::MatmulArgs product = forward_product(x, y, out, rows);
  product.map = kernels::MatmulMap::kGeluTanh;
  product.pre = pre;
  product.few_rows = false;
  on->matmul(product);
}

template <typename Real>
void Linear<Real>::backward_input_gelu(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<Real> pre,
                                       DevicePtr<Real> dx, int64_t rows) const {
  kernels::MatmulArgs product = backward_input_product(dy, dy_stride, dx, false, rows);
  product.map = kernels::MatmulMap::kGeluTanhGradient;
  product.pre = pre;
  on->matmul(product);
}

template <typename Real>
kernels::MatmulArgs Linear<Real>::backward_input_product(DevicePtr<const Real> dy, int64_t dy_stride,
                                                         DevicePtr<Real> dx, bool accumulate, int64_t rows) const {
  kernels::MatmulArgs product = input_gradient_of(*this, dy, dy_stride, rows);
  product.c = dx;
  product.accumulate = accumulate;
  return product;
}

template <typename Real>
void Linear<Real>::backward_input(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<Real> dx, bool accumulate,
                                  int64_t rows) const {
  on->matmul(backward_input_product(dy, dy_stride, dx, accumulate, rows));
}

template <typename Real>
void Linear<Real>::forward_partial(DevicePtr<const Real> x, const PartialSum& y, int64_t rows) const {
  const bool few = rows <= kernels::kFewRows && !weight.grad && y.dtype == DTypeOf<Real>::value;
  if (!y.tree || few) return forward(x, y.data.as<Real>(), out, rows);
  matmul_into(*on, y, output_of(*this, x, rows));
}

template <typename Real>
void Linear<Real>::backward_input_partial(DevicePtr<const Real> dy, int64_t dy_stride, const PartialSum& dx,
                                          int64_t rows) const {
  if (!dx.tree) return backward_input(dy, dy_stride, dx.data.as<Real>(), false, rows);
  matmul_into(*on, dx, input_gradient_of(*this, dy, dy_stride, rows));
}

template <typename Real>
kernels::MatmulArgs Linear<Real>::backward_weight_product(DevicePtr<const Real> dy, int64_t dy_stride,
                                                          DevicePtr<const Real> x, int64_t rows, int64_t parts) const {
  kernels::MatmulArgs product = weight_gradient_of(*this, dy, dy_stride, x, rows);
  product.c = weight.grad;
  product.accumulate = weight.unwritten == nullptr || std::exchange(*weight.unwritten, 0) == 0;
  product.parts = parts;
  return product;
}

template <typename Real>
void Linear<Real>::backward_weight(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<const Real> x, int64_t rows,
                                   int64_t parts) const {
  on->matmul(backward_weight_product(dy, dy_stride, x, rows, parts));
}

template <typename Real>
void Linear<Real>::backward_both(DevicePtr<const Real> dy, DevicePtr<const Real> x, int64_t rows,
                                 DevicePtr<float> scratch) const {
  // Where nothing was written to the weight's gradient, the bias' is zero.
  const bool first = weight.unwritten != nullptr && *weight.unwritten != 0;
  kernels::MatmulArgs product = backward_weight_product(dy, out, x, rows);
  if (first || scratch) product.sums = first ? bias.grad : scratch;
  on->matmul(product);
  if (first) return;
  if (scratch) return on->add_to(bias.grad, scratch, out);
  on->bias_backward(dy, bias.grad, rows, out, TreeParts{});
}

template <typename Real>
void Linear<Real>::weight_sum(DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<const Real> x, int64_t rows,
                              int64_t parts, DevicePtr<float> sum) const {
  kernels::MatmulArgs product = weight_gradient_of(*this, dy, dy_stride, x, rows);
  product.c = sum;
  product.parts = parts;
  on->matmul(product);
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
template <typename Body>
void ColumnGroup<Real>::for_parts(const Body& body) const {
  int64_t at = first_;
  for (const Linear<Real>& part : parts_) {
    body(part, at);
    at += part.out;
  }
}

template <typename Real>
void ColumnGroup<Real>::forward(DevicePtr<const Real> x, DevicePtr<Real> y, int64_t rows) const {
  for_parts([&](const Linear<Real>& part, int64_t at) { part.forward(x, y + at, stride_, rows); });
}

template <typename Real>
void ColumnGroup<Real>::forward_gelu(DevicePtr<const Real> x, DevicePtr<Real> pre, DevicePtr<Real> y,
                                     int64_t rows) const {
  RT_CHECK(is_one(), "an activation of a part of a row");
  parts_.front().forward_gelu(x, pre, y, rows);
}

template <typename Real>
void ColumnGroup<Real>::backward_input(DevicePtr<const Real> dy, DevicePtr<Real> dx, int64_t rows,
                                       bool accumulate) const {
  for_parts([&](const Linear<Real>& part, int64_t at) {
    part.backward_input(dy + at, stride_, dx, std::exchange(accumulate, true), rows);
  });
}

template <typename Real>
void ColumnGroup<Real>::forward_products(DevicePtr<const Real> x, DevicePtr<Real> y, int64_t rows,
                                         std::vector<kernels::MatmulArgs>* out) const {
  for_parts(
      [&](const Linear<Real>& part, int64_t at) { out->push_back(part.forward_product(x, y + at, stride_, rows)); });
}

template <typename Real>
void ColumnGroup<Real>::backward_input_products(DevicePtr<const Real> dy, DevicePtr<Real> dx, int64_t rows,
                                                bool accumulate, std::vector<kernels::MatmulArgs>* out) const {
  for_parts([&](const Linear<Real>& part, int64_t at) {
    out->push_back(part.backward_input_product(dy + at, stride_, dx, std::exchange(accumulate, true), rows));
  });
}

template <typename Real>
void ColumnGroup<Real>::backward_weight_products(DevicePtr<const Real> dy, DevicePtr<const Real> x, int64_t rows,
                                                 int64_t parts, std::vector<kernels::MatmulArgs>* out) const {
  for_parts([&](const Linear<Real>& part, int64_t at) {
    out->push_back(part.backward_weight_product(dy + at, stride_, x, rows, parts));
  });
  for (uint8_t* unwritten : merged_) *unwritten = 0;
}

template <typename Real>
void ColumnGroup<Real>::backward_input_partial(DevicePtr<const Real> dy, const PartialSum& dx, int64_t rows) const {
  constexpr DType dtype = DTypeOf<Real>::value;
  if (!dx.tree) return backward_input(dy, dx.data.as<Real>(), rows);
  int64_t out = 0;
  for (const kernels::MatmulStretch& weight : weights_) out += weight.k;
  on().matmul({.m = rows,
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
void ColumnGroup<Real>::backward_weight(DevicePtr<const Real> dy, DevicePtr<const Real> x,
                                        DevicePtr<float> dbias_scratch, int64_t rows, const TreeParts& parts) const {
  if (on().fuses_products && is_one() && parts_.front().bias && !parts.sums && parts.count == 1) {
    parts_.front().backward_both(dy, x, rows, dbias_scratch);
    for (uint8_t* unwritten : merged_) *unwritten = 0;
    return;
  }
  for_parts(
      [&](const Linear<Real>& part, int64_t at) { part.backward_weight(dy + at, stride_, x, rows, parts.count); });
  for (uint8_t* unwritten : merged_) *unwritten = 0;
  backward_bias(dy, dbias_scratch, rows, parts);
}

template <typename Real>
auto ColumnGroup<Real>::bias_gradients() const -> std::vector<BiasGradient> {
  std::vector<BiasGradient> out;
  for_parts([&](const Linear<Real>& part, int64_t at) {
    if (part.bias) out.push_back({at, part.out, part.bias.grad});
  });
  return out;
}

template <typename Real>
void ColumnGroup<Real>::backward_bias(DevicePtr<const Real> dy, DevicePtr<float> dbias_scratch, int64_t rows,
                                      const TreeParts& parts) const {
  if (!parts_.front().bias) return;
  on().clear_floats(dbias_scratch, stride_);  // the sums run over whole rows: one pass for all parts
  on().bias_backward(dy, dbias_scratch, rows, stride_, parts);
  for_parts([&](const Linear<Real>& part, int64_t at) { on().add_to(part.bias.grad, dbias_scratch + at, part.out); });
}

template struct Linear<float>;
template struct Linear<bf16>;
template struct Linear<f16>;
template class ColumnGroup<float>;
template class ColumnGroup<bf16>;
template class ColumnGroup<f16>;

}  // namespace cairn::nn
