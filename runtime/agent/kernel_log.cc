#include "runtime/agent/kernel_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>

namespace cairn::agent {
namespace {

using Kind = KernelFinding::Kind;

struct Xid {
  int number;
  Kind kind;
};

// A device that is broken or has to be reset: 48 double-bit ECC error, 63 and 64 rows remapped or not, 74 NVLink, 79
// fallen off the bus, 92 many single-bit errors, 94 and 95 contained and uncontained ECC errors, 119 and 120 its system
// processor. What a program has done: 13 and 31 bad addresses, 43 stopped, 45 cleaned up.
constexpr std::array kXids = {Xid{13, Kind::kProgram}, Xid{31, Kind::kProgram}, Xid{43, Kind::kProgram},
                              Xid{45, Kind::kProgram}, Xid{48, Kind::kDevice},  Xid{63, Kind::kDevice},
                              Xid{64, Kind::kDevice},  Xid{74, Kind::kDevice},  Xid{79, Kind::kDevice},
                              Xid{92, Kind::kDevice},  Xid{94, Kind::kDevice},  Xid{95, Kind::kDevice},
                              Xid{119, Kind::kDevice}, Xid{120, Kind::kDevice}};

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

}  // namespace

std::optional<KernelFinding> find_in_kernel_line(std::string_view line) {
  const std::string_view text = without_head(line);
  if (const size_t xid = text.find("NVRM: Xid ("); xid != std::string_view::npos) {
    const size_t close = text.find("): ", xid);
    const std::optional<int64_t> number =
        close == std::string_view::npos ? std::nullopt : leading_number(text.substr(close + 3));
    const auto known = std::ranges::find_if(kXids, [&](const Xid& one) { return number == one.number; });
    if (known == kXids.end()) return std::nullopt;
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
