#pragma once
// Groups of Engine::exact_group(): what they allow is checked here, once for all engines.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/comm.h"

namespace cairn::comm {

/// Another group, which gets what is allowed.
std::unique_ptr<Comm> make_exact_comm(std::unique_ptr<Comm> inner);

/// The parts of a group whose members share hosts.
struct HostsGroups {
  std::unique_ptr<Comm> host;         // the members of this host, in group order
  std::unique_ptr<Comm> between;      // the first member of each host, in group order; null on other ranks
  std::vector<int64_t> host_of;       // by group rank: its host's rank in `between`
  std::vector<int64_t> rank_on_host;  // by group rank: its rank in its host's `host`
};

/// Collectives go through each host's memory to its first member, from there to the first members of the other hosts,
/// and back: H hosts need H (H - 1) / 2 connections, however many ranks each has. Members of a host follow each other
/// in the group, so that of equal maxima (0 and -0) the same one is taken as by a flat group.
std::unique_ptr<Comm> make_hosts_comm(std::string name, int64_t rank, HostsGroups groups);

}  // namespace cairn::comm
