#include "runtime/pipeline/schedule.h"

#include <algorithm>

namespace cairn::pipeline {

std::vector<Action> schedule_actions(PipelineKind kind, int64_t stage, int64_t pp, int64_t micro_batches) {
  const int64_t warm_up = kind == PipelineKind::kGpipe ? micro_batches : std::min(pp - stage - 1, micro_batches);
  const int64_t slots = kind == PipelineKind::kGpipe ? micro_batches : std::min(pp - stage, micro_batches);
  std::vector<Action> out;
  out.reserve(2 * micro_batches);
  int64_t forward = 0, backward = 0;
  const auto push = [&](ActionKind action, int64_t micro_batch) {
    out.push_back({action, micro_batch, micro_batch % slots});
  };
  while (forward < warm_up) push(ActionKind::kForward, forward++);
  while (backward < micro_batches) {
    if (forward < micro_batches) push(ActionKind::kForward, forward++);
    push(ActionKind::kBackward, backward++);
  }
  return out;
}

}  // namespace cairn::pipeline
