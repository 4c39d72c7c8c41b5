#include "runtime/core/new_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <utility>

#include "runtime/core/file_calls.h"

namespace cairn {
namespace {

namespace fs = std::filesystem;

constexpr int kMostNames = 16;  // of 2^64; more than one is an attack, or a file system that lies

constexpr std::string_view kBegin = ".new-";
constexpr int64_t kDigits = 16;
constexpr time_t kLeftS = 600;

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

Status write_all(int fd, std::string_view bytes, const std::string& name) {
  return write_fully(fd, bytes) == std::ssize(bytes) ? Status() : os_error(errno, name);
}

}  // namespace

Result<NewFile> NewFile::beside(const fs::path& path, mode_t mode) {
  for (int tries = 1;; ++tries) {
    uint64_t number = 0;
    if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) return os_error(errno, "getrandom");
    std::string temporary = (folder_of(path) / fmt::format("{}{:0{}x}", kBegin, number, kDigits)).string();
    Fd fd(::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
    if (fd) return NewFile(path, std::move(temporary), std::move(fd));
    if (errno != EEXIST || tries == kMostNames) return os_error(errno, path.string());
  }
}

NewFile::NewFile(fs::path path, std::string temporary, Fd fd)
    : path_(std::move(path)), temporary_(std::move(temporary)), fd_(std::move(fd)) {}

NewFile::NewFile(NewFile&& other) noexcept
    : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, {})), fd_(std::move(other.fd_)) {}

NewFile& NewFile::operator=(NewFile&& other) noexcept {
  if (this == &other) return *this;
  discard();
  path_ = std::move(other.path_);
  temporary_ = std::exchange(other.temporary_, {});
  fd_ = std::move(other.fd_);
  return *this;
}

NewFile::~NewFile() { discard(); }

void NewFile::discard() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

Status NewFile::write(std::string_view bytes) { return write_all(fd_.get(), bytes, path_.string()); }

Status NewFile::sync() {
  if (sync_to_disk(fd_.get()) != 0) return os_error(errno, path_.string());
  return {};
}

Status NewFile::sync_folder() const {
  const fs::path folder = folder_of(path_);
  const Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || sync_to_disk(fd.get()) != 0) return os_error(errno, folder.string());
  return {};
}

Status NewFile::publish() {
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) return os_error(errno, path_.string());
  temporary_.clear();
  return {};
}

Status NewFile::publish_durably() {
  RT_TRY(sync());
  RT_TRY(publish());
  return sync_folder();
}

Result<bool> NewFile::publish_if_free(Durable durable) {
  if (durable == Durable::kYes) RT_TRY(sync());
  bool made = ::link(temporary_.c_str(), path_.c_str()) == 0;  // unlike rename, it does not replace
  if (!made && errno != EEXIST) return os_error(errno, path_.string());
  struct stat found {};  // a server that does a repeated request twice says EEXIST of the first one's work
  if (!made && ::fstat(fd_.get(), &found) == 0) made = found.st_nlink == 2;
  discard();
  if (durable == Durable::kYes) RT_TRY(sync_folder());
  return made;
}

Status place_file(const fs::path& path, std::string_view text, Durable durable) {
  RT_TRY_SET(NewFile file, NewFile::beside(path));
  RT_TRY(file.write(text));
  return durable == Durable::kYes ? file.publish_durably() : file.publish();
}

Status write_output(const fs::path& path, std::string_view text) {
  struct stat there {};
  if (::stat(path.c_str(), &there) != 0 || S_ISREG(there.st_mode)) return place_file(path, text);
  const Fd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd) return os_error(errno, path.string());
  return write_all(fd.get(), text, path.string());
}

void remove_left_files(const fs::path& folder) {
  std::error_code failed;
  for (fs::directory_iterator at(folder, failed), end; !failed && at != end; at.increment(failed)) {
    const std::string name = at->path().filename().string();
    struct stat found {};
    if (!name.starts_with(kBegin) || name.size() != kBegin.size() + kDigits) continue;
    if (::lstat(at->path().c_str(), &found) == 0 && ::time(nullptr) - found.st_mtime > kLeftS)
      ::unlink(at->path().c_str());
  }
}

Result<Fd> open_own(const fs::path& path, int flags, mode_t mode) {
  Fd fd(::open(path.c_str(), flags | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, mode));
  const int failed = errno;
  struct stat found {};
  const bool is_link = !fd && failed == ELOOP;
  if (!fd && !is_link) return os_error(failed, path.string());
  if (is_link || (::fstat(fd.get(), &found) == 0 && !S_ISREG(found.st_mode) && !S_ISCHR(found.st_mode))) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{} is {}, where a regular file is written: remove it",
                                                       path.string(), is_link ? "a link" : "no regular file")};
  }
  return fd;
}

}  // namespace cairn
