#include "ckpt/store/held_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <string>

#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {

namespace {

std::string describe(const struct stat& info) {
  return fmt::format("device {}:{}, inode {}", major(info.st_dev), minor(info.st_dev), info.st_ino);
}

}  // namespace

Result<HeldFolder> HeldFolder::open(const std::filesystem::path& path) {
  HeldFolder out;
  out.path_ = path;
  out.fd_.reset(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!out.fd_) return os_error(errno, path.string());
  return out;
}

Status HeldFolder::check() const {
  struct stat meant {
  }, found{};
  if (::stat(path_.c_str(), &found) != 0) {
    if (errno == ENOENT) return Error{ErrorCode::kIo, fmt::format("{}: {}", path_.string(), kFolderGone), ENOENT};
    return os_error(errno, path_.string());
  }
  if (::fstat(fd_.get(), &meant) != 0) return os_error(errno, path_.string());
  if (meant.st_dev == found.st_dev && meant.st_ino == found.st_ino) return {};
  return Error{ErrorCode::kIo, fmt::format("{}: {} (another one is there: {}, expected {})", path_.string(),
                                           kFolderGone, describe(found), describe(meant))};
}

}  // namespace cairn::ckpt
