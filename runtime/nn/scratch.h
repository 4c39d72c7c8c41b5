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
  Real* dbranch_RH = nullptr;    // gradient inside a block (residual.h); null where no block needs it
  Real* hidden = nullptr;        // [T, max(F, N D)]: between a column and a row cut
  Real* dhidden = nullptr;       // [T, max(F_in, QKV)]
  float* attention = nullptr;
  float* dbias = nullptr;  // null without biases
  NormStats stats;
  TreeParts token_parts;                   // of all rows; with the memory of stats.parts, or none where tokens have one
  const float* rotary_table = nullptr;     // [positions, turning pairs, 2]; null without rotary positions
  const float* alibi_slopes = nullptr;     // [N] of this rank's heads; null without
  const uint64_t* dropout_keys = nullptr;  // of the samples of the micro-batch at work; null: nothing is dropped
  const int32_t* positions = nullptr;  // [T] of the micro-batch at work; null: a row stands at its place in its sample
  const int32_t* starts = nullptr;     // [T], SequenceRows; null: as the model's mask says
  const int32_t* ends = nullptr;       // [T], the same
  float* max_scores = nullptr;         // [layers of the model, N]: the largest attention scores; null: not wanted
  const CachedRows* cached = nullptr;  // generation: where the rows of the pass under way stand
};

}  // namespace cairn::nn
