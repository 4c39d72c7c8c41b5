#pragma once
// Dropout at one place of the model. Without keys in the scratch (evaluation, generation) nothing is dropped.

#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// Part of every mask's key: these numbers must not change, or a resumed run draws other masks.
enum class DropoutPlace : uint64_t { kEmbedding = 0, kAttention = 1, kAttentionOutput = 2, kMlpOutput = 3 };

template <typename Real>
class Dropout {
 public:
  /// `layer` -1: the embedding.
  Dropout(const kernels::Exec<Real>& on, double rate, int64_t layer, DropoutPlace place)
      : on_(on),
        rate_(kernels::DropoutRate::of(rate)),
        site_(kernels::dropout_site(layer, static_cast<uint64_t>(place))) {}

  bool on(const Scratch<Real>& scratch) const { return rate_ && scratch.dropout_keys; }
  kernels::DropoutRate rate() const { return rate_; }
  uint64_t site() const { return site_; }

  /// out [R, H] = masked x, this rank's rows; forward and backward alike. out may be x.
  void apply(DevicePtr<const Real> x_RH, DevicePtr<Real> out_RH, const TensorParallel<Real>& tp,
             const Scratch<Real>& scratch, const StageDims& d) const {
    on_.dropout({.rows = d.local_rows,
                 .width = d.width,
                 .first_row = tp.first_row(),
                 .tokens = d.held,
                 .samples = d.samples,
                 .sample_keys = scratch.dropout_keys,
                 .site = site_,
                 .rate = rate_},
                x_RH, out_RH);
  }

 private:
  const kernels::Exec<Real>& on_;
  kernels::DropoutRate rate_;
  uint64_t site_;
};

}  // namespace cairn::nn
