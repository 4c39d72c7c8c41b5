#pragma once
// UTF-8, as RFC 3629 has it.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cairn::text {

/// Offset of the first byte that is not well-formed UTF-8, or -1.
int64_t find_invalid_utf8(std::string_view text);

/// Bytes of the character whose first byte is `lead`, in well-formed text.
inline size_t utf8_length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

/// The character that begins at `at` of well-formed text.
char32_t utf8_at(std::string_view text, size_t at);

void append_utf8(char32_t character, std::string* out);

/// Length of the longest beginning of `text` that cuts no character in two.
size_t whole_characters(std::string_view text);

}  // namespace cairn::text
