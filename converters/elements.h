#pragma once
// Stored elements <-> floats. Dtypes of files go by their safetensors names, because files hold more kinds than DType
// knows: of eight bits there are E4M3 (1-4-3, bias 7, no infinities, NaN is S.1111.111), E5M2 (1-5-2, bias 15, IEEE)
// and the scale E8M0 (2^(n-127), NaN is 255), of four bits E2M1 (1-2-1, bias 1, all codes finite). Source: OCP 8-bit
// Floating Point Specification 1.0, OCP Microscaling 1.0.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "runtime/core/dtype.h"

namespace cairn::convert {

/// F32, F16, BF16, F64: numbers as they are.
bool is_float_dtype(std::string_view name);
/// F8_E4M3, F8_E5M2: numbers that need a scale.
bool is_fp8_dtype(std::string_view name);

/// `count` elements of a float, fp8 or F8_E8M0 dtype; F64 is rounded to float32. Memory may be unaligned.
void to_floats(std::string_view dtype, const std::byte* in, int64_t count, float* out);

/// The E4M3 code nearest to each number, ties to even; beyond +-448 that of +-448. Not for NaN.
void to_e4m3(std::span<const float> values, std::byte* out);

inline constexpr float kMaxE4m3 = 448.0f;

/// MXFP4: `groups` times kMxfp4Group numbers of E2M1, two a byte, the lower half first, times an E8M0 scale a group.
/// Returns the index of the first that is not finite, or -1.
int64_t from_mxfp4(const std::byte* codes, const std::byte* scales, int64_t groups, float* out);

inline constexpr int64_t kMxfp4Group = 32;

/// Rounds to nearest even into f32, bf16 or f16. Returns the index of the first finite number that f16 cannot hold, or
/// -1. `out` holds values.size() elements and is aligned to one.
int64_t from_floats(DType dtype, std::span<const float> values, std::byte* out);

/// Whether a NaN or an infinity is among these elements of f32, bf16 or f16, which are aligned.
bool any_not_finite(DType dtype, std::span<const std::byte> elements);

/// out[c * stride + r] = in[r * columns + c], in squares that the caches hold.
void transpose_into(const float* in, int64_t rows, int64_t columns, float* out, int64_t stride);

inline constexpr float kMaxF16 = 65504.0f;

}  // namespace cairn::convert
