#pragma once

#include <cstddef>
#include <span>

namespace cairn::ckpt {

/// memcpy for payload that will not be looked at soon: the stores go past the cache, so the target's lines are not read
/// first. Reading, hashing and copying a GiB costs a third less than with memcpy. For targets of whole pages; source
/// and target do not overlap.
void stream_copy(std::byte* to, std::span<const std::byte> from);

}  // namespace cairn::ckpt
