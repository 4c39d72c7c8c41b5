#include "runtime/core/count_text.h"

namespace cairn {

std::string plural(int64_t n, std::string_view one) {
  std::string out(one);
  if (n == 1) return out;
  const auto ends = [&](std::string_view tail) { return out.ends_with(tail); };
  const bool vowel_before_y = ends("ay") || ends("ey") || ends("oy") || ends("uy");
  if (ends("y") && !vowel_before_y) {
    out.replace(out.size() - 1, 1, "ies");
  } else {
    out += ends("s") || ends("x") || ends("ch") || ends("sh") ? "es" : "s";
  }
  return out;
}

std::string count_text(int64_t n, std::string_view one) { return std::to_string(n) + " " + plural(n, one); }

}  // namespace cairn
