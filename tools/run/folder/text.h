#pragma once
// Texts for people, made of what somebody else has typed or written.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::tools {

/// ", did you mean `x`?" with the nearest of `names`, or nothing when none is near.
std::string suggestion(std::string_view typed, const std::vector<std::string>& names);

/// A text that somebody else has written, for a terminal: control characters as \x1b, so that they do nothing there.
/// UTF-8 stays; with `lines`, so do line breaks.
std::string printable(std::string_view text, bool lines = false);

/// "2026-01-01 10:00:00 UTC"
std::string time_text(int64_t unix_ms);

}  // namespace cairn::tools
