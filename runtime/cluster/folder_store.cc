#include "runtime/cluster/folder_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "runtime/cluster/epoch_json.h"
#include "runtime/core/unique_handle.h"
#include "runtime/json/json.h"

namespace cairn::cluster {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kBegin = "epoch-", kEnd = ".json", kLease = "lease";

std::string file_name(int64_t number) { return fmt::format("{}{:08}{}", kBegin, number, kEnd); }

/// The epoch that a file's name tells; 0: it is another file.
int64_t number_of(const std::string& name) {
  if (!name.starts_with(kBegin) || !name.ends_with(kEnd)) return 0;
  int64_t out = 0;
  const char *begin = name.data() + kBegin.size(), *end = name.data() + name.size() - kEnd.size();
  const auto [at, error] = std::from_chars(begin, end, out);
  return error == std::errc() && at == end && file_name(out) == name ? out : 0;
}

}  // namespace

Result<std::shared_ptr<FolderStore>> FolderStore::open(fs::path directory) {
  std::error_code code;
  fs::create_directories(directory, code);
  if (code) return os_error(code.value(), directory.string());
  return std::shared_ptr<FolderStore>(new FolderStore(std::move(directory)));
}

Result<std::optional<Epoch>> FolderStore::newest() {
  int64_t number = 0;
  std::error_code code;
  for (fs::directory_iterator at(directory_, code), end; !code && at != end; at.increment(code)) {
    number = std::max(number, number_of(at->path().filename().string()));
  }
  if (code) return os_error(code.value(), directory_.string());
  if (number == 0) return std::optional<Epoch>();
  const fs::path path = directory_ / file_name(number);
  std::ifstream file(path, std::ios::binary);
  if (!file) return Error{ErrorCode::kUnavailable, fmt::format("{}: cannot be opened", path.string())};
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  RT_TRY_SET(const json parsed, parse_json_strictly(text, path.string(), 8));
  auto epoch = decode_epoch(parsed);
  if (!epoch.ok()) return std::move(epoch).error().with(path.string());
  if (epoch.value().number != number) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: holds epoch {}", path.string(), epoch.value().number)};
  }
  return std::optional(std::move(epoch).value());
}

Result<bool> FolderStore::claim(const Epoch& epoch) {
  RT_CHECK(epoch.number > 0 && epoch.number <= kMostEpoch, "epoch {}", epoch.number);
  const std::string text = json_text(encode_epoch(epoch), 1) + "\n",
                    target = (directory_ / file_name(epoch.number)).string();
  std::string temporary = (directory_ / ".epoch-XXXXXX").string();
  const Fd fd(::mkostemp(temporary.data(), O_CLOEXEC));
  if (!fd) return os_error(errno, temporary);
  int failed = 0;
  for (size_t at = 0; at < text.size() && failed == 0;) {
    const ssize_t n = ::write(fd.get(), text.data() + at, text.size() - at);
    if (n > 0) at += static_cast<size_t>(n);
    if (n < 0 && errno != EINTR) failed = errno;
    if (n == 0) failed = EIO;
  }
  if (failed == 0 && (::fchmod(fd.get(), 0644) != 0 || ::fsync(fd.get()) != 0)) failed = errno;
  bool made = false;
  if (failed == 0) {
    made = ::link(temporary.c_str(), target.c_str()) == 0;  // unlike rename, it does not replace
    if (!made && errno != EEXIST) failed = errno;
    struct stat found;  // a server that does a repeated request twice says EEXIST of the first one's work
    if (!made && failed == 0 && ::fstat(fd.get(), &found) == 0) made = found.st_nlink == 2;
  }
  ::unlink(temporary.c_str());
  if (failed != 0) return os_error(failed, target);
  const Fd directory(::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || ::fsync(directory.get()) != 0) return os_error(errno, directory_.string());
  return made;
}

Status FolderStore::show(const std::string& sign) {
  const std::string path = (directory_ / kLease).string();
  const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  if (!fd || ::pwrite(fd.get(), sign.data(), sign.size(), 0) < 0) return os_error(errno, path);
  return {};
}

/// O_DIRECT: caches of a shared folder, which show an old file for seconds, are passed by. Opened each time: where
/// there is no O_DIRECT a file's content is fresh at its opening, and durable at its closing.
Result<std::string> FolderStore::shown() {
  constexpr size_t kBlock = 4096;
  alignas(kBlock) std::array<char, kBlock> bytes;
  const std::string path = (directory_ / kLease).string();
  for (const int flags : {O_DIRECT, 0}) {
    if (flags != 0 && !direct_) continue;
    const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags));
    if (!fd && errno == ENOENT) return std::string();
    const ssize_t size = fd ? ::read(fd.get(), bytes.data(), bytes.size()) : -1;
    if (size >= 0) return std::string(bytes.data(), static_cast<size_t>(size));
    if (flags != 0 && (errno == EINVAL || errno == EOPNOTSUPP)) direct_ = false;
  }
  return std::string();
}

/// Memory has no O_DIRECT, and is no other host's.
double FolderStore::stale_s() const {
  constexpr double kCachedS = 4;  // longer than NFS shows an old file
  struct statfs of {};
  const bool memory = ::statfs(directory_.c_str(), &of) == 0 && of.f_type == TMPFS_MAGIC;
  return direct_ || memory ? 0 : kCachedS;
}

}  // namespace cairn::cluster
