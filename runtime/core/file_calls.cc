#include "runtime/core/file_calls.h"

#include <unistd.h>

#include <cerrno>
#include <iterator>

namespace cairn {

bool is_missing_call(int os_errno) {
  return os_errno == ENOSYS || os_errno == EOPNOTSUPP || os_errno == ENOLCK || os_errno == EINVAL || os_errno == EPERM;
}

namespace {

int or_all(int (*sync)(int), int fd) {
  if (sync(fd) == 0) return 0;
  const int first = errno;
  if (!is_missing_call(first)) return -1;
  if (::syncfs(fd) == 0) return 0;
  if (is_missing_call(errno)) errno = first;
  return -1;
}

}  // namespace

int sync_to_disk(int fd) { return or_all(::fsync, fd); }
int sync_data_to_disk(int fd) { return or_all(::fdatasync, fd); }

int64_t write_fully(int fd, std::string_view bytes) {
  int64_t done = 0;
  while (done < std::ssize(bytes)) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - static_cast<size_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;
    if (n <= 0) break;
    done += n;
  }
  return done;
}

}  // namespace cairn
