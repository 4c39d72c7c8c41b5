#pragma once
// System calls on files that a file system, or a container's filter of system calls, may not have. Lustre mounted
// without `-o flock` answers flock with ENOSYS, FUSE with EOPNOTSUPP, NFS without its lock daemon with ENOLCK; fsync of
// a directory is EINVAL on some network file systems.

#include <cstdint>
#include <string_view>

namespace cairn {

/// Whether the error says that there is no such call here, rather than what became of it.
bool is_missing_call(int os_errno);

/// fsync(), or where that is missing syncfs() of the whole file system, which holds as much. -1 and errno as they.
int sync_to_disk(int fd);
int sync_data_to_disk(int fd);  // fdatasync()

/// Writes `bytes` in as many calls as that takes: a short write says nothing of why, the next call does. Returns the
/// bytes that are written, and sets errno where they are not all.
int64_t write_fully(int fd, std::string_view bytes);

}  // namespace cairn
