#pragma once
// The arguments of a Megatron-LM run, as `args` of common.pt holds them, as config.json of the family megatron_gpt.
// Source: Megatron-LM megatron/training/arguments.py, megatron/training/checkpointing.py.

#include <nlohmann/json.hpp>

#include "runtime/core/result.h"

namespace cairn::convert {

/// `args`: plain values by name. All rows of the padded vocabulary are the model's: Megatron's softmax runs over them
/// too. Errors: kInvalidInput (no sizes in it), kUnsupported naming an argument of models that are not computed here.
Result<nlohmann::json> config_from_args(const nlohmann::json& args);

}  // namespace cairn::convert
