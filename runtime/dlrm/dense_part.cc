#include "runtime/dlrm/dense_part.h"

#include <algorithm>

#include "runtime/core/check.h"
#include "runtime/dlrm/interaction.h"
#include "runtime/dlrm/linear.h"
#include "runtime/dlrm/shapes.h"
#include "runtime/kernels/parallel.h"

namespace cairn::dlrm {
namespace {

/// At least that many; what it holds does not count.
template <typename T>
T* room(std::vector<T>* buffer, int64_t count) {
  if (std::ssize(*buffer) < count) buffer->resize(static_cast<size_t>(count));
  return buffer->data();
}

}  // namespace

template <typename T>
DensePart<T>::DensePart(const DlrmConfig& config)
    : config_(config),
      stride_((std::ssize(config.tables) + 1) * config.dim),
      width_(interaction_width(config)),
      bottom_out_(config.bottom.size()),
      top_out_(config.top.size()) {
  const auto add = [&](int64_t in, const std::vector<int64_t>& widths, std::vector<Layer>* layers) {
    for (const int64_t out : widths) {
      layers->push_back({in, out, parameters_, parameters_ + in * out});
      parameters_ += in * out + out;
      in = out;
    }
  };
  add(config.dense, config.bottom, &bottom_);
  if (config.interaction == Interaction::kCross) {
    for (int64_t i = 0; i < config.cross_layers; ++i) {
      const int64_t half = config.cross_rank * width_;
      cross_.push_back({parameters_, parameters_ + half, parameters_ + 2 * half});
      parameters_ += 2 * half + width_;
    }
    for (Kept* kept : {&cross_out_, &cross_low_, &cross_product_}) kept->resize(cross_.size());
  }
  add(width_, config.top, &top_);
  top_.back().relu = false;
  RT_CHECK(parameters_ == dlrm::count_elems(dense_tensors(config)));
}

template <typename T>
T* DensePart<T>::vectors(int64_t samples) {
  return room(&z_, samples * stride_);
}

template <typename T>
const T* DensePart<T>::run(const std::vector<Layer>& layers, std::span<const T> parameters, const T* x, int64_t samples,
                           Kept* outputs) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    T* const y = room(&(*outputs)[i], samples * layer.out);
    linear_forward(x, samples, layer.in, &parameters[layer.weight], &parameters[layer.bias], layer.out, y);
    if (layer.relu) relu_forward(y, samples * layer.out);
    x = y;
  }
  return x;
}

template <typename T>
void DensePart<T>::run_back(const std::vector<Layer>& layers, std::span<const T> parameters, const T* x,
                            const Kept& outputs, bool x_matters, std::span<T> gradients) {
  for (size_t i = layers.size(); i-- > 0;) {
    const Layer& layer = layers[i];
    if (layer.relu) relu_backward(outputs[i].data(), dy_.data(), samples_ * layer.out);
    const bool wanted = i > 0 || x_matters;
    T* const dx = wanted ? room(&dx_, samples_ * layer.in) : nullptr;
    linear_backward(i > 0 ? outputs[i - 1].data() : x, dy_.data(), samples_, layer.in, &parameters[layer.weight],
                    layer.out, dx, &gradients[layer.weight], &gradients[layer.bias]);
    if (wanted) dx_.swap(dy_);
  }
}

template <typename T>
std::span<const T> DensePart<T>::forward(std::span<const T> parameters, const float* dense, int64_t samples) {
  samples_ = samples;
  T* const x = room(&x_, samples * config_.dense);
  std::copy_n(dense, samples * config_.dense, x);
  const T* const bottom = run(bottom_, parameters, x, samples, &bottom_out_);
  T* const z = vectors(samples);
  const int64_t dim = config_.dim, stride = stride_;
  kernels::parallel_ranges(samples, 1, dim, [=](int64_t s, int64_t end) {
    for (; s < end; ++s) std::copy_n(bottom + s * dim, dim, z + s * stride);
  });
  const T* joined = z;
  if (config_.interaction == Interaction::kDot) {
    T* const to = room(&joined_, samples * width_);
    dot_forward({stride_ / dim, dim, config_.self_interaction}, samples, z, to);
    joined = to;
  } else if (config_.interaction == Interaction::kCross) {
    joined = cross_forward(parameters);
  }
  return {run(top_, parameters, joined, samples, &top_out_), static_cast<size_t>(samples)};
}

template <typename T>
const T* DensePart<T>::cross_forward(std::span<const T> parameters) {
  const int64_t count = samples_ * width_;
  const T* const first = z_.data();
  const T* x = first;
  for (size_t l = 0; l < cross_.size(); ++l) {
    T* const low = room(&cross_low_[l], samples_ * config_.cross_rank);
    T* const product = room(&cross_product_[l], count);
    T* const y = room(&cross_out_[l], count);
    linear_forward<T>(x, samples_, width_, &parameters[cross_[l].v], nullptr, config_.cross_rank, low);
    linear_forward(low, samples_, config_.cross_rank, &parameters[cross_[l].w], &parameters[cross_[l].bias], width_,
                   product);
    kernels::parallel_elements(count, [=](int64_t i, int64_t end) {
      for (; i < end; ++i) y[i] = first[i] * product[i] + x[i];
    });
    x = y;
  }
  return x;
}

template <typename T>
void DensePart<T>::cross_backward(std::span<const T> parameters, std::span<T> gradients) {
  const int64_t count = samples_ * width_, rank = config_.cross_rank;
  const T* const first = z_.data();
  T* const dfirst = room(&cross_dfirst_, count);
  T* const dproduct = room(&cross_dproduct_, count);
  T* const dlow = room(&cross_dlow_, samples_ * rank);
  std::fill_n(dfirst, count, T{0});
  for (size_t l = cross_.size(); l-- > 0;) {
    const Cross& layer = cross_[l];
    T* const dy = dy_.data();
    const T* const product = cross_product_[l].data();
    kernels::parallel_elements(count, [=](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        dfirst[i] += dy[i] * product[i];
        dproduct[i] = dy[i] * first[i];
      }
    });
    linear_backward(cross_low_[l].data(), dproduct, samples_, rank, &parameters[layer.w], width_, dlow,
                    &gradients[layer.w], &gradients[layer.bias]);
    T* const dx = room(&dx_, count);
    linear_backward<T>(l > 0 ? cross_out_[l - 1].data() : first, dlow, samples_, width_, &parameters[layer.v], rank, dx,
                       &gradients[layer.v], nullptr);
    kernels::parallel_elements(count, [=](int64_t i, int64_t end) {
      for (; i < end; ++i) dy[i] += dx[i];
    });
  }
  T* const dy = dy_.data();
  kernels::parallel_elements(count, [=](int64_t i, int64_t end) {
    for (; i < end; ++i) dy[i] += dfirst[i];
  });
}

template <typename T>
const T* DensePart<T>::backward(std::span<const T> parameters, std::span<const T> dlogits, std::span<T> gradients) {
  RT_CHECK(std::ssize(dlogits) == samples_ && std::ssize(gradients) == parameters_);
  std::copy(dlogits.begin(), dlogits.end(), room(&dy_, samples_));
  const T* joined = z_.data();
  if (config_.interaction == Interaction::kDot) joined = joined_.data();
  if (config_.interaction == Interaction::kCross) joined = cross_out_.back().data();
  run_back(top_, parameters, joined, top_out_, true, gradients);
  const int64_t dim = config_.dim, stride = stride_;
  T* const dz = room(&dz_, samples_ * stride);
  if (config_.interaction == Interaction::kDot) {
    dot_backward<T>({stride / dim, dim, config_.self_interaction}, samples_, z_.data(), dy_.data(), dz);
  } else {
    if (config_.interaction == Interaction::kCross) cross_backward(parameters, gradients);
    std::copy_n(dy_.data(), samples_ * stride, dz);
  }
  T* const dy = room(&dy_, samples_ * dim);
  for (int64_t s = 0; s < samples_; ++s) std::copy_n(dz + s * stride, dim, dy + s * dim);
  run_back(bottom_, parameters, x_.data(), bottom_out_, false, gradients);
  return dz;
}

template class DensePart<float>;
template class DensePart<double>;

}  // namespace cairn::dlrm
