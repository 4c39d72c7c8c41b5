#include "tools/run/folder/owner_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <nlohmann/json.hpp>
#include <vector>

#include "runtime/core/file_calls.h"
#include "runtime/core/process.h"
#include "runtime/core/unique_handle.h"
#include "runtime/json/json.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kName = "run.owner-";
constexpr int kMostTries = 100;

fs::path file_of(const fs::path& folder, int64_t number) { return folder / fmt::format("{}{:08}", kName, number); }

/// The numbers of the existing files, in ascending order.
Result<std::vector<int64_t>> numbers_in(const fs::path& folder) {
  std::vector<int64_t> out;
  std::error_code failed;
  for (fs::directory_iterator at(folder, failed), end; !failed && at != end; at.increment(failed)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(kName)) continue;
    int64_t number = 0;
    const auto [stop, wrong] = std::from_chars(name.data() + kName.size(), name.data() + name.size(), number);
    if (wrong == std::errc() && stop == name.data() + name.size() && number > 0) out.push_back(number);
  }
  if (failed) return os_error(failed.value(), folder.string());
  std::ranges::sort(out);
  return out;
}

/// Whether no process can own the folder by this text any more. An empty one is being written, for all that is known.
bool is_gone_for_certain(const std::string& text) {
  const RunHolder holder = holder_in(text);
  if (holder.boot.empty() || holder.boot != this_boot()) return false;
  int64_t pid = 0;
  std::from_chars(holder.pid.data(), holder.pid.data() + holder.pid.size(), pid);
  if (pid <= 0) return false;
  if (::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return true;
  // There is a process with its number. /proc may hide it, or be that of another namespace.
  const std::optional<ProcessStat> stat = process_stat(pid), own = process_stat(::getpid());
  if (!stat || !own || own->start != this_process().start) return false;
  return stat->ended() || stat->start != holder.start;
}

Result<bool> is_owned(const fs::path& file) {
  const Result<std::string> text = read_text_file(file);
  if (!text.ok() && text.error().os_errno == ENOENT) return false;
  RT_TRY_SET(const std::string line, text);
  return !is_gone_for_certain(line);
}

Status write_line(int fd, const fs::path& path) {
  const std::string line = holder_line();
  if (write_fully(fd, line) != std::ssize(line) || sync_to_disk(fd) != 0) return os_error(errno, path.string());
  return {};
}

}  // namespace

Result<std::optional<OwnerFile>> OwnerFile::claim(const fs::path& folder, bool by_force) {
  for (int tries = 0; tries < kMostTries; ++tries) {
    RT_TRY_SET(const std::vector<int64_t> before, numbers_in(folder));
    const int64_t newest = before.empty() ? 0 : before.back();
    if (newest > 0 && !by_force) {
      RT_TRY_SET(const bool owned, is_owned(file_of(folder, newest)));
      if (owned) return std::optional<OwnerFile>();
    }
    const fs::path own = file_of(folder, newest + 1);
    const Fd fd(::open(own.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd && errno == EEXIST) continue;
    if (!fd) return os_error(errno, own.string());
    OwnerFile out(own);  // removes the file wherever this ends otherwise
    RT_TRY(write_line(fd.get(), own));
    RT_TRY_SET(const std::vector<int64_t> now, numbers_in(folder));
    if (!now.empty() && now.back() > newest + 1) continue;
    for (const int64_t number : now) {
      if (number < newest) ::unlink(file_of(folder, number).c_str());
    }
    return std::optional(std::move(out));
  }
  return Error{ErrorCode::kUnavailable,
               fmt::format("{}: other starts take the run again and again", file_of(folder, 1).string())};
}

OwnerFile& OwnerFile::operator=(OwnerFile&& other) noexcept {
  std::swap(path_, other.path_);
  return *this;
}

OwnerFile::~OwnerFile() {
  if (!path_.empty()) ::unlink(path_.c_str());
}

Result<std::optional<fs::path>> owner_file_in(const fs::path& folder) {
  RT_TRY_SET(const std::vector<int64_t> numbers, numbers_in(folder));
  if (numbers.empty()) return std::optional<fs::path>();
  const fs::path newest = file_of(folder, numbers.back());
  RT_TRY_SET(const bool owned, is_owned(newest));
  return owned ? std::optional(newest) : std::nullopt;
}

}  // namespace cairn::tools
