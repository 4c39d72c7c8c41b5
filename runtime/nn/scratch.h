#pragma once
// The stage's scratch buffers, shared by all its layers: nothing in them outlives the call that wrote it.
// Legend in stage_model.h; sizes in runtime/plan/activations.h.

#include "runtime/nn/buffers.h"
#include "runtime/nn/kv_cache.h"
#include "runtime/nn/norm.h"

namespace cairn::nn {

template <typename Real>
struct Scratch {
  DevicePtr<Real> rows_TH;       // input of column-cut projections
  DevicePtr<Real> partial_TH;    // what is summed over tp
  DevicePtr<Real> dresidual_RH;  // gradient of the residual stream, carried from the last layer to the first
  DevicePtr<Real> dbranch_RH;    // gradient inside a block (residual.h); null where no block needs it
  DevicePtr<Real> hidden;        // [T, max(F, N D)]: between a column and a row cut
  DevicePtr<Real> dhidden;       // [T, max(F_in, QKV)]
  DevicePtr<Real> latents;       // [T, L] of model.mla (latent_projections.h); null without
  DevicePtr<Real> dlatents;      // [T, L], their gradients
  DevicePtr<float> attention;
  DevicePtr<float> dbias;  // null without biases
  NormStats stats;
  TreeParts token_parts;                // of all rows; with the memory of stats.parts, or none where tokens have one
  DevicePtr<const float> rotary_table;  // [positions, turning pairs, 2]; null without rotary positions
  DevicePtr<const float> window_rotary_table;  // the same, of the layers with a window; null where they have no other
  DevicePtr<const float> temperature_table;    // [positions, D / 2, 2], that turns nothing: the queries' factors
  DevicePtr<const float> alibi_slopes;         // [N] of this rank's heads; null without
  DevicePtr<float> sinks;                      // [N] of the layer at work; null without
  DevicePtr<const uint64_t> dropout_keys;      // of the samples of the micro-batch at work; null: nothing is dropped
  DevicePtr<const int32_t> positions;  // [T] of the micro-batch at work; null: a row stands at its place in its sample
  DevicePtr<const int32_t> starts;     // [T], SequenceRows; null: as the model's mask says
  DevicePtr<const int32_t> ends;       // [T], the same
  DevicePtr<float> max_scores;         // of this rank's first head: the largest attention scores; null: not wanted
  int64_t scored_heads = 0;            // from a layer's to the next one's
  const CachedRows* cached = nullptr;  // generation: where the rows of the pass under way stand
};

}  // namespace cairn::nn
