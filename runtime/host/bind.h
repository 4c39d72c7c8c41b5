#pragma once
// A process on its cores, with memory of its node. Before it has other threads: they inherit both.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::host {

/// This process and its threads from now on. `cpus`: the system's numbers; none: it stays where it is. `numa`: the node
/// that its memory comes from as long as it has some; -1: as before. What the system refuses (another cpuset meanwhile,
/// a container without CAP_SYS_NICE) is left: this is for speed.
void bind_process(std::span<const int64_t> cpus, int64_t numa);

/// "0-7,64-71" of ascending numbers, and back. Errors: kInvalidInput.
std::string ranges_text(std::span<const int64_t> numbers);
Result<std::vector<int64_t>> numbers_in(std::string_view ranges);

}  // namespace cairn::host
