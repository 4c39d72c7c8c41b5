#pragma once
// CRC-32C, and the form of it that TFRecord files have: TensorBoard's events are such files.

#include <cstdint>
#include <string_view>

namespace cairn {

/// Castagnoli's polynomial, reflected. Source: RFC 3720, B.4.
uint32_t crc32c(std::string_view bytes);
/// TFRecord's, of a length or a record. Source: TensorFlow, core/lib/hash/crc32c.h.
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace cairn
