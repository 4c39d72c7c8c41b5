#include "ckpt/tensors/numbers.h"

#include <bit>
#include <cstring>
#include <limits>

#include "runtime/core/result.h"

namespace cairn::ckpt {

namespace {

static_assert(std::endian::native == std::endian::little, "payload is little endian and is read as it lies");

template <typename T, typename Wide, typename Convert>
void widen(std::span<const std::byte> bytes, std::span<Wide> out, Convert convert) {
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    out[i] = convert(value);
  }
}

template <typename T, typename Wide>
void widen(std::span<const std::byte> bytes, std::span<Wide> out) {
  widen<T>(bytes, out, [](T value) { return static_cast<Wide>(value); });
}

template <typename T, typename Convert>
void narrow(std::span<const double> values, std::span<std::byte> out, Convert convert) {
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = convert(values[i]);
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
}

/// double -> float so that a second rounding to fewer bits gives what one rounding would have: round to odd.
float to_odd_f32(double x) {
  const auto near = static_cast<float>(x);
  if (!(near - near == 0) || static_cast<double>(near) == x) return near;  // not finite, or exact
  // Toward zero, then the last bit set: it stands for "something was cut off".
  auto bits = std::bit_cast<uint32_t>(near);
  const bool beyond = (x > 0) == (static_cast<double>(near) > x);
  if (beyond) --bits;
  return std::bit_cast<float>(bits | 1U);
}

template <typename Wide>
void widen_all(DType dtype, std::span<const std::byte> bytes, std::span<Wide> out) {
  switch (dtype) {
    case DType::kF32:
      return widen<float>(bytes, out);
    case DType::kF64:
      return widen<double>(bytes, out);
    case DType::kBf16:
      return widen<uint16_t>(bytes, out, [](uint16_t bits) { return static_cast<Wide>(to_f32(bf16{bits})); });
    case DType::kF16:
      return widen<uint16_t>(bytes, out, [](uint16_t bits) { return static_cast<Wide>(f16_to_f32(bits)); });
    case DType::kU8:
      return widen<uint8_t>(bytes, out);
    case DType::kU16:
      return widen<uint16_t>(bytes, out);
    case DType::kU32:
      return widen<uint32_t>(bytes, out);
    case DType::kI8:
      return widen<int8_t>(bytes, out);
    case DType::kI16:
      return widen<int16_t>(bytes, out);
    case DType::kI32:
      return widen<int32_t>(bytes, out);
    case DType::kI64:
      return widen<int64_t>(bytes, out);
  }
}

static_assert(std::numeric_limits<long double>::digits >= 64 && std::numeric_limits<long double>::max_exponent > 2048);

}  // namespace

void to_doubles(DType dtype, std::span<const std::byte> bytes, std::span<double> out) { widen_all(dtype, bytes, out); }
void to_long_doubles(DType dtype, std::span<const std::byte> bytes, std::span<long double> out) {
  widen_all(dtype, bytes, out);
}

bool outgrows_double(DType dtype) { return dtype == DType::kI64 || dtype == DType::kF64; }

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kF16 || dtype == DType::kBf16;
}

void from_doubles(DType dtype, std::span<const double> values, std::span<std::byte> out) {
  switch (dtype) {
    case DType::kF32:
      return narrow<float>(values, out, [](double x) { return static_cast<float>(x); });
    case DType::kF64:
      return narrow<double>(values, out, [](double x) { return x; });
    case DType::kBf16:
      return narrow<uint16_t>(values, out, [](double x) { return to_bf16(to_odd_f32(x)).bits; });
    case DType::kF16:
      return narrow<uint16_t>(values, out, [](double x) { return f32_to_f16(to_odd_f32(x)); });
    default:
      RT_CHECK(false, "no rounding to {}", dtype_name(dtype));
  }
}

}  // namespace cairn::ckpt
