#include "ckpt/snapshot/segment_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <ctime>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "ckpt/format/checksum.h"
#include "ckpt/snapshot/arena_format.h"
#include "runtime/core/file_calls.h"

namespace cairn::ckpt {
namespace {

constexpr long kTmpfs = 0x01021994;  // linux/magic.h

struct SegmentName {
  int64_t uid = 0;
  uint64_t run_hash = 0;
  ProcessId agent;
};

std::optional<int64_t> parse_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty() || value < 0) return std::nullopt;
  return value;
}

/// Reads a file's name; anything that is not exactly ours is somebody else's.
std::optional<SegmentName> parse_segment_name(const std::string& name) {
  std::vector<std::string> parts;
  std::stringstream stream(name);
  for (std::string part; std::getline(stream, part, '-');) parts.push_back(part);
  if (parts.size() != 5 || parts[0] != "cairn") return std::nullopt;
  const auto uid = parse_number(parts[1]);
  const auto hash = hash_from_hex(parts[2]);
  const auto pid = parse_number(parts[3]), start = parse_number(parts[4]);
  if (!uid || !hash || !pid || !start) return std::nullopt;
  return SegmentName{*uid, *hash, {*pid, *start}};
}

Fd open_segment(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  struct stat info {};
  if (!fd || fstat(fd.get(), &info) != 0 || info.st_uid != getuid() || !S_ISREG(info.st_mode)) return Fd();
  return fd;
}

}  // namespace

std::string segment_path(const std::string& folder, std::string_view run_id, const ProcessId& agent) {
  return fmt::format("{}/cairn-{}-{}-{}-{}", folder, getuid(), hash_to_hex(hash_bytes(run_id)), agent.pid, agent.start);
}

std::vector<std::string> stale_paths(const std::string& folder, std::optional<uint64_t> run_hash) {
  std::vector<std::pair<int64_t, std::string>> found;
  DIR* dir = opendir(folder.c_str());
  if (dir == nullptr) return {};
  const ProcessId me = this_process();
  while (const dirent* item = readdir(dir)) {
    const auto name = parse_segment_name(item->d_name);
    if (!name || name->uid != static_cast<int64_t>(getuid())) continue;
    if (run_hash && name->run_hash != *run_hash) continue;
    std::string path = folder + "/" + item->d_name;
    const bool left = name->agent == me ? !is_held(path) : !is_alive(name->agent);
    if (left) found.emplace_back(name->agent.start, std::move(path));
  }
  closedir(dir);
  std::sort(found.begin(), found.end());
  std::vector<std::string> out;
  for (auto& [start, path] : found) out.push_back(std::move(path));
  return out;
}

Fd lock_segment(const std::string& path, std::chrono::milliseconds patience) {
  Fd fd = open_segment(path);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (fd && flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() > deadline) return Fd();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return fd;
}

bool is_held(const std::string& path) {
  const Fd fd = open_segment(path);
  return fd && flock(fd.get(), LOCK_SH | LOCK_NB) != 0 && (errno == EWOULDBLOCK || is_missing_call(errno));
}

bool is_on_disk(int fd) {
  struct statfs info {};
  return fstatfs(fd, &info) == 0 && info.f_type != kTmpfs;
}

bool is_on_disk(const std::string& folder) {
  struct statfs info {};
  return statfs(folder.c_str(), &info) == 0 && info.f_type != kTmpfs;
}

bool huge_pages_allowed(int fd) {
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string word;
  while (in >> word && word.front() != '[') {
  }
  if (!in || word == "[deny]") return false;
  if (word == "[force]") return true;
  std::string mount;
  std::ifstream info(fmt::format("/proc/self/fdinfo/{}", fd));
  for (std::string field; info >> field && field != "mnt_id:";) {
  }
  info >> mount;
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    if (!line.starts_with(mount + " ")) continue;
    const std::string options = "," + line.substr(line.rfind(' ') + 1) + ",";
    return options.find(",huge=always,") != std::string::npos ||
           options.find(",huge=within_size,") != std::string::npos ||
           options.find(",huge=advise,") != std::string::npos;
  }
  return word != "[never]";
}

bool is_from_before_start(int fd) {
  struct stat info {};
  timespec now{}, up{};
  if (fstat(fd, &info) != 0 || clock_gettime(CLOCK_REALTIME, &now) != 0 || clock_gettime(CLOCK_BOOTTIME, &up) != 0)
    return false;
  return info.st_mtim.tv_sec < now.tv_sec - up.tv_sec - 60;
}

static std::string first_line(const char* path) {
  std::ifstream in(path);
  std::string out;
  std::getline(in, out);
  out.resize(std::min<size_t>(out.size(), arena::kTextBytes - 1));
  return out;
}

std::string boot_id() { return first_line("/proc/sys/kernel/random/boot_id"); }
std::string machine_id() { return first_line("/etc/machine-id"); }

}  // namespace cairn::ckpt
