#pragma once
// The stage's scratch buffers, shared by all its layers: nothing in them outlives the call that wrote it.
// Legend in stage_model.h; sizes in runtime/plan/activations.h.

#include "runtime/nn/buffers.h"
#include "runtime/nn/kv_cache.h"
#include "runtime/nn/norm.h"

namespace cairn::nn {

template <typename Real>
struct Scratch {
  Real* rows_TH = nullptr;       // input of column-cut projections
  Real* partial_TH = nullptr;    // what is summed over tp
  Real* dresidual_RH = nullptr;  // gradient of the residual stream, carried from the last layer to the first
  Real* hidden = nullptr;        // [T, max(F, N D)]: between a column and a row cut
  Real* dhidden = nullptr;       // [T, max(F_in, QKV)]
  float* attention = nullptr;
  float* dbias = nullptr;  // null without biases
  NormStats stats;
  const CachedRows* cached = nullptr;  // generation: where the rows of the pass under way stand
  const float* rotary_table = nullptr;  // [S, D / 2, 2]; null without rotary positions
};

}  // namespace cairn::nn
