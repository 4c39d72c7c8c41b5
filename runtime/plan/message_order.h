#pragma once
// Whether ranks that send boundary tensors to each other can wait for each other for ever, where a send waits for its
// receiver, as NCCL's do. Pure.

#include <cstdint>
#include <vector>

#include "runtime/plan/plan.h"
#include "runtime/plan/schedule.h"

namespace cairn {

/// What a rank of the pipeline asks for of messages between ranks, in its order: in a step, or in an evaluation.
struct MessageCall {
  bool sends = false;
  bool forward = false;  // an activation; else a gradient
  int64_t peer = 0;      // rank of the pipeline
  bool operator==(const MessageCall&) const = default;
};
std::vector<MessageCall> message_calls(const ScheduleShape& shape, int64_t rank, bool training = true);

/// Whether all ranks come to the end of their calls. A rank goes on behind a receive when its message is there. It goes
/// on behind a send when that has begun: when fewer than `ways` of the messages before it, to that rank in that
/// direction, have not been received.
bool messages_end(const std::vector<std::vector<MessageCall>>& calls, int64_t ways);

/// The least number of ways with which they do: 1, but with interleaved schedules whose groups are larger than pp.
int64_t message_ways(const ScheduleShape& shape);
/// Of all stages of the batch the most.
int64_t message_ways(const Plan& plan);

}  // namespace cairn
