#include "runtime/core/units.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <system_error>
#include <utility>

namespace cairn {

std::string format_bytes(int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.{}f} {}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, kUnits[unit]);
}

std::string format_count(double count) {
  constexpr std::array<const char*, 7> kUnits = {"", "K", "M", "B", "T", "P", "E"};
  size_t unit = 0;
  while (count >= 999.5 && unit + 1 < kUnits.size()) {
    count /= 1000;
    ++unit;
  }
  if (unit == 0 && count == std::floor(count)) return fmt::format("{:.0f}", count);
  std::string text = fmt::format("{:.{}f}", count, count < 9.995 ? 2 : count < 99.95 ? 1 : 0);
  if (text.find('.') != std::string::npos) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
  }
  return text + kUnits[unit];
}

Result<int64_t> parse_bytes(std::string_view text) {
  constexpr std::pair<std::string_view, double> kUnits[] = {{"TiB", 1099511627776.0},
                                                            {"GiB", 1073741824.0},
                                                            {"MiB", 1048576.0},
                                                            {"KiB", 1024.0},
                                                            {"TB", 1e12},
                                                            {"GB", 1e9},
                                                            {"MB", 1e6},
                                                            {"kB", 1e3},
                                                            {"B", 1.0},
                                                            {"", 1.0}};
  double value = 0;  // no "0x10", no "nan"
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view unit = text.substr(static_cast<size_t>(end - text.data()));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  for (const auto& [name, bytes] : kUnits) {
    if (unit == name && failed == std::errc() && value > 0 && value * bytes < 9e18) {
      return static_cast<int64_t>(value * bytes);
    }
  }
  return Error{ErrorCode::kInvalidInput, fmt::format("{}: expected bytes, as 80GiB or 40GB", text)};
}

}  // namespace cairn
