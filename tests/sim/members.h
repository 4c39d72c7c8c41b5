#pragma once
// Leaders and members over several leaders, epochs and sizes: the rule of membership (runtime/hosts/membership.h)
// as it is, and models of its drivers (tools/run/hosts/fleet.cc, follower.cc), of the store of epochs, which may stop
// answering, and its lease, of connections and of agents that die, freeze, are cut off, are excluded or never come
// back.
//
// After each event these hold, or the life ends with the first that is broken:
//   leader     one leader an epoch; no two leaders run ranks with all their hosts; a host with a place claims the lead
//              of a leader whose lease stands still, no other host does; a superseded leader ends as one
//   places     no host has two places, the leader has one, an excluded host gets none
//   size       a size that was not allowed never trains
//   half       a leader continues with fewer hosts only with half of its places, and holds the lease no longer else,
//              unless it has just begun
//   grace      a host loses its place, or a smaller size is decided on without it, when its leader has known it away
//              for as long as it grants, not before, and at once then; the size is for the hosts that have joined by
//              then. It grants nothing where a connected host holds the copy of that place's memory
//   writes     a leader that another one has followed writes nothing into the run
//   memory     a start resumes from what only the hosts that trained last have in memory, once all have come
//   waits      every wait has a name and a deadline, and ends at it
//   progress   once faults have stopped the run trains, or has ended since a host was away as long as it waits

#include "tests/sim/world.h"

namespace cairn::sim {

Life random_members_life(uint64_t seed);
Outcome live_members(const Life& life, bool story);

}  // namespace cairn::sim
