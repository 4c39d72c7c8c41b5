#pragma once
// The kernel's log of a host: which of its lines tell of a broken device, of a mistake of a program on one, or of
// memory that ran out. Format of /dev/kmsg: "priority,number,microseconds,flags;text", a record each read; another file
// in its place may have plain lines.
//
// Numbers of NVIDIA's driver ("NVRM: Xid (PCI:0000:3b:00): 79, ...") by its catalog; no line was seen on a broken
// device.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/agent/failure_class.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::agent {

/// Of one line, with or without kmsg's head. nullopt: it is of no matter to ranks.
std::optional<KernelFinding> find_in_kernel_line(std::string_view line);

/// An error of a GPU that the log tells.
struct Xid {
  int64_t number = 0;
  std::string pci;      // as the log writes it: "0000:3b:00"
  std::string words;    // "fallen off the bus"
  bool broken = false;  // of no use before a person has seen to it
  std::string text;     // the line
  bool operator==(const Xid&) const = default;
};

/// How long an Xid counts, unless the driver is loaded anew: a reset of a GPU alone leaves no line.
inline constexpr double kXidCountsS = 24 * 3600;

/// The last of each GPU and number that tells of a device, since the driver was last loaded. Of a log that is a device,
/// nothing older than kXidCountsS. Errors: kIo where it may not be read.
Result<std::vector<Xid>> xids_in(const std::filesystem::path& log);

/// /dev/kmsg, or what CAIRN_KERNEL_LOG names (a copy that a container may read; tests).
std::filesystem::path kernel_log_path();

class KernelLog {
 public:
  /// What comes from here on counts. A log that may not be read has nothing to tell.
  explicit KernelLog(const std::filesystem::path& path = kernel_log_path());

  /// The weightiest finding since skip(), or since this was made: a device, then memory, then a program.
  std::optional<KernelFinding> finding();
  /// Forgets what has come.
  void skip();

 private:
  void read_new();
  void take(std::string_view line);

  Fd fd_;
  bool records_ = false;  // a device: each read is one record
  std::string partial_;
  std::optional<KernelFinding> found_;
};

}  // namespace cairn::agent
