#include "converters/foreign_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <span>

#include "runtime/core/lfs_pointer.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kHeadBytes = 64;  // that is_lfs_pointer() looks at

Error invalid(const fs::path& path, std::string_view message) {
  return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}", path.string(), message)};
}

/// The bytes from the file's beginning.
Status read_front(const Fd& fd, const fs::path& path, std::span<char> out) {
  for (size_t done = 0; done < out.size();) {
    const ssize_t n = ::pread(fd.get(), out.data() + done, out.size() - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, path.string());
    if (n == 0) {
      return Error{ErrorCode::kCorrupt, fmt::format("{}: ends at byte {} of {}", path.string(), done, out.size())};
    }
    done += static_cast<size_t>(n);
  }
  return {};
}

}  // namespace

Result<ForeignFile> open_foreign(const fs::path& path) {
  ForeignFile out;
  out.fd.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // else a pipe would wait for its writer
  if (!out.fd) return os_error(errno, path.string());
  struct stat info {};
  if (::fstat(out.fd.get(), &info) != 0) return os_error(errno, path.string());
  if (!S_ISREG(info.st_mode)) return invalid(path, "is no regular file");
  out.bytes = info.st_size;
  std::string head(static_cast<size_t>(std::min(out.bytes, kHeadBytes)), '\0');
  RT_TRY(read_front(out.fd, path, head));
  if (is_lfs_pointer(head)) return invalid(path, kLfsPointer);
  return out;
}

Result<std::string> read_text_file(const fs::path& path, int64_t max_bytes) {
  RT_TRY_SET(const ForeignFile file, open_foreign(path));
  if (file.bytes > max_bytes) {
    return invalid(path, fmt::format("has {} bytes, at most {} are expected", file.bytes, max_bytes));
  }
  std::string out(static_cast<size_t>(file.bytes), '\0');
  RT_TRY(read_front(file.fd, path, out));
  return out;
}

namespace {

bool is_below(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

/// HUB/models--OWNER--NAME of HUB/models--OWNER--NAME/snapshots/REVISION and what is below; empty: it is no snapshot.
fs::path hub_repository(const fs::path& dir) {
  for (fs::path at = dir; at.has_relative_path(); at = at.parent_path()) {
    const fs::path snapshots = at.parent_path(), repository = snapshots.parent_path();
    if (snapshots.filename() == "snapshots" && repository.filename().string().find("--") != std::string::npos)
      return repository;
  }
  return {};
}

}  // namespace

Status check_inside(const fs::path& dir, const fs::path& name) {
  const fs::path path = dir / name;
  std::error_code failed;
  const fs::path folder = fs::canonical(dir, failed);
  if (failed) return os_error(failed.value(), dir.string());
  const fs::path target = fs::canonical(path, failed);
  std::error_code no_link;
  if (const fs::path next = fs::read_symlink(path, no_link); failed && !no_link) {
    return invalid(path,
                   fmt::format("is a link to {}, which cannot be followed ({}); put the file there, or remove the link",
                               next.string(), failed.message()));
  }
  if (failed) return os_error(failed.value(), path.string());
  const fs::path repository = hub_repository(folder);
  if (is_below(target, folder) || (!repository.empty() && is_below(target, repository / "blobs"))) return {};
  return invalid(path, fmt::format("is a link out of the folder, to {}, and is not followed: what it leads to would be "
                                   "copied. Put a copy of the file in its place, or remove the link",
                                   target.string()));
}

bool is_plain_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

}  // namespace cairn::convert
