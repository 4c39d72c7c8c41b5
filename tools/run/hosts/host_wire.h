#pragma once
// Between what an agent works with and what travels (runtime/hosts/message.h): for types of ckpt/ and runtime/agent,
// which messages cannot hold. What comes from another host is checked here against what only these folders know.

#include <cstdint>
#include <vector>

#include "ckpt/host_memory.h"
#include "ckpt/restore.h"
#include "runtime/agent/supervisor.h"
#include "runtime/agent/wait_report.h"
#include "runtime/core/result.h"
#include "runtime/hosts/message.h"

namespace cairn::tools {

using HostSegment = hosts::Segment;
using hosts::PeerAddress;

hosts::Slot to_wire(const ckpt::WholeSlot& slot);
ckpt::WholeSlot from_wire(const hosts::Slot& slot);
std::vector<hosts::Slot> to_wire(const std::vector<ckpt::WholeSlot>& slots);
std::vector<ckpt::WholeSlot> from_wire(const std::vector<hosts::Slot>& slots);

hosts::Memory to_wire(const ckpt::HostMemory& memory);
ckpt::HostMemory from_wire(const hosts::Memory& memory);

/// Of a host's order what a choice says; what is for people stays with the leader.
hosts::Resume to_wire(const ckpt::RestoreChoice& choice);
/// Errors: kCorrupt: instructions of that number do not exist.
Result<ckpt::RestoreChoice> from_wire(const hosts::Resume& order);

hosts::Failure to_wire(const agent::Failure& failure);
/// A class of another program is judged by the status.
agent::Failure from_wire(const hosts::Failure& failure);

std::vector<hosts::RankState> to_wire(const std::vector<agent::RankState>& ranks);
/// A rank's memory may be damaged: numbers that make no sense are none.
std::vector<agent::RankState> from_wire(const std::vector<hosts::RankState>& ranks);

}  // namespace cairn::tools
