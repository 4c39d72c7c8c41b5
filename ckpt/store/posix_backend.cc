#include "ckpt/store/posix_backend.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <string_view>

#include "runtime/core/file_calls.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

Error failed(const char* operation, const std::string& path, int error = errno) {
  return os_error(error, fmt::format("{}: {}", path, operation));
}

// One system call moves at most 2 GiB - 4 KiB; stay below with a round number.
constexpr int64_t kMaxCallBytes = int64_t{1} << 30;
constexpr mode_t kFileMode = 0666;  // less what the umask, or an access list of the folder, takes away

template <typename Call>
auto retry_on_signal(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// File systems that put new bytes where the old ones were. Others (btrfs, f2fs, network) would take new space for
/// them.
bool writes_in_place(int fd) {
  struct statfs st {};
  if (::fstatfs(fd, &st) != 0) return false;
  return st.f_type == EXT4_SUPER_MAGIC || st.f_type == XFS_SUPER_MAGIC;
}

/// Nobody else has the file open, nor mapped: else the kernel grants no lease to write.
bool is_ours_alone(int fd) {
  // Who opens it in this instant waits until the lease is given back, and the kernel tells: by a signal that is
  // ignored.
  if (::fcntl(fd, F_SETSIG, SIGURG) != 0 || ::fcntl(fd, F_SETLEASE, F_WRLCK) != 0) return false;
  return ::fcntl(fd, F_SETLEASE, F_UNLCK) == 0;
}

/// Attributes beside those that the system gives every file: lists of rights, somebody's own notes on its content.
bool has_attributes(int fd) {
  std::array<char, 4096> names{};
  const ssize_t bytes = ::flistxattr(fd, names.data(), names.size());
  if (bytes < 0) return errno != EOPNOTSUPP;
  for (std::string_view rest(names.data(), static_cast<size_t>(bytes)); !rest.empty();) {
    const std::string_view name = rest.substr(0, rest.find('\0'));
    if (!name.starts_with("security.")) return true;
    rest.remove_prefix(name.size() + 1);
  }
  return false;
}

/// Parts that another file has too (`cp --reflink`): written over they take new space.
bool shares_blocks(int fd) {
  constexpr uint32_t kExtents = 64;
  alignas(fiemap) std::array<std::byte, sizeof(fiemap) + kExtents * sizeof(fiemap_extent)> memory{};
  auto& map = *reinterpret_cast<fiemap*>(memory.data());
  for (uint64_t at = 0;;) {
    map = {.fm_start = at, .fm_length = FIEMAP_MAX_OFFSET - at, .fm_extent_count = kExtents};
    if (::ioctl(fd, FS_IOC_FIEMAP, &map) != 0) return true;
    const std::span<const fiemap_extent> extents(map.fm_extents, map.fm_mapped_extents);
    for (const fiemap_extent& extent : extents) {
      if ((extent.fe_flags & FIEMAP_EXTENT_SHARED) != 0) return true;
      if ((extent.fe_flags & FIEMAP_EXTENT_LAST) != 0) return false;
    }
    if (extents.empty()) return false;
    at = extents.back().fe_logical + extents.back().fe_length;
  }
}

/// Whether a file that is there looks as a new one in its folder would, or can be made to: owner, group, mode, and no
/// attributes of its own.
bool looks_new(int fd, const struct stat& file, const fs::path& folder) {
  struct stat dir {};
  if (::stat(folder.c_str(), &dir) != 0 || file.st_uid != dir.st_uid || file.st_gid != dir.st_gid) return false;
  if (has_attributes(fd)) return false;
  const mode_t mode = dir.st_mode & kFileMode;  // of a folder made by this process: without the umask's bits
  return (file.st_mode & 07777) == mode || ::fchmod(fd, mode) == 0;
}

/// Bytes [begin, end), which lengthen the file. kNoSpace when the disk cannot hold them.
Status reserve(int fd, const fs::path& path, int64_t begin, int64_t end) {
  // Writes into holes make io_uring hand each write to a worker thread; reserved space does not (and ENOSPC comes now).
  if (begin >= end || retry_on_signal([&] { return ::fallocate(fd, 0, begin, end - begin); }) == 0) return {};
  if (errno == EOPNOTSUPP && retry_on_signal([&] { return ::ftruncate(fd, end); }) == 0) return {};
  return failed("reserve space", path.string()).with(fmt::format("{} bytes", end));
}

}  // namespace

Result<IoTicket> PosixFile::submit_write(int64_t offset, const std::byte* data, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = retry_on_signal(
        [&] { return ::pwrite(fd_.get(), data, static_cast<size_t>(std::min(bytes, kMaxCallBytes)), offset); });
    if (n < 0) return failed("write", path_);
    if (n == 0) return failed("write", path_, EIO);
    data += n;
    offset += n;
    bytes -= n;
  }
  return IoTicket{0};
}

Result<IoTicket> PosixFile::submit_read(int64_t offset, std::byte* data, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = retry_on_signal(
        [&] { return ::pread(fd_.get(), data, static_cast<size_t>(std::min(bytes, kMaxCallBytes)), offset); });
    if (n < 0) return failed("read", path_);
    if (n == 0)
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{}: ends at byte {}, {} more bytes expected (file cut short?)", path_, offset, bytes)};
    data += n;
    offset += n;
    bytes -= n;
  }
  return IoTicket{0};
}

Status PosixFile::truncate(int64_t size_bytes) {
  if (retry_on_signal([&] { return ::ftruncate(fd_.get(), size_bytes); }) != 0) return failed("truncate", path_);
  return {};
}

Result<int64_t> PosixFile::size() {
  struct stat st {};
  if (::fstat(fd_.get(), &st) != 0) return failed("stat", path_);
  return static_cast<int64_t>(st.st_size);
}

Status PosixFile::sync() {
  if (retry_on_signal([&] { return sync_to_disk(fd_.get()); }) != 0) return failed("fsync", path_);
  return {};
}

Status PosixFile::close() {
  if (!fd_) return {};
  // After EINTR Linux has closed the descriptor already.
  if (::close(fd_.release()) != 0 && errno != EINTR) return failed("close", path_);
  return {};
}

Result<Fd> PosixBackend::create_fd(const fs::path& path, int64_t size_bytes) {
  Fd fd(retry_on_signal([&] { return ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, kFileMode); }));
  if (!fd) return failed("create", path.string());
  Status reserved = reserve(fd.get(), path, 0, size_bytes);
  if (reserved.ok()) return fd;
  ::unlink(path.c_str());
  return std::move(reserved).error();
}

Result<Fd> PosixBackend::reopen_fd(const fs::path& path, int64_t size_bytes) {
  Fd fd(retry_on_signal([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); }));
  if (!fd) return failed("open for writing", path.string());
  struct stat st {};
  if (::fstat(fd.get(), &st) != 0) return failed("stat", path.string());
  const bool sparse = int64_t{st.st_blocks} * 512 < st.st_size;
  if (!S_ISREG(st.st_mode) || st.st_nlink != 1 || sparse || !writes_in_place(fd.get()) || shares_blocks(fd.get()) ||
      !is_ours_alone(fd.get()) || !looks_new(fd.get(), st, path.parent_path()))
    return Error{ErrorCode::kUnsupported, fmt::format("{}: is not to be written over", path.string())};
  const int flags = ::fcntl(fd.get(), F_GETFL);  // as open_fd() does
  if (flags < 0 || ::fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) return failed("open", path.string());
  if (st.st_size > size_bytes && retry_on_signal([&] { return ::ftruncate(fd.get(), size_bytes); }) != 0)
    return failed("truncate", path.string());
  // Only what is new: xfs wants as much free as it is asked for, whatever is there.
  RT_TRY(reserve(fd.get(), path, st.st_size / kIoAlign * kIoAlign, size_bytes));
  return fd;
}

Result<Fd> PosixBackend::open_fd(const fs::path& path) {
  Fd fd(retry_on_signal(
      [&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }));  // or a FIFO waits for a writer
  if (!fd && errno == EWOULDBLOCK)  // a file server's lease, which regular files alone have: it is given back
    fd.reset(retry_on_signal([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
  if (!fd) return failed("open", path.string());
  struct stat st {};
  if (::fstat(fd.get(), &st) != 0) return failed("stat", path.string());
  if (!S_ISREG(st.st_mode))
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: is no regular file", path.string()), EISDIR};
  // For the open alone. Until Linux 6.4 io_uring gives EAGAIN, for ever, for such a file on a device that cannot tell
  // beforehand whether it would wait (dm-crypt, thin volumes, ...); a file server may give it for what lies on tape.
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) return failed("open", path.string());
  return fd;
}

Result<std::unique_ptr<IoFile>> PosixBackend::create(const fs::path& path, int64_t size_bytes) {
  RT_TRY_SET(Fd fd, create_fd(path, size_bytes));
  return std::unique_ptr<IoFile>(std::make_unique<PosixFile>(std::move(fd), path.string()));
}

Result<std::unique_ptr<IoFile>> PosixBackend::open(const fs::path& path) {
  RT_TRY_SET(Fd fd, open_fd(path));
  return std::unique_ptr<IoFile>(std::make_unique<PosixFile>(std::move(fd), path.string()));
}

Result<std::unique_ptr<IoFile>> PosixBackend::reopen(const fs::path& path, int64_t size_bytes) {
  RT_TRY_SET(Fd fd, reopen_fd(path, size_bytes));
  return std::unique_ptr<IoFile>(std::make_unique<PosixFile>(std::move(fd), path.string()));
}

Status PosixBackend::make_dir(const fs::path& path) {
  if (::mkdir(path.c_str(), 0777) != 0) return failed("make directory", path.string());
  return {};
}

Status PosixBackend::rename(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    return failed(fmt::format("rename to {}", to.string()).c_str(), from.string());
  return {};
}

Status PosixBackend::exchange(const fs::path& a, const fs::path& b) {
  if (::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return {};
  Error error = failed(fmt::format("exchange with {}", b.string()).c_str(), a.string());
  if (error.os_errno == EINVAL || error.os_errno == ENOSYS || error.os_errno == EOPNOTSUPP)
    error.code = ErrorCode::kUnsupported;
  return error;
}

Status PosixBackend::sync_dir(const fs::path& path) {
  const Fd fd(retry_on_signal([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (!fd) return failed("open directory", path.string());
  if (retry_on_signal([&] { return sync_to_disk(fd.get()); }) != 0) return failed("fsync directory", path.string());
  return {};
}

Status PosixBackend::remove_file(const fs::path& path) {
  if (::unlink(path.c_str()) != 0) return failed("remove", path.string());
  return {};
}

Status PosixBackend::remove_dir(const fs::path& path) {
  if (::rmdir(path.c_str()) != 0) return failed("remove directory", path.string());
  return {};
}

Result<std::vector<DirEntry>> PosixBackend::list(const fs::path& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(path.c_str()), ::closedir);
  if (!dir) return failed("list", path.string());
  std::vector<DirEntry> entries;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(dir.get());
    if (entry == nullptr) {
      if (errno != 0) return failed("list", path.string());
      break;
    }
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat st {};  // d_type is not filled in by every file system
    if (::fstatat(::dirfd(dir.get()), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;  // removed since
      return failed("stat", (path / name).string());
    }
    if (S_ISLNK(st.st_mode) && ::fstatat(::dirfd(dir.get()), entry->d_name, &st, 0) != 0) st.st_mode = S_IFLNK;
    entries.push_back({name, S_ISDIR(st.st_mode)});
  }
  std::sort(entries.begin(), entries.end(), [](const DirEntry& a, const DirEntry& b) { return a.name < b.name; });
  return entries;
}

Result<FileStat> PosixBackend::stat(const fs::path& path) {
  struct stat st {};
  if (::lstat(path.c_str(), &st) != 0) return failed("stat", path.string());
  const bool link = S_ISLNK(st.st_mode);
  if (link && ::stat(path.c_str(), &st) != 0) return failed("stat", path.string());
  return FileStat{static_cast<int64_t>(st.st_size), S_ISDIR(st.st_mode), link, int64_t{st.st_blocks} * 512};
}

Result<int64_t> PosixBackend::free_bytes(const fs::path& path) {
  struct statvfs st {};
  if (::statvfs(path.c_str(), &st) != 0) return failed("free space", path.string());
  if (st.f_blocks == 0) return int64_t{1} << 60;  // it does not tell, as FUSE without statfs
  return static_cast<int64_t>(st.f_bavail) * static_cast<int64_t>(st.f_frsize);
}

}  // namespace cairn::ckpt
