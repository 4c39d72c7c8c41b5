#include "tools/run/text.h"

#include <fmt/format.h>
#include <ctime>

#include <algorithm>

namespace cairn::tools {
namespace {

int64_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<int64_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int64_t diagonal = row[0];
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

std::string suggestion(std::string_view typed, const std::vector<std::string>& names) {
  const std::string* best = nullptr;
  int64_t best_distance = std::max<int64_t>(1, static_cast<int64_t>(typed.size()) / 3) + 1;
  for (const std::string& name : names) {
    const int64_t distance = edit_distance(typed, name);
    if (distance < best_distance) {
      best = &name;
      best_distance = distance;
    }
  }
  if (best != nullptr) return fmt::format("; did you mean `{}`?", *best);
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
