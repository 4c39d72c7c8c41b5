#include "runtime/data/file_io.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "runtime/core/file_calls.h"

namespace cairn::data {

Result<OpenedFile> open_readable(const std::string& path) {
  OpenedFile file;
  file.fd.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // non-blocking: a FIFO must not hang us
  if (!file.fd) return os_error(errno, path);
  struct stat info = {};
  if (::fstat(file.fd.get(), &info) != 0) return os_error(errno, path);
  if (!S_ISREG(info.st_mode)) return Error{ErrorCode::kInvalidInput, path + ": not a regular file"};
  file.size_bytes = info.st_size;
  return file;
}

Status read_exact(int fd, const std::string& path, int64_t offset, void* out, int64_t count_bytes) {
  auto* cursor = static_cast<char*>(out);
  int64_t done = 0;
  while (done < count_bytes) {
    const ssize_t got = ::pread(fd, cursor + done, static_cast<size_t>(count_bytes - done), offset + done);
    if (got < 0) {
      if (errno == EINTR) continue;
      return os_error(errno, fmt::format("{}: reading {} bytes at byte {}", path, count_bytes - done, offset + done));
    }
    if (got == 0)
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{}: the file ends at byte {}, {} more bytes were there when it was opened; it was cut "
                               "while in use",
                               path, offset + done, count_bytes - done)};
    done += got;
  }
  return {};
}

Status write_exact(int fd, const std::string& path, int64_t offset, const void* bytes, int64_t count_bytes) {
  const auto* cursor = static_cast<const char*>(bytes);
  int64_t done = 0;
  while (done < count_bytes) {
    const ssize_t put = ::pwrite(fd, cursor + done, static_cast<size_t>(count_bytes - done), offset + done);
    if (put < 0) {
      if (errno == EINTR) continue;
      return os_error(errno, fmt::format("{}: writing {} bytes at byte {}", path, count_bytes - done, offset + done));
    }
    done += put;
  }
  return {};
}

Status sync_file(int fd, const std::string& path) {
  if (sync_to_disk(fd) != 0) return os_error(errno, path + ": fsync");
  return {};
}

Status sync_parent_dir(const std::string& path) {
  const std::string parent = (std::filesystem::path(path).parent_path() / ".").string();  // "./" for a bare name
  const Fd dir(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!dir) return os_error(errno, parent);
  if (sync_to_disk(dir.get()) != 0) return os_error(errno, parent + ": fsync of the directory");
  return {};
}

}  // namespace cairn::data
