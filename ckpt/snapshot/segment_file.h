#pragma once
// What the file of a snapshot segment tells without reading its content: the owner by its name, whether the owner lives
// by its process and its lock, and the file system that it lies on.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/process.h"
#include "runtime/core/unique_handle.h"

namespace cairn::ckpt {

std::string segment_path(const std::string& folder, std::string_view run_id, const ProcessId& agent);

/// Paths of this user's segments in a folder whose agent is gone, or is this process and has closed them; by when that
/// started; of all runs, or of one.
std::vector<std::string> stale_paths(const std::string& folder, std::optional<uint64_t> run_hash);

/// The descriptor of a stale segment with its lock held; empty when somebody still holds it or it is not ours. Who only
/// asks for that (is_held) has it for an instant, or for as long as it gets no core: that is waited for.
Fd lock_segment(const std::string& path, std::chrono::milliseconds patience);

/// Whether an agent has it, whose process may be in another pid namespace and not to be seen from here.
bool is_held(const std::string& path);

/// Whether it lies, or would lie, in a file system that is not memory.
bool is_on_disk(int fd);
bool is_on_disk(const std::string& folder);

/// Whether memory of this file may come in huge pages once it has been advised to. A mounted tmpfs, as /dev/shm is,
/// says so itself; shmem_enabled is for memory that is no file of a mount, and for `deny` and `force`.
bool huge_pages_allowed(int fd);

/// Whether nobody has written to it since the machine started; of another build's file nothing else can be known.
bool is_from_before_start(int fd);

/// Of this start of the machine; empty where the kernel does not tell. Shorter than arena::kTextBytes.
std::string boot_id();

/// Of this machine, over all its starts; empty where the system has given it none. Shorter than arena::kTextBytes.
std::string machine_id();

}  // namespace cairn::ckpt
