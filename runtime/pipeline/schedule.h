#pragma once
// Pipeline schedules as pure lists of actions; one executor runs any of them.
// Source: GPipe (Huang et al. 2019); 1F1B as in PipeDream-Flush / Megatron-LM: warm-up of min(p - s - 1, m) forwards,
// then pairs of one forward and one backward, then the remaining backwards.

#include <cstdint>
#include <vector>

#include "runtime/config/recipe.h"

namespace cairn::pipeline {

enum class ActionKind { kForward, kBackward };

struct Action {
  ActionKind kind = ActionKind::kForward;
  int64_t micro_batch = 0;
  int64_t slot = 0;  // of activations; a backward names the slot of its forward
  bool operator==(const Action&) const = default;
};

/// What stage `stage` of `pp` does in one step, in order. Backwards run in micro-batch order, so gradients are summed
/// in the same order under every schedule and every pp.
std::vector<Action> schedule_actions(PipelineKind kind, int64_t stage, int64_t pp, int64_t micro_batches);

}  // namespace cairn::pipeline
