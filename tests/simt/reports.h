#pragma once
// What the build that a test is part of sees of kernels besides their results. The same tests are linked three times:
// with kernels as they are, under AddressSanitizer, and watched (watch.cc).

#include <cstdint>
#include <string>
#include <vector>

namespace cairn::simt {

enum class Build { kPlain, kAsan, kWatched };
Build build();

/// Faults of kernels since the last call, each once, with lines of their source. A plain build sees none.
///   kAsan     what AddressSanitizer says: "heap-buffer-overflow a.cu:3"
///   kWatched  "RACE in a block: written at a.cu:3, read at a.cu:5", "RACE of blocks: ...",
///             "OUTSIDE by 16 bytes: written at a.cu:3", "UNWRITTEN shared memory: read at a.cu:3"
std::vector<std::string> take_reports();

/// How a line of a kernel's source uses memory, of all launches since the last call. kWatched alone.
struct Traffic {
  std::string line;
  bool shared = false, written = false;
  int64_t requests = 0;  // of warps
  int64_t bytes = 0;     // that lanes asked for
  int64_t sectors = 0;   // of 32 bytes; of memory that is not shared
  int64_t turns = 0;     // of the banks, one a request where there is no conflict; of shared memory
  double used() const { return sectors == 0 ? 1 : static_cast<double>(bytes) / static_cast<double>(32 * sectors); }
};
std::vector<Traffic> take_traffic();

}  // namespace cairn::simt
