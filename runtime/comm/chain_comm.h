#pragma once
// A group whose members lie several on each of several hosts, with what it moves once over each host's network. A sum
// in rank order cannot be made of sums of the hosts; but it can travel: each host adds its members' parts, in their
// order, to what comes from the host before, piece by piece. Members of a host divide the pieces among them.
//
// With W members on H hosts, of a reduce_scatter's N bytes a host sends N and receives N, where a full mesh sends
// N (H - 1) / H for each of its W / H members. The bits are the same. What is gathered goes to one member of each other
// host alone, and from there through its memory.

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/comm/comm.h"

namespace cairn::comm {

/// The parts of a group whose hosts have equally many members each, two at least, that follow each other in the group.
struct ChainGroups {
  std::unique_ptr<Comm> flat;  // all members
  std::unique_ptr<Comm> host;  // those of this host, in group order
  std::unique_ptr<Comm> lane;  // of each host the one that stands where this rank does on its own
};

/// Sums of f32, f64 and i64 go along the chain where that saves a third of a mesh's bytes, gathered ones over the lane,
/// both when they are long enough to pay; all else through `flat`.
std::unique_ptr<Comm> make_chain_comm(ChainGroups groups);

}  // namespace cairn::comm
