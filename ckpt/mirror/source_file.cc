#include "ckpt/mirror/source_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

namespace cairn::ckpt {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Result<SourceFile> SourceFile::open(const std::filesystem::path& path) {
  SourceFile out;
  out.path_ = path;
  out.fd_.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!out.fd_) return os_error(errno, path.string());
  struct stat info {};
  if (::fstat(out.fd_.get(), &info) != 0) return os_error(errno, path.string());
  if (!S_ISREG(info.st_mode)) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: not a regular file", path.string())};
  }
  out.bytes_ = info.st_size;
  return out;
}

Result<SourceFile> SourceFile::of_text(const std::string& name, std::string_view text) {
  SourceFile out;
  out.path_ = name;
  out.fd_.reset(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!out.fd_) return os_error(errno, name);
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(out.fd_.get(), text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, name);
    done += static_cast<size_t>(n);
  }
  out.bytes_ = static_cast<int64_t>(text.size());
  return out;
}

Status SourceFile::read(int64_t offset, std::span<std::byte> target) {
  for (size_t done = 0; done < target.size();) {
    const ssize_t n =
        ::pread(fd_.get(), target.data() + done, target.size() - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, path_.string());
    if (n == 0) {
      return Error{ErrorCode::kIo, fmt::format("{}: ends at byte {}, expected {} bytes", path_.string(),
                                               offset + static_cast<int64_t>(done), bytes_)};
    }
    done += static_cast<size_t>(n);
  }
  // Training has better uses for this memory.
  posix_fadvise(fd_.get(), offset, static_cast<off_t>(target.size()), POSIX_FADV_DONTNEED);
  return {};
}

Pace::Pace(int64_t bytes_per_s) : bytes_per_s_(bytes_per_s), next_ns_(now_ns()) {}

void Pace::spend(int64_t bytes) {
  if (bytes_per_s_ <= 0) return;
  const int64_t now = now_ns();
  next_ns_ = std::max(next_ns_, now) +
             static_cast<int64_t>(1e9 * static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
  std::this_thread::sleep_for(std::chrono::nanoseconds(next_ns_ - now));
}

}  // namespace cairn::ckpt
