#pragma once

#include <cstddef>
#include <span>

namespace cairn::ckpt {

/// memcpy for payload that will not be looked at soon: the stores go past the cache, so the target's lines are not read
/// first. Reading, hashing and copying a GiB costs a third less than with memcpy. Source and target do not overlap.
/// Another thread or a device may look at the target only after a stream_fence().
void stream_copy(std::byte* to, std::span<const std::byte> from);

/// The same, and asks for what is read next: a line of `ahead`, which loses it, for each line copied. The wait for one
/// and the stores of the other then go on side by side.
void stream_copy(std::byte* to, std::span<const std::byte> from, std::span<const std::byte>& ahead);

/// Behind the last copy: such stores are ordered with nothing else.
void stream_fence();

}  // namespace cairn::ckpt
