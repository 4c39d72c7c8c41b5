#pragma once
// Memory that is there before it is written to, so that nobody waits for the kernel's zeros later.

#include <cstdint>

namespace cairn::ckpt {

/// Makes the pages of a mapping, writable ones, by several threads where there is much of it: one of them zeroes some 2
/// GB/s. `base` begins a page. 0, or the errno of the first part that could not be made (EINVAL: a kernel before 5.14).
int populate(void* base, int64_t bytes);

}  // namespace cairn::ckpt
