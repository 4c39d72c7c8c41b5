#pragma once
// Numbers of command lines. CLI11 takes "nan" within any range, lets a whole number beyond 64 bits stop at the last
// one, makes -1 the largest of an unsigned type and reads 010 as eight. Every option that is a number has one of these.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

namespace cairn::tools {

/// The decimal number that `text` is, with nothing before or behind it; nullopt: it is none, or none that `Number`
/// holds.
template <typename Number>
std::optional<Number> number_of(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

/// For Option::transform(): the text is one decimal number from `low` to `high`, with nothing before or behind it.
/// `Number`: int64_t, uint64_t or double. The limits stand in the help and in docs/commands.md.
template <typename Number>
CLI::Validator number_in(Number low, Number high) {
  static_assert(std::is_same_v<Number, int64_t> || std::is_same_v<Number, uint64_t> || std::is_same_v<Number, double>);
  constexpr bool whole = std::is_integral_v<Number>;
  const std::string limits = fmt::format("{} to {}", low, high);
  return {[=](std::string& text) {
            const std::optional<Number> number = number_of<Number>(text);
            if (!number || !(*number >= low && *number <= high)) {
              return fmt::format("'{}': expected a {}number from {}", text, whole ? "whole " : "", limits);
            }
            if (whole) text = fmt::format("{}", *number);
            return std::string();
          },
          fmt::format("{} in [{}]", whole ? "INT" : "FLOAT",
                      high == std::numeric_limits<Number>::max() ? fmt::format("{} or more", low) : limits)};
}
inline CLI::Validator whole_number(int64_t low, int64_t high = std::numeric_limits<int64_t>::max()) {
  return number_in<int64_t>(low, high);
}

/// For Option::transform(): "256MiB", "1gb", "4096": the text becomes bytes from `low` to 2^63 - 1.
CLI::Validator size_in_bytes(int64_t low = 0);

}  // namespace cairn::tools
