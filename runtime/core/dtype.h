#pragma once
// Element types of tensors, in memory and in files.

#include <bit>
#include <cstdint>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn {

enum class DType : uint8_t { kF32, kBf16, kF16, kF64, kU8, kU16, kU32, kI8, kI16, kI32, kI64 };

int64_t dtype_size_bytes(DType dtype);

/// "f32", "bf16", ...: the spelling of manifests and tables.
std::string_view dtype_name(DType dtype);
Result<DType> parse_dtype(std::string_view name);

/// bfloat16: the upper half of an IEEE float32.
struct bf16 {
  uint16_t bits = 0;
};
static_assert(sizeof(bf16) == 2);

inline float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_f32(float x) { return x; }

/// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
inline bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

/// IEEE half <-> float32, round to nearest even.
float f16_to_f32(uint16_t half);
uint16_t f32_to_f16(float x);

/// IEEE half precision, as an element type; above 65504 it is infinite.
struct f16 {
  uint16_t bits = 0;
};
static_assert(sizeof(f16) == 2);

inline float to_f32(f16 x) { return f16_to_f32(x.bits); }
inline f16 to_f16(float x) { return f16{f32_to_f16(x)}; }

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBf16;
};
template <>
struct DTypeOf<f16> {
  static constexpr DType value = DType::kF16;
};

}  // namespace cairn
