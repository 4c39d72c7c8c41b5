#pragma once
// Rotary positions of the rows of the micro-batch at work, in one layer, and a factor of queries that grows with the
// position (model.temperature_scale).

#include <cstdint>

#include "runtime/config/model.h"
#include "runtime/nn/scratch.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::nn {

template <typename Real>
class Turning {
 public:
  Turning(const kernels::Exec<Real>& on, const ModelConfig& model, const StageDims& dims, int64_t layer,
          const Scratch<Real>& scratch)
      : on_(on),
        dims_(dims),
        turning_(rotary_dims(model)),
        interleaved_(model.rope.pairs == RotaryPairs::kInterleaved),
        turns_(has_rotary(model, layer)),
        window_turns_(has_window_rotary(model, layer)),
        warms_(has_temperature(model, layer)),
        scratch_(scratch) {}

  /// The first channels of each of `heads` heads, `head_dim` apart, in rows [T] that are `stride` apart. Nothing in a
  /// layer whose q and k do not turn. `inverse`: gradients.
  void turn(DevicePtr<Real> x, int64_t heads, int64_t head_dim, int64_t stride, bool inverse) const {
    if (!turns_) return;
    apply(window_turns_ ? scratch_.window_rotary_table : scratch_.rotary_table, turning_, x, heads, head_dim, stride,
          inverse);
  }

  /// Queries times the factors of their positions, or their gradients. Nothing in a layer that has none.
  void warm(DevicePtr<Real> q, int64_t heads, int64_t head_dim, int64_t stride) const {
    if (warms_) apply(scratch_.temperature_table, head_dim, q, heads, head_dim, stride, false);
  }

 private:
  void apply(DevicePtr<const float> table, int64_t turning, DevicePtr<Real> x, int64_t heads, int64_t head_dim,
             int64_t stride, bool inverse) const {
    const TokenRuns& held = dims_.held;
    const kernels::RotaryDims rows{.rows = dims_.rows / held.parts,
                                   .tokens = held.part_tokens(),
                                   .heads = heads,
                                   .head_dim = head_dim,
                                   .stride = stride,
                                   .turning = turning,
                                   .interleaved = interleaved_,
                                   .positions = scratch_.positions};
    for (int64_t part = 0; part < held.parts; ++part) {
      on_.rotary(rows, x + part * rows.rows * stride, table + part * rows.tokens * turning, inverse);
    }
  }

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  int64_t turning_;  // channels of a head
  bool interleaved_, turns_, window_turns_, warms_;
  const Scratch<Real>& scratch_;
};

}  // namespace cairn::nn
