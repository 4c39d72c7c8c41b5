#include "runtime/text/byte_level.h"

#include <array>

#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

struct Alphabet {
  std::array<std::string, 256> character;
  std::array<int, 0x144> byte;  // of a code point, or -1
  Alphabet() {
    byte.fill(-1);
    char32_t other = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool plain = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      const char32_t c = plain ? static_cast<char32_t>(b) : other++;
      append_utf8(c, &character[static_cast<size_t>(b)]);
      byte[c] = b;
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet made;
  return made;
}

}  // namespace

std::string bytes_to_alphabet(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const char c : bytes) out += alphabet().character[static_cast<unsigned char>(c)];
  return out;
}

std::string alphabet_to_bytes(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size(); at += utf8_length(text[at])) {
    const char32_t c = utf8_at(text, at);
    const int byte = c < alphabet().byte.size() ? alphabet().byte[c] : -1;
    if (byte < 0) return std::string(text);
    out.push_back(static_cast<char>(byte));
  }
  return out;
}

}  // namespace cairn::text
