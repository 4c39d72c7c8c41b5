#pragma once
// Training states of Megatron-Core's torch_dist: boxes of torch.distributed.checkpoint (dist_metadata.h), and common.pt
// with the arguments of the run. The model comes from these arguments (megatron_args.h).
//
//   decoder.layers.self_attention.linear_qkv.weight          the model's weights, stacked by layers or not
//   optimizer.state.{param, exp_avg, exp_avg_sq}.KEY         fully_reshardable, and without a distributed optimizer
//                                                            (fp32_param): as the weight
//   the same, of more dims                                   fully_sharded_model_space: a grid of blocks, and the
//                                                            elements of a block as the last dim
//   optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(P, Q).bucket_idx_K.{param, exp_avg, exp_avg_sq}
//                                                            dp_reshardable: buckets without names (megatron_buckets.h)
// Of these, several optimizers (chained_N) come with experts that are divided among ranks. Names of the result are
// those of the family megatron_gpt. Masters must round to the weights (foreign_state.h): megatron-core 0.16.1 writes
// fully_reshardable states whose values are shifted, and this finds them.
// Source: Megatron-LM megatron/core/optimizer/distrib_optimizer.py, core/dist_checkpointing/.

#include <nlohmann/json_fwd.hpp>

#include "converters/foreign_state.h"
#include "runtime/core/result.h"

namespace cairn::convert {

/// `about`: of look_at_training_state(), program "Megatron-LM", layout "torch_dist". `config`: a config.json of
/// model_type megatron_gpt that wins over the arguments; null: none. Reads only pickles and JSON, and masters where the
/// order of a bucket is in doubt. Errors: kInvalidInput (a file that is missing), kCorrupt, kUnsupported; each names
/// the file, what was found, what was expected and what to do.
Result<ForeignState> open_megatron_state(TrainingState about, bool weights_only, const nlohmann::json& config);

}  // namespace cairn::convert
