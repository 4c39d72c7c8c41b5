#pragma once
// How much memory this process may still take.

#include <cstdint>
#include <filesystem>

namespace cairn::ckpt {

/// Bytes: what the machine has available, swap included, or the least that a control group of this process (v1 or v2)
/// leaves below its limit, counting page cache as free. INT64_MAX where nobody says. `freed`: as if shared memory of
/// this size were removed; a group has that back at most as far as shared memory counts in it, for what a dead process
/// of another group has left counts there. The folders are for tests.
int64_t available_memory(int64_t freed = 0, const std::filesystem::path& proc = "/proc",
                         const std::filesystem::path& groups = "/sys/fs/cgroup");

}  // namespace cairn::ckpt
