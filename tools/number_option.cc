#include "tools/number_option.h"

#include <algorithm>

namespace cairn::tools {

CLI::Validator size_in_bytes(int64_t low) {
  return {[=](std::string& text) {
            const std::string given = text;
            constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
            int64_t number = 0;
            // The count by itself first: CLI11 wraps a negative one, and stops a large one at the last of 64 bits.
            const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
            const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
            const auto is_unit = [](char c) { return c == ' ' || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); };
            if (error == std::errc() && number >= 0 && std::ranges::all_of(unit, is_unit)) {
              try {
                text = fmt::format("{}{}", number, unit);  // CLI11 reads 010 as eight
                const std::string problem = CLI::AsSizeValue(true)(text);
                uint64_t bytes = 0;
                const auto [last, failed] = std::from_chars(text.data(), text.data() + text.size(), bytes);
                if (problem.empty() && failed == std::errc() && last == text.data() + text.size() &&
                    bytes >= static_cast<uint64_t>(low) && bytes <= static_cast<uint64_t>(kMost)) {
                  return std::string();
                }
              } catch (const CLI::Error&) {  // an unknown unit, or beyond 64 bits
              }
            }
            text = given;
            return fmt::format("'{}': expected a size such as 256MiB{}", given,
                               low > 0 ? fmt::format(", {} bytes or more", low) : "");
          },
          ""};
}

}  // namespace cairn::tools
