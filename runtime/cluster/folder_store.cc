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
#include "runtime/core/new_file.h"
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
  RT_TRY_SET(NewFile file, NewFile::beside(directory_ / file_name(epoch.number)));
  RT_TRY(file.write(json_text(encode_epoch(epoch), 1) + "\n"));
  return file.publish_if_free(Durable::kYes);
}

Status FolderStore::show(const std::string& sign) {
  const std::string path = (directory_ / kLease).string();
  RT_TRY_SET(const Fd fd, open_own(path, O_WRONLY));
  if (::pwrite(fd.get(), sign.data(), sign.size(), 0) < 0) return os_error(errno, path);
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
