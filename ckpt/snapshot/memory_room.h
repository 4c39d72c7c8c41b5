#pragma once
// How much memory this process may still take.

#include <cstdint>
#include <filesystem>

namespace cairn::ckpt {

/// Bytes: what the machine has available, swap included, or the least that a control group of this process (v1 or v2)
/// leaves below its limit, counting page cache as free. INT64_MAX where nobody says. The folders are for tests.
int64_t available_memory(const std::filesystem::path& proc = "/proc",
                         const std::filesystem::path& groups = "/sys/fs/cgroup");

}  // namespace cairn::ckpt
