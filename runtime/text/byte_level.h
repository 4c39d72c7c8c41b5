#pragma once
// The alphabet of byte-level BPE: each byte as one printable character. 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF are
// themselves, the other 68 bytes, in ascending order, are U+0100, U+0101, ...
// Source: huggingface/tokenizers, src/pre_tokenizers/byte_level.rs; GPT-2's bytes_to_unicode.

#include <string>
#include <string_view>

namespace cairn::text {

std::string bytes_to_alphabet(std::string_view bytes);

/// Back; a text with a character outside the alphabet is returned as it is, as upstream does.
std::string alphabet_to_bytes(std::string_view text);

}  // namespace cairn::text
