#pragma once
// How much memory this process may still take.

#include <cstdint>
#include <filesystem>

namespace cairn::ckpt {

/// Bytes that the machine has available, swap included, or that the tightest control group of this process (v1 or v2)
/// leaves below its limit, counting page cache as free. INT64_MAX where nothing says. `freed`: as if shared memory of
/// this size were removed. A group gets that back at most as far as shared memory counts in it: memory of a dead
/// process may count in another group. The folders are for tests.
int64_t available_memory(int64_t freed = 0, const std::filesystem::path& proc = "/proc",
                         const std::filesystem::path& groups = "/sys/fs/cgroup");

}  // namespace cairn::ckpt
