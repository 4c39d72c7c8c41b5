#pragma once
// The kernel's log of a host: which of its lines tell of a broken device, of a mistake of a program on one, or of
// memory that ran out. Format of /dev/kmsg: "priority,number,microseconds,flags;text", a record each read; another file
// in its place may have plain lines.
//
// Numbers of NVIDIA's driver ("NVRM: Xid (PCI:0000:3b:00): 79, ...") from memory, not checked against a device.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/agent/failure_class.h"
#include "runtime/core/unique_handle.h"

namespace cairn::agent {

/// Of one line, with or without kmsg's head. nullopt: it is of no matter to ranks.
std::optional<KernelFinding> find_in_kernel_line(std::string_view line);

class KernelLog {
 public:
  /// What comes from here on counts. A log that may not be read has nothing to tell.
  explicit KernelLog(const std::filesystem::path& path = "/dev/kmsg");

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
