#include "runtime/agent/kernel_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <ctime>

namespace cairn::agent {
namespace {

using Kind = KernelFinding::Kind;

struct KnownXid {
  int number;
  Kind kind;
  std::string_view words;
  bool broken = false;
};

// By NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors, Ampere and newer). Broken is what it resets the GPU or boots
// the host for; kProgram what it calls an error of the application. Errors of NVLink 5 (144 to 150) depend on bits of
// the message; what the driver makes of them it says as Xid 154.
constexpr std::array kXids = {KnownXid{11, Kind::kProgram, "bad commands of a program"},
                              KnownXid{13, Kind::kProgram, "error of a program"},
                              KnownXid{25, Kind::kProgram, "bad commands of a program"},
                              KnownXid{31, Kind::kProgram, "bad address of a program"},
                              KnownXid{43, Kind::kProgram, "stopped by a program"},
                              KnownXid{45, Kind::kProgram, "cleaned up behind a program"},
                              KnownXid{46, Kind::kDevice, "stopped", true},
                              KnownXid{48, Kind::kDevice, "uncorrected memory error", true},
                              KnownXid{62, Kind::kDevice, "its controller halted", true},
                              KnownXid{63, Kind::kDevice, "memory to be remapped"},
                              KnownXid{64, Kind::kDevice, "memory that could not be remapped", true},
                              KnownXid{69, Kind::kProgram, "bad commands of a program"},
                              KnownXid{74, Kind::kDevice, "NVLink error", true},
                              KnownXid{79, Kind::kDevice, "fallen off the bus", true},
                              KnownXid{92, Kind::kDevice, "many corrected memory errors"},
                              KnownXid{94, Kind::kDevice, "contained memory error"},
                              KnownXid{95, Kind::kDevice, "uncontained memory error", true},
                              KnownXid{109, Kind::kDevice, "does not change contexts", true},
                              KnownXid{110, Kind::kDevice, "security fault", true},
                              KnownXid{119, Kind::kDevice, "its system processor does not answer", true},
                              KnownXid{120, Kind::kDevice, "error of its system processor", true},
                              KnownXid{136, Kind::kDevice, "NVLink that could not be trained", true},
                              KnownXid{137, Kind::kProgram, "bad address of a program, over NVLink"},
                              KnownXid{140, Kind::kDevice, "memory error without recovery", true},
                              KnownXid{143, Kind::kDevice, "could not be initialized", true},
                              KnownXid{154, Kind::kDevice, "the driver asks for its recovery", true},
                              KnownXid{156, Kind::kDevice, "a part of it was retired, a reset is needed", true},
                              KnownXid{158, Kind::kDevice, "fatal timeout", true}};

// "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)".
constexpr int64_t kRecoveryXid = 154;
constexpr std::string_view kNoRecovery = " to 0x0 ";

constexpr std::string_view kXidHead = "NVRM: Xid (";
constexpr std::string_view kDriverLoaded = "NVRM: loading NVIDIA";

// Of the processor or its memory: what the kernel could not correct. Errors that it did correct are common.
constexpr std::array<std::string_view, 3> kMachineChecks = {"Uncorrected hardware", "Machine Check Exception",
                                                            "Memory failure: 0x"};

constexpr std::string_view kKilled = "Killed process ";

/// The number at the head of a text; nullopt: none.
std::optional<int64_t> leading_number(std::string_view text) {
  int64_t out = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), out);
  return failed == std::errc() ? std::optional(out) : std::nullopt;
}

std::string_view without_head(std::string_view line) {
  const size_t semicolon = line.find(';');
  if (semicolon == std::string_view::npos || !leading_number(line)) return line;
  const std::string_view head = line.substr(0, semicolon);
  return std::ranges::count(head, ',') >= 3 ? line.substr(semicolon + 1) : line;
}

/// What a line tells: the number, and what is known of it; nullptr: nothing, or that nothing needs recovery any more.
struct ToldXid {
  int64_t number = 0;
  const KnownXid* known = nullptr;
};
/// `text`: without kmsg's head. Number 0: it tells of none.
ToldXid xid_of(std::string_view text) {
  const size_t xid = text.find(kXidHead);
  const size_t close = xid == std::string_view::npos ? xid : text.find("): ", xid);
  if (close == std::string_view::npos) return {};
  const int64_t number = leading_number(text.substr(close + 3)).value_or(0);
  if (number == kRecoveryXid && text.find(kNoRecovery, close) != std::string_view::npos) return {number, nullptr};
  const auto known = std::ranges::find_if(kXids, [&](const KnownXid& one) { return number == one.number; });
  return {number, known == kXids.end() ? nullptr : &*known};
}

/// When a record of kmsg was written, in seconds of the monotonic clock; nullopt: it has no head.
std::optional<double> written_s(std::string_view line) {
  const size_t semicolon = line.find(';');
  std::string_view head = line.substr(0, semicolon == std::string_view::npos ? 0 : semicolon);
  for (int comma = 0; comma < 2; ++comma) {
    const size_t at = head.find(',');
    if (at == std::string_view::npos) return std::nullopt;
    head.remove_prefix(at + 1);
  }
  const std::optional<int64_t> us = leading_number(head);
  return us ? std::optional(static_cast<double>(*us) / 1e6) : std::nullopt;
}

}  // namespace

std::optional<KernelFinding> find_in_kernel_line(std::string_view line) {
  const std::string_view text = without_head(line);
  if (text.find(kXidHead) != std::string_view::npos) {
    const KnownXid* const known = xid_of(text).known;
    if (known == nullptr) return std::nullopt;
    int64_t pid = -1;
    if (const size_t at = text.find("pid="); at != std::string_view::npos)
      pid = leading_number(text.substr(at + 4)).value_or(-1);
    return KernelFinding{known->kind, pid, std::string(text)};
  }
  for (const std::string_view words : kMachineChecks) {
    if (text.find(words) != std::string_view::npos) return KernelFinding{Kind::kDevice, -1, std::string(text)};
  }
  const size_t killed = text.find(kKilled);
  if (killed != std::string_view::npos &&
      text.find("emory") < killed) {  // "Out of memory: ", "Memory cgroup out of .."
    return KernelFinding{Kind::kOutOfMemory, leading_number(text.substr(killed + kKilled.size())).value_or(-1),
                         std::string(text)};
  }
  return std::nullopt;
}

std::filesystem::path kernel_log_path() {
  const char* const log = std::getenv("CAIRN_KERNEL_LOG");
  return log != nullptr && *log != '\0' ? log : "/dev/kmsg";
}

Result<std::vector<Xid>> xids_in(const std::filesystem::path& log) {
  const Fd file(::open(log.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat info {};
  if (!file || ::fstat(file.get(), &info) != 0) return os_error(errno, "open").with(log.string());
  const bool records = S_ISCHR(info.st_mode);
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  std::vector<Xid> out;
  const auto take = [&](std::string_view line) {
    const std::string_view text = without_head(line);
    if (text.find(kDriverLoaded) != std::string_view::npos) out.clear();
    const auto [number, known] = xid_of(text);
    if (number == 0 || (known != nullptr && known->kind != Kind::kDevice)) return;
    const std::optional<double> at_s = written_s(line);
    if (records && at_s && static_cast<double>(now.tv_sec) - *at_s > kXidCountsS) return;
    const size_t begin = text.find(kXidHead) + kXidHead.size();
    std::string_view pci = text.substr(begin, text.find_first_of(" )", begin) - begin);  // behind a space: which MIG
    if (pci.starts_with("PCI:")) pci.remove_prefix(4);
    std::erase_if(out, [&, number = number](const Xid& one) { return one.number == number && one.pci == pci; });
    if (known == nullptr) return;
    out.push_back({known->number, std::string(pci), std::string(known->words), known->broken, std::string(text)});
  };
  std::array<char, 8192> bytes;
  std::string partial;
  for (int64_t reads = 0; reads < 1'000'000; ++reads) {  // 8 GB of a file, and more records than a log keeps
    const ssize_t n = ::read(file.get(), bytes.data(), bytes.size());
    if (n < 0 && (errno == EINTR || errno == EPIPE)) continue;
    if (n < 0 && errno != EAGAIN) return os_error(errno, "read").with(log.string());
    if (n <= 0) break;
    const std::string_view got(bytes.data(), static_cast<size_t>(n));
    if (records) {
      take(got.substr(0, got.find('\n')));
      continue;
    }
    partial += got;
    size_t done = 0;
    for (size_t end = 0; (end = partial.find('\n', done)) != std::string::npos; done = end + 1)
      take(std::string_view(partial).substr(done, end - done));
    partial.erase(0, done);
    if (partial.size() > (size_t{1} << 20)) partial.clear();  // no line of a log
  }
  take(partial);
  return out;
}

KernelLog::KernelLog(const std::filesystem::path& path) : fd_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
  struct stat info {};
  if (fd_ && ::fstat(fd_.get(), &info) == 0) records_ = S_ISCHR(info.st_mode);
  if (fd_) ::lseek(fd_.get(), 0, SEEK_END);
}

std::optional<KernelFinding> KernelLog::finding() {
  read_new();
  return found_;
}

void KernelLog::skip() {
  read_new();
  found_.reset();
}

void KernelLog::read_new() {
  std::array<char, 8192> bytes;  // a record of kmsg is shorter; else the read fails with EINVAL
  for (int64_t reads = 0; fd_ && reads < 10'000; ++reads) {
    const ssize_t n = ::read(fd_.get(), bytes.data(), bytes.size());
    if (n < 0 && (errno == EINTR || errno == EPIPE)) continue;  // EPIPE: records were overwritten before they were read
    if (n <= 0) return;
    const std::string_view got(bytes.data(), static_cast<size_t>(n));
    if (records_) {
      take(got.substr(0, got.find('\n')));  // then come properties of the device, each on a line
      continue;
    }
    partial_ += got;
    for (size_t end = 0; (end = partial_.find('\n')) != std::string::npos; partial_.erase(0, end + 1))
      take(std::string_view(partial_).substr(0, end));
  }
}

void KernelLog::take(std::string_view line) {
  std::optional<KernelFinding> one = find_in_kernel_line(line);
  if (!one) return;
  const auto weight = [](const KernelFinding& of) {
    return of.kind == Kind::kDevice ? 2 : of.kind == Kind::kOutOfMemory ? 1 : 0;
  };
  // The first of its weight, but of processes that were killed the last: it is asked for right after.
  if (!found_ || weight(*one) > weight(*found_) || (weight(*one) == 1 && weight(*found_) == 1)) found_ = std::move(one);
}

}  // namespace cairn::agent
