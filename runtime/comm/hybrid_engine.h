#pragma once
// Several ranks on each of several hosts: groups whose members share a host go through its shared memory, all others
// over TCP. What kills one kills both, so a rank that dies on one host ends the waits on every other. Operations of
// both are written into the host's memory, with the rank that is awaited (RankView).
//
// An exact group with several members on a host, as the world's, is made of one in each host's memory and one of a
// member a host over TCP. All other groups over several hosts are a full mesh of their members, since no tree keeps
// sums in rank order; with equally many members on each host, two at least, long sums and gathers go along a chain of
// the hosts (chain_comm.h).
//
// Each host has its own shared-memory world, made with the whole world's size (so that ranks keep their numbers in
// groups and messages) and `local_ranks` set to how many of them live there.

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/comm/gloo_engine.h"
#include "runtime/core/result.h"

namespace cairn::comm {

struct HybridConfig {
  GlooConfig gloo;                    // this rank, the world, and the way between the hosts
  std::vector<int64_t> host_of_rank;  // world_size entries; equal numbers mean the same host
  int shm_fd = -1;                    // of this host's ShmWorld
};

/// A LinkedEngine, for who is around it. Errors: those of attach_shm_engine and make_gloo_engine; kInvalidInput when
/// the sizes disagree.
Result<std::unique_ptr<Engine>> make_hybrid_engine(const HybridConfig& config);

}  // namespace cairn::comm
