#pragma once
// Marks that editors put before a text.

#include <array>
#include <string>
#include <string_view>
#include <utility>

namespace cairn {

/// Removes UTF-8's byte order mark from the start of `text`. Returns the name of another encoding that the first bytes
/// show, such as "UTF-16"; empty: none.
inline std::string_view skip_byte_order_mark(std::string& text) {
  using namespace std::string_view_literals;
  constexpr std::array kOthers = {std::pair("\xFF\xFE\0\0"sv, "UTF-32"sv), std::pair("\0\0\xFE\xFF"sv, "UTF-32"sv),
                                  std::pair("\xFF\xFE"sv, "UTF-16"sv), std::pair("\xFE\xFF"sv, "UTF-16"sv)};
  for (const auto& [mark, name] : kOthers) {
    if (text.starts_with(mark)) return name;
  }
  if (text.size() > 3 && (text[0] == 0) != (text[1] == 0) && (text[1] == 0) == (text[3] == 0)) return "UTF-16";
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  return {};
}

}  // namespace cairn
