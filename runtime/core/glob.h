#pragma once
// Patterns of tensor names, as recipes write them.

#include <string_view>

namespace cairn {

/// Whether `text` is of `pattern`: * stands for any characters, also dots and none, ? for one.
bool matches(std::string_view pattern, std::string_view text);

}  // namespace cairn
