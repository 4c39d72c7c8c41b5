#pragma once
// The disk behind a seam: what saving, loading, verifying and deleting checkpoints need, and no more. Backends:
// PosixBackend (buffered calls), UringBackend (O_DIRECT through io_uring), MemoryBackend (a disk in memory that can
// lose power), FaultBackend (wraps another one and fails on purpose). All leave the same bytes in the same files.
//
// Rules for every backend:
// - Offsets and sizes in bytes. Memory may have any alignment; 4096-aligned memory, offsets and sizes go fastest.
// - Nothing is durable before sync() of the file AND sync_dir() of the directory that holds its name. After a failed
//   sync() the file must be thrown away: the kernel may already call its lost pages clean.
// - Errors say operation, path and the system's reason; os_errno is set when the system gave one (is_not_found).
// - A backend outlives its files. Threads: one thread at a time per backend and its files.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::ckpt {

inline constexpr int64_t kIoAlign =
    4096;  // what O_DIRECT wants on every file system we met; also a sector of a test disk

struct FileStat {
  int64_t size_bytes = 0;
  bool is_dir = false;
  bool is_link = false;    // the name is a symbolic link; the rest is of what it leads to
  int64_t disk_bytes = 0;  // of its blocks
};

struct DirEntry {
  std::string name;
  bool is_dir = false;  // or a symbolic link to one
};

/// An operation that submit_write or submit_read started.
using IoTicket = int64_t;

/// An open file. The destructor closes it and drops errors; call close() where they matter.
class IoFile {
 public:
  virtual ~IoFile() = default;

  /// Starts a write or a read of all `bytes` bytes; may block until the queue has room. The memory belongs to the
  /// operation until wait(ticket) or finish() returned. Ranges of operations in flight must not overlap. A read that
  /// meets the end of the file is an error.
  virtual Result<IoTicket> submit_write(int64_t offset, const std::byte* data, int64_t bytes) = 0;
  virtual Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) = 0;
  /// Waits for one operation and gives its result. Each ticket is waited for at most once.
  virtual Status wait(IoTicket ticket) = 0;
  /// Waits for all that is in flight; the first error among operations that were not waited for.
  virtual Status finish() = 0;

  virtual Status truncate(int64_t size_bytes) = 0;
  virtual Result<int64_t> size() = 0;
  virtual Status sync() = 0;
  /// Starts a sync of what was finished before; counts when its ticket was waited for. Several files' syncs go side by
  /// side where the backend can; here it is done when it returns.
  virtual Result<IoTicket> submit_sync();
  virtual Status close() = 0;

  // One operation, done when it returns.
  Status write(int64_t offset, std::span<const std::byte> data);
  Status read(int64_t offset, std::span<std::byte> data);
};

class IoBackend {
 public:
  virtual ~IoBackend() = default;
  virtual std::string_view name() const = 0;

  /// Makes a new file of `size_bytes` bytes, space reserved where the file system can; its bytes read as zero.
  /// An existing one is an error. kNoSpace when the disk cannot hold it.
  virtual Result<std::unique_ptr<IoFile>> create(const std::filesystem::path& path, int64_t size_bytes) = 0;
  virtual Result<std::unique_ptr<IoFile>> open(const std::filesystem::path& path) = 0;  // for reading
  /// Opens a file to be written over: `size_bytes` long, its space reserved, its old content still in it. kUnsupported
  /// where nothing is gained or another user would lose: the file has a second name, is a link, is open elsewhere, has
  /// holes or other rights than a new one would have, or the file system does not write in place. This default: always
  /// kUnsupported.
  virtual Result<std::unique_ptr<IoFile>> reopen(const std::filesystem::path& path, int64_t size_bytes);

  virtual Status make_dir(const std::filesystem::path& path) = 0;  // the parent exists; an existing one is an error
  /// Atomic. A file is put in the place of a file, a directory in the place of nothing or of an empty directory.
  virtual Status rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  /// Swaps two names, atomically. kUnsupported where the file system cannot.
  virtual Status exchange(const std::filesystem::path& a, const std::filesystem::path& b) = 0;
  virtual Status sync_dir(const std::filesystem::path& path) = 0;
  virtual Status remove_file(const std::filesystem::path& path) = 0;
  virtual Status remove_dir(const std::filesystem::path& path) = 0;  // an empty one

  virtual Result<std::vector<DirEntry>> list(const std::filesystem::path& path) = 0;  // sorted by name
  virtual Result<FileStat> stat(const std::filesystem::path& path) = 0;
  virtual Result<int64_t> free_bytes(const std::filesystem::path& path) = 0;
};

bool is_not_found(const Error& error);  // ENOENT
/// A missing right or a limit of the system, which says nothing about what was asked for.
bool is_refused(const Error& error);  // EACCES, EPERM, EMFILE, ENFILE, ENOMEM

/// What is said of a folder of ours that was there: what is written in its place nobody finds.
inline constexpr const char* kFolderGone = "the folder is gone; move or mount it where it was";

/// Makes `path` and its missing parents, and syncs the directories that got a new name.
Status make_dirs(IoBackend& io, const std::filesystem::path& path);
/// Whole file. kInvalidInput when it is larger than `max_bytes`.
Result<std::string> read_file(IoBackend& io, const std::filesystem::path& path, int64_t max_bytes);
/// A new file with these bytes, synced (its directory is not).
Status write_file(IoBackend& io, const std::filesystem::path& path, std::string_view bytes);
/// Removes a directory and what is in it; of a symbolic link the link alone. A path that is not there is fine.
Status remove_tree(IoBackend& io, const std::filesystem::path& path);

}  // namespace cairn::ckpt
