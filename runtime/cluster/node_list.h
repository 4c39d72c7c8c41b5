#pragma once
// Host names in the grammar of Slurm's node lists: `a[001-003,7],b1` is a001 a002 a003 a7 b1. Read here because
// `scontrol show hostnames` is often missing inside containers.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::cluster {

inline constexpr int64_t kMostHosts = 65536;  // of one run

/// The names of `text` in order. Several brackets in a name vary from the right; zero padding is kept.
/// An address of IPv6 may stand in brackets: `[fd00::1],[fd00::2]`.
/// Errors: kInvalidInput with the character's position; more than kMostHosts names.
Result<std::vector<std::string>> expand_node_list(std::string_view text);

/// One name or address as the system takes it: an address of IPv6 without its brackets. Errors: kInvalidInput: brackets
/// around something else, or a port behind a name.
Result<std::string> plain_host(std::string_view text);

}  // namespace cairn::cluster
