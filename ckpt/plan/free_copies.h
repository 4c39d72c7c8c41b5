#pragma once
// Which hosts have, besides what they save, all that another host saves: ranks that update the same shards keep the
// same state (ZeRO 0 over hosts, shard groups that repeat on others), and only the saving is divided among them. A copy
// of such a host's part costs no byte of the network. Pure.

#include <cstdint>
#include <vector>

#include "runtime/plan/plan.h"

namespace cairn::ckpt {

/// For each place (ranks [k world / hosts, (k + 1) world / hosts) are of place k) another one whose ranks keep in
/// private state every shard that its ranks save, rank by rank in their order; no two have the same. Among the places
/// that do, it is the one half the way round, as far as possible from this one. Empty where some place has none: state
/// that is cut over all replicas, an average of the weights (only who saves it has it), experts of which there is one
/// copy, state whose banks are copies (checkpoint.snapshot_by) or one host.
std::vector<int64_t> free_holders(const Plan& plan, int64_t hosts);

}  // namespace cairn::ckpt
