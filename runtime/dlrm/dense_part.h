#pragma once
// The part of a recommender model that every rank has: bottom MLP, interaction, cross layers, top MLP and loss, over
// the samples of the rank. Explicit forward and backward on the host's memory; no communication.
//
// Parameters are one flat range in the order of dense_tensors(), so one collective reduces all gradients.
// Buffers grow with the largest batch so far. Threads: one object is used by one thread at a time.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/config/dlrm.h"

namespace cairn::dlrm {

template <typename T>
class DensePart {
 public:
  /// `config` is checked.
  explicit DensePart(const DlrmConfig& config);

  int64_t parameter_count() const { return parameters_; }

  /// [samples, tables + 1, dim] of the next forward(): the pooled rows go behind the first vector, which forward()
  /// fills.
  T* vectors(int64_t samples);
  int64_t sample_stride() const { return stride_; }

  /// Logits of the samples, valid until the next call. `dense` is [samples, dense features].
  std::span<const T> forward(std::span<const T> parameters, const float* dense, int64_t samples);

  /// Goes back through the last forward(), from the gradients of its logits. Overwrites `gradients`; returns the
  /// gradients of vectors(), valid until the next call.
  const T* backward(std::span<const T> parameters, std::span<const T> dlogits, std::span<T> gradients);

 private:
  struct Layer {
    int64_t in = 0, out = 0, weight = 0, bias = 0;  // the last two: offsets of the parameters
    bool relu = true;
  };
  struct Cross {
    int64_t v = 0, w = 0, bias = 0;
  };
  using Kept = std::vector<std::vector<T>>;  // each layer's output

  const T* run(const std::vector<Layer>& layers, std::span<const T> parameters, const T* x, int64_t samples,
               Kept* outputs);
  /// Takes the gradient of the last output from dy_, leaves that of x there unless `x_matters` is false.
  void run_back(const std::vector<Layer>& layers, std::span<const T> parameters, const T* x, const Kept& outputs,
                bool x_matters, std::span<T> gradients);
  const T* cross_forward(std::span<const T> parameters);
  void cross_backward(std::span<const T> parameters, std::span<T> gradients);

  const DlrmConfig config_;
  int64_t stride_ = 0, width_ = 0, parameters_ = 0, samples_ = 0;
  std::vector<Layer> bottom_, top_;
  std::vector<Cross> cross_;
  std::vector<T> x_, z_, dz_, joined_, dy_, dx_;
  Kept bottom_out_, top_out_, cross_out_, cross_low_, cross_product_;
  std::vector<T> cross_dlow_, cross_dproduct_, cross_dfirst_;
};

}  // namespace cairn::dlrm
