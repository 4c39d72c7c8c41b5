#pragma once
// A number and its noun, for people.

#include <cstdint>
#include <string>
#include <string_view>

namespace cairn {

/// The noun of `n` things called `one`: "rank", "ranks"; "micro-batch", "micro-batches"; "copy", "copies".
std::string plural(int64_t n, std::string_view one);
/// "1 rank", "2 ranks", "0 ranks".
std::string count_text(int64_t n, std::string_view one);

}  // namespace cairn
