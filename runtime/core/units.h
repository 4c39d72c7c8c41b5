#pragma once
// Numbers and amounts of bytes, for people.

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn {

/// "1.50 GiB", "312 KiB", "17 B".
std::string format_bytes(int64_t bytes);
/// "3.15M", "472B", "1.2T", "950": three significant digits, decimal.
std::string format_count(double count);

/// "80GiB", "40GB", "512MiB" or a plain number. Errors: kInvalidInput.
Result<int64_t> parse_bytes(std::string_view text);

}  // namespace cairn
