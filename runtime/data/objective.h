#pragma once
// From the tokens of samples to what a model is trained on: inputs, targets, positions and what each token sees.
//
// next token   with ObjectiveConfig::document_end: a token sees its own document alone, positions begin again with each
//              document, and guessing how the next document begins does not count (each can be switched off).
// prefix       the first n tokens of a sequence see each other, n uniform on [1, S); the loss counts behind them.
// infill       GLM (Du et al. 2022, GLM-130B: Zeng et al. 2022). [gMASK]: the end of a window is taken away, a uniform
//              number of its tokens between a fifth and all; [MASK]: spans are, their lengths Poisson(3) on 1 to 39,
//              about 0.15 of the tokens. What is left (part A, a mask token where something was taken) sees itself and
//              is followed by each span as [sop] span, in random order, which is guessed token by token, each span's
//              last guess being [eop]. A token of part B stands at the position of its [MASK]; after [gMASK] positions
//              go on. A window keeps its length: it takes in as much less text as marks are added. A sequence with
//              [MASK] is cut into mask_windows windows that do not see each other.
//
// All draws are functions of seed, the sample's place in the run and the sequence within it: no layout, no order of
// evaluation, no restart changes them.

#include <cstdint>
#include <span>

#include "runtime/config/data.h"
#include "runtime/data/dataset.h"

namespace cairn::data {

/// Whether the objective needs more than inputs and targets.
bool changes_rows(const ObjectiveConfig& objective);

/// Rewrites inputs and targets and fills positions, starts and ends of `batch`, which load_samples() has filled from
/// `samples`. Sequences are samples cut into `sequence_tokens`. Targets that do not count become -1. Samples that came
/// with rows stay as they are.
void apply_objective(const ObjectiveConfig& objective, uint64_t seed, int64_t sequence_tokens,
                     std::span<const SampleRef> samples, MicroBatch* batch);

}  // namespace cairn::data
