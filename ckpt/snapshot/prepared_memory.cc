#include "ckpt/snapshot/prepared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "ckpt/snapshot/populate.h"
#include "ckpt/snapshot/segment_file.h"

namespace cairn::ckpt {
namespace {

constexpr int64_t kPart = int64_t{64} << 20;  // a multiple of a huge page; one thread makes it

}  // namespace

Result<PreparedMemory> PreparedMemory::make(const std::string& folder, int64_t bytes, bool huge_pages,
                                            const std::function<bool()>& stop) {
  if (is_on_disk(folder)) return Error{ErrorCode::kUnsupported, folder + " is on a disk"};
  Fd fd(::open(folder.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  if (!fd) return Error{ErrorCode::kUnsupported, fmt::format("{}: a file without a name", folder), errno};
  if (::ftruncate(fd.get(), bytes) != 0) return os_error(errno, "prepared memory");
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return os_error(errno, "mmap of prepared memory");
  if (huge_pages && huge_pages_allowed(fd.get())) ::madvise(base, bytes, MADV_HUGEPAGE);
  Status made;
  for (int64_t at = 0; at < bytes && made.ok(); at += kPart) {
    const int64_t part = std::min(kPart, bytes - at);
    if (stop && stop()) {
      made = Error{ErrorCode::kStopped, "no longer wanted"};
    } else if (populate(static_cast<std::byte*>(base) + at, part) != 0) {
      if (const int error = ::posix_fallocate(fd.get(), at, part); error != 0)
        made = os_error(error, fmt::format("reserving {} bytes of memory", part));
    }
  }
  ::munmap(base, bytes);
  RT_TRY(std::move(made));
  return PreparedMemory(std::move(fd), folder, bytes);
}

Fd PreparedMemory::take(const std::string& name) {
  Fd fd = std::move(fd_);
  const std::string open = fmt::format("/proc/self/fd/{}", fd.get());
  if (!fd || ::linkat(AT_FDCWD, open.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0) return {};
  return fd;
}

}  // namespace cairn::ckpt
