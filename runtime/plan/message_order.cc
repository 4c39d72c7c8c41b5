#include "runtime/plan/message_order.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "runtime/core/check.h"

namespace cairn {

std::vector<MessageCall> message_calls(const ScheduleShape& shape, int64_t rank, bool training) {
  const int64_t stages = shape.pp * shape.chunks;
  std::vector<MessageCall> out;
  for (const Action& action : training ? schedule_actions(shape, rank) : forward_actions(shape, rank)) {
    if (action.kind == ActionKind::kBackwardWeight) continue;
    const bool forward = action.kind == ActionKind::kForward;
    const int64_t stage = stage_at(shape, rank, action.chunk), step = forward ? 1 : -1;
    for (const bool sends : {false, true}) {
      const int64_t other = sends ? stage + step : stage - step;
      if (other < 0 || other >= stages) continue;
      const int64_t peer = place_of(shape, other).rank;
      if (peer != rank) out.push_back({sends, forward, peer});
    }
  }
  return out;
}

bool messages_end(const std::vector<std::vector<MessageCall>>& calls, int64_t ways) {
  struct Way {
    int64_t begun = 0, received = 0;
  };
  std::map<std::tuple<bool, int64_t, int64_t>, Way> all;  // direction, from, to
  std::vector<size_t> at(calls.size(), 0);
  const auto advance = [&](int64_t rank) {
    const auto r = static_cast<size_t>(rank);
    bool moved = false;
    for (; at[r] < calls[r].size(); ++at[r], moved = true) {
      const MessageCall& call = calls[r][at[r]];
      Way& way =
          all[call.sends ? std::tuple(call.forward, rank, call.peer) : std::tuple(call.forward, call.peer, rank)];
      if (call.sends ? way.begun - way.received >= ways : way.begun == way.received) break;
      ++(call.sends ? way.begun : way.received);
    }
    return moved;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t rank = 0; rank < std::ssize(calls); ++rank) moved |= advance(rank);
  }
  for (size_t r = 0; r < calls.size(); ++r) {
    if (at[r] < calls[r].size()) return false;
  }
  return true;
}

int64_t message_ways(const ScheduleShape& shape) {
  if (shape.pp == 1) return 1;
  std::vector<std::vector<MessageCall>> calls, evaluation;
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    calls.push_back(message_calls(shape, rank));
    evaluation.push_back(message_calls(shape, rank, false));
  }
  const BoundaryBuffers buffers = boundary_buffers(shape);
  const int64_t most = std::max(buffers.activations, buffers.gradients);
  for (int64_t ways = 1; ways <= most; ++ways) {
    if (messages_end(calls, ways) && messages_end(evaluation, ways)) return ways;
  }
  RT_CHECK(false, "a schedule of {} ranks that does not end with {} messages of a direction under way", shape.pp, most);
}

int64_t message_ways(const Plan& plan) {
  int64_t out = 1;
  for (const StepStage& stage : plan.step_stages) {
    const ScheduleShape shape = schedule_shape(plan.recipe, stage.micro_batches(plan.mesh.dp()));
    if (plan.mesh.pp() > 1) out = std::max(out, message_ways(long_enough(shape)));
  }
  return out;
}

}  // namespace cairn
