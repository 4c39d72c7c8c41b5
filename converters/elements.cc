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

// Of the E2M1 codes 0 to 15.
constexpr std::array<float, 16> kE2m1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

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

void to_e4m3(std::span<const float> values, std::byte* out) {
  // In float32's bits a normal number is rounded at the last of three mantissa bits; 960 is the difference of the
  // biases, 120, above them. Below 2^-6 the steps are all 2^-9, as those of float32 are from 2^14 on.
  constexpr float kSteps = 0x1p14f;
  constexpr auto kStepsBits = std::bit_cast<int32_t>(kSteps), kLeastNormal = std::bit_cast<int32_t>(0x1p-6f),
                 kMost = std::bit_cast<int32_t>(kMaxE4m3);
  constexpr size_t kAtOnce = 64;  // loops that have a length and no way out, which the compiler makes wide
  std::array<int32_t, kAtOnce> bits{}, sizes{};
  std::array<float, kAtOnce> sums{};
  while (!values.empty()) {
    const size_t count = std::min(values.size(), kAtOnce);
    std::memcpy(bits.data(), values.data(), count * sizeof(float));
    for (size_t k = 0; k < kAtOnce; ++k) sizes[k] = std::min(bits[k] & 0x7fffffff, kMost);
    for (size_t k = 0; k < kAtOnce; ++k) sums[k] = std::bit_cast<float>(sizes[k]) + kSteps;
    for (size_t k = 0; k < kAtOnce; ++k) {
      const int32_t normal = ((sizes[k] + 0x7ffff + ((sizes[k] >> 20) & 1)) >> 20) - 960;
      const int32_t small = std::bit_cast<int32_t>(sums[k]) - kStepsBits;
      sizes[k] = (sizes[k] < kLeastNormal ? small : normal) | ((bits[k] >> 24) & 0x80);
    }
    std::array<std::byte, kAtOnce> codes{};
    for (size_t k = 0; k < kAtOnce; ++k) codes[k] = static_cast<std::byte>(sizes[k]);
    std::memcpy(out, codes.data(), count);
    values = values.subspan(count);
    out += count;
  }
}

int64_t from_mxfp4(const std::byte* codes, const std::byte* scales, int64_t groups, float* out) {
  constexpr int64_t kBytes = kMxfp4Group / 2;
  int64_t bad = -1;
  for (int64_t g = 0; g < groups; ++g, codes += kBytes, out += kMxfp4Group) {
    const float scale = of_e8m0(static_cast<uint8_t>(scales[g]));
    for (int64_t k = 0; k < kBytes; ++k) {
      const auto byte = static_cast<uint8_t>(codes[k]);
      out[2 * k] = kE2m1[byte & 15] * scale;
      out[2 * k + 1] = kE2m1[byte >> 4] * scale;
    }
    if (static_cast<uint8_t>(scales[g]) < 253 || bad >= 0) continue;  // 6 * 2^125 is finite
    for (int64_t k = 0; k < kMxfp4Group && bad < 0; ++k) {
      if (!std::isfinite(out[k])) bad = g * kMxfp4Group + k;
    }
  }
  return bad;
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
