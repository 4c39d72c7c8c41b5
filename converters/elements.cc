#include "converters/elements.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/core/check.h"

namespace cairn::convert {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float of_e4m3(uint8_t bits) {
  const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return kNan;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                               : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10));
}

float of_e5m2(uint8_t bits) { return f16_to_f32(static_cast<uint16_t>(bits << 8)); }  // the upper half of an IEEE half

float of_e8m0(uint8_t bits) { return bits == 255 ? kNan : std::ldexp(1.0f, bits - 127); }

using Table = std::array<float, 256>;
template <float (*Of)(uint8_t)>
const Table& table_of() {
  static const Table kTable = [] {
    Table out{};
    for (size_t k = 0; k < out.size(); ++k) out[k] = Of(static_cast<uint8_t>(k));
    return out;
  }();
  return kTable;
}

void look_up(const Table& table, const std::byte* in, int64_t count, float* out) {
  for (int64_t k = 0; k < count; ++k) out[k] = table[static_cast<uint8_t>(in[k])];
}

template <typename T, typename Convert>
void each(const std::byte* in, int64_t count, float* out, Convert convert) {
  for (int64_t k = 0; k < count; ++k) {
    T x;
    std::memcpy(&x, in + k * static_cast<int64_t>(sizeof(T)), sizeof(T));
    out[k] = convert(x);
  }
}

/// Whether an element has all of its exponent's bits set.
template <typename Bits>
bool any_has(Bits exponent, std::span<const std::byte> elements) {
  constexpr size_t kAtOnce = 128;  // by a loop that has a length and no way out, which the compiler makes wide
  const auto* bits = reinterpret_cast<const Bits*>(elements.data());
  const size_t count = elements.size() / sizeof(Bits);
  Bits found = 0;
  size_t k = 0;
  for (; k + kAtOnce <= count; k += kAtOnce) {
    for (size_t j = 0; j < kAtOnce; ++j) found |= static_cast<Bits>((bits[k + j] & exponent) == exponent ? 1 : 0);
  }
  for (; k < count; ++k) found |= static_cast<Bits>((bits[k] & exponent) == exponent ? 1 : 0);
  return found != 0;
}

}  // namespace

bool is_float_dtype(std::string_view name) { return name == "F32" || name == "F16" || name == "BF16" || name == "F64"; }

bool is_fp8_dtype(std::string_view name) { return name == "F8_E4M3" || name == "F8_E5M2"; }

void to_floats(std::string_view dtype, const std::byte* in, int64_t count, float* out) {
  if (dtype == "F32") {
    std::memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
  } else if (dtype == "BF16") {
    each<uint16_t>(in, count, out, [](uint16_t x) { return to_f32(bf16{x}); });
  } else if (dtype == "F16") {
    each<uint16_t>(in, count, out, [](uint16_t x) { return f16_to_f32(x); });
  } else if (dtype == "F64") {
    each<double>(in, count, out, [](double x) { return static_cast<float>(x); });
  } else if (dtype == "F8_E4M3") {
    look_up(table_of<of_e4m3>(), in, count, out);
  } else if (dtype == "F8_E5M2") {
    look_up(table_of<of_e5m2>(), in, count, out);
  } else if (dtype == "F8_E8M0") {
    look_up(table_of<of_e8m0>(), in, count, out);
  } else {
    RT_CHECK(false, "{} is no dtype of weights", dtype);
  }
}

int64_t from_floats(DType dtype, std::span<const float> values, std::byte* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, values.data(), values.size_bytes());
    return -1;
  }
  auto* half = reinterpret_cast<uint16_t*>(out);
  if (dtype == DType::kBf16) {
    for (size_t k = 0; k < values.size(); ++k) half[k] = to_bf16(values[k]).bits;
    return -1;
  }
  RT_CHECK(dtype == DType::kF16, "weights are not written as {}", dtype_name(dtype));
  int64_t too_large = -1;
  for (size_t k = 0; k < values.size(); ++k) {
    half[k] = f32_to_f16(values[k]);
    if ((half[k] & 0x7fff) == 0x7c00 && !std::isinf(values[k]) && too_large < 0) too_large = static_cast<int64_t>(k);
  }
  return too_large;
}

bool any_not_finite(DType dtype, std::span<const std::byte> elements) {
  if (dtype == DType::kF32) return any_has<uint32_t>(0x7f800000, elements);
  RT_CHECK(dtype == DType::kBf16 || dtype == DType::kF16, "weights are not written as {}", dtype_name(dtype));
  return any_has<uint16_t>(dtype == DType::kBf16 ? 0x7f80 : 0x7c00, elements);
}

void transpose_into(const float* in, int64_t rows, int64_t columns, float* out, int64_t stride) {
  constexpr int64_t kSquare = 32;
  for (int64_t r0 = 0; r0 < rows; r0 += kSquare) {
    for (int64_t c0 = 0; c0 < columns; c0 += kSquare) {
      for (int64_t c = c0; c < std::min(columns, c0 + kSquare); ++c) {
        for (int64_t r = r0; r < std::min(rows, r0 + kSquare); ++r) out[c * stride + r] = in[r * columns + c];
      }
    }
  }
}

}  // namespace cairn::convert
