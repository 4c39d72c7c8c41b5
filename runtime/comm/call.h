#pragma once
// What a member says of a collective call, so that members who disagree find out.

#include <cstdint>
#include <string>

#include "runtime/comm/comm.h"

namespace cairn::comm {

enum class CallKind : uint64_t { kAllReduce = 1, kReduceScatter, kAllGather, kBroadcast, kBarrier, kAllToAll };

struct Call {
  CallKind kind;
  DType dtype = DType::kU8;
  ReduceOp op = ReduceOp::kSum;
  int64_t root = 0;
  int64_t bytes = 0;  // of the input; of the data for all_reduce and broadcast

  /// Everything but the bytes.
  uint64_t word() const {
    return static_cast<uint64_t>(kind) | static_cast<uint64_t>(dtype) << 8 | static_cast<uint64_t>(op) << 16 |
           static_cast<uint64_t>(root) << 24;
  }
};

/// "all_reduce of 40 bytes (f32 sum)"
std::string describe_call(uint64_t word, uint64_t bytes);

/// First bytes on the wire of each point-to-point message.
struct MessageHeader {
  uint64_t bytes;
  uint64_t sequence;
  char what[48];

  static MessageHeader make(int64_t bytes, uint64_t sequence, std::string_view what);
};
static_assert(sizeof(MessageHeader) == 64);

}  // namespace cairn::comm
