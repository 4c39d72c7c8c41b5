#pragma once
// Context parallelism: each rank has the rows of its tokens of every sequence (runtime/core/token_runs.h), and
// attention needs the keys and values of all. They are gathered before it, from all ranks into the order of tokens, and
// their gradients, of which each rank has its queries' part, are summed and given back to the rows' ranks.
//
// Where sums over tokens are taken in parts, rows stand part by part on one rank too, and those of all ranks, one rank
// after the other, are in that order. Gradients are roots of subtrees, in float, until the tree is whole.
//
// Buffers of the stage, shared by its layers: what gather() leaves lasts until the next one.
// Legend: T rows of this rank, B sequences, S tokens of a whole sequence, K key/value heads, D head dim.

#include <string_view>

#include "runtime/comm/comm.h"
#include "runtime/kernels/ops.h"
#include "runtime/nn/buffers.h"
#include "runtime/plan/activations.h"

namespace cairn::nn {

template <typename Real>
class ContextParallel {
 public:
  /// `cp` may be null when there is one rank.
  ContextParallel(const kernels::Exec<Real>& on, const StageDims& dims, comm::Comm* cp, const Buffers& buffers);

  bool on() const { return dims_.cp > 1; }
  comm::Comm& comm() const { return *cp_; }
  int64_t kv_width() const { return width_; }
  bool in_parts() const { return dims_.all_token_parts > 1; }

  /// Keys and values of all tokens, side by side [B S, 2 K D], from this rank's k and v, side by side in rows of
  /// `stride` elements.
  Status gather(DevicePtr<const Real> kv, int64_t stride, DevicePtr<const Real>* all, std::string_view what) const;
  /// Where attention's backward puts their gradients, [B S, 2 K D]: in parts, or not.
  DevicePtr<float> gradient_sums() const { return dkv_sums_; }
  DevicePtr<Real> gradients() const { return dkv_; }
  /// The sum of all ranks' for this rank's rows, into rows of `stride` elements.
  Status reduce(DevicePtr<Real> dkv, int64_t stride, std::string_view what) const;

 private:
  /// Copies between what is exchanged, rank after rank, and the order of tokens.
  void reorder(bool to_tokens, DevicePtr<Real> exchanged, DevicePtr<Real> tokens) const;

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  comm::Comm* cp_;
  int64_t width_;
  DevicePtr<Real> exchanged_, kv_, dkv_;
  DevicePtr<float> dkv_sums_;
};

}  // namespace cairn::nn
