#pragma once
// Elements of any dtype as doubles and back: exact but for 64-bit integers beyond 2^53. As long doubles, which have 64
// digits and more range on x86-64: exact for all, and so are differences of integers.

#include <cstddef>
#include <span>

#include "runtime/core/dtype.h"

namespace cairn::ckpt {

/// `bytes` holds out.size() elements, little endian, of any alignment.
void to_doubles(DType dtype, std::span<const std::byte> bytes, std::span<double> out);
void to_long_doubles(DType dtype, std::span<const std::byte> bytes, std::span<long double> out);
/// Whether doubles lose digits of its elements, or range where two of them are subtracted or squared.
bool outgrows_double(DType dtype);
/// Rounds to nearest, ties to even. Only for floating point dtypes (is_float).
void from_doubles(DType dtype, std::span<const double> values, std::span<std::byte> out);
bool is_float(DType dtype);

}  // namespace cairn::ckpt
