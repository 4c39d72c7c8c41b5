#include "runtime/core/dtype.h"

#include <array>
#include <string>
#include <utility>

namespace cairn {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int64_t size_bytes;
};
constexpr std::array<Row, 11> kRows = {{{DType::kF32, "f32", 4},
                                        {DType::kBf16, "bf16", 2},
                                        {DType::kF16, "f16", 2},
                                        {DType::kF64, "f64", 8},
                                        {DType::kU8, "u8", 1},
                                        {DType::kU16, "u16", 2},
                                        {DType::kU32, "u32", 4},
                                        {DType::kI8, "i8", 1},
                                        {DType::kI16, "i16", 2},
                                        {DType::kI32, "i32", 4},
                                        {DType::kI64, "i64", 8}}};

}  // namespace

int64_t dtype_size_bytes(DType dtype) { return kRows[static_cast<size_t>(dtype)].size_bytes; }
std::string_view dtype_name(DType dtype) { return kRows[static_cast<size_t>(dtype)].name; }

Result<DType> parse_dtype(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return Error{ErrorCode::kInvalidInput, fmt::format("unknown dtype \"{}\"", name)};
}

float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // subnormal: fraction * 2^-24, exact
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t f32_to_f16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 lets the FPU round at bit 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace cairn
