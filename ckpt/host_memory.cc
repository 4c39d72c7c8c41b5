#include "ckpt/host_memory.h"

#include <algorithm>
#include <iterator>

namespace cairn::ckpt {

HostMemory common_memory(const HostMemory& a, const HostMemory& b) {
  HostMemory out{.incarnation = std::max(a.incarnation, b.incarnation), .whole = {}};
  std::ranges::set_intersection(a.whole, b.whole, std::back_inserter(out.whole));
  return out;
}

}  // namespace cairn::ckpt
