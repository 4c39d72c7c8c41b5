#pragma once
// What the executor tells the watch, where one is linked: the functions are weak, and absent in a plain program.

#include <cstdint>

namespace cairn::simt {

[[gnu::weak]] void watch_launch(const void* kernel);
[[gnu::weak]] void watch_launch_end();
/// Memory that kernels may use from now on, with any content; and no longer.
[[gnu::weak]] void watch_memory(const void* begin, int64_t bytes, bool shared);
[[gnu::weak]] void forget_memory(const void* begin);

}  // namespace cairn::simt
