#include "tools/run/folder/text.h"

#include <fmt/format.h>

#include <ctime>

#include "dsl/words.h"

namespace cairn::tools {
std::string suggestion(std::string_view typed, const std::vector<std::string>& names) {
  if (const std::string near = dsl::nearest(typed, names); !near.empty())
    return fmt::format("; did you mean `{}`?", near);
  const std::string* best = nullptr;
  for (const std::string& name : names) {  // a beginning that only one name has
    if (typed.size() >= 2 && name.compare(0, typed.size(), typed) == 0) {
      if (best != nullptr) return {};
      best = &name;
    }
  }
  return best == nullptr ? std::string() : fmt::format("; did you mean `{}`?", *best);
}

std::string printable(std::string_view text, bool lines) {
  std::string out;
  for (size_t k = 0; k < text.size(); ++k) {
    const auto c = static_cast<unsigned char>(text[k]);
    const auto next = static_cast<unsigned char>(k + 1 < text.size() ? text[k + 1] : 0);
    const bool c1 = c == 0xc2 && next >= 0x80 && next < 0xa0;  // U+0080 to U+009F, of which U+009B begins a sequence
    if (c1) ++k;
    if (c1 || c == 0x7f || (c < 0x20 && !(lines && c == '\n'))) {
      out += fmt::format("\\x{:02x}", c1 ? next : c);
    } else {
      out += text[k];
    }
  }
  return out;
}

std::string time_text(int64_t unix_ms) {
  const auto seconds = static_cast<time_t>(unix_ms / 1000);
  std::tm parts{};
  if (gmtime_r(&seconds, &parts) == nullptr) return "?";
  char text[64];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

}  // namespace cairn::tools
