#pragma once
// Training states of DeepSpeed: what ranks saved in pieces, as whole tensors (foreign_state.h).
//
//   ZeRO-1, -2   each group of parameters is one flat buffer of which a rank has a part: tensors lie one behind the
//                other in the order of `param_shapes`, with padding at the end, and after each where asked for
//   ZeRO-3       each parameter is cut for itself: rank r has elements [r q, (r + 1) q), q = ceil(elements / ranks)
//   ZeRO-0       torch's own state by index; names in the order of `module`, by groups
//   universal    a folder a parameter, whole tensors
// Refused by name: pipelines, tensor parallel ranks and experts (`ds_to_universal` makes whole tensors of the first
// two), state on NVMe, other optimizers than Adam, states without float masters.
// Source: DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py, deepspeed/runtime/zero/stage3.py,
// deepspeed/runtime/engine.py, deepspeed/utils/zero_to_fp32.py, deepspeed/checkpoint/ds_to_universal.py.

#include <filesystem>

#include "converters/foreign_state.h"
#include "converters/torch_values.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// zero_optimization.stage of a rank's optimizer file; -1: it does not say.
int64_t zero_stage(const TorchValues& file);

/// `about`: of look_at_training_state(), with program "DeepSpeed". `weights_only`: the weights that the model computes
/// with where they are saved whole, else the masters. Reads only pickles.
/// Errors: kInvalidInput (files that are missing or of other ranks), kCorrupt, kUnsupported; each names the file, what
/// was found, what was expected and what to do.
Result<ForeignState> open_deepspeed(TrainingState about, bool weights_only);

}  // namespace cairn::convert
