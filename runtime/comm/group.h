#pragma once
// What every engine does alike for its groups: names, checks, and the group of one rank.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/comm.h"

namespace cairn::comm {

/// Names one operation in messages: "tp[0,1].all_reduce(attn.out)".
struct Site {
  std::string_view group, op, what;
  std::string text() const;
};

/// "tp[0,1]"; long lists are cut: "dp[0,8,16,24,32,40,48,...,1016; 128 ranks]".
std::string group_name(std::string_view axis, const std::vector<int64_t>& world_ranks);

/// kInvalidInput unless the ranks are distinct, inside the world and hold `self`.
Status check_group(std::string_view axis, const std::vector<int64_t>& world_ranks, int64_t world_size, int64_t self);

/// Errors of arguments: kInvalidInput for a negative size, a dtype that is not reduced, a peer outside of the group,
/// trees that do not tile it.
Status check_bytes(const Site& site, int64_t bytes);
Status check_elems(const Site& site, int64_t count, DType dtype);
Status check_tree(const Site& site, int64_t tree, int64_t size);
Status check_peer(const Site& site, std::string_view role, int64_t peer, int64_t size);

/// The group of one rank: collectives copy when input and output differ, messages to itself are kept in order. It moves
/// nothing between ranks, so its traffic stays zero.
std::unique_ptr<Comm> make_single_comm(std::string name);

}  // namespace cairn::comm
