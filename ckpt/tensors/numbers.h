#pragma once
// Elements of any dtype as doubles and back: exact but for 64-bit integers beyond 2^53.

#include <cstddef>
#include <span>

#include "runtime/core/dtype.h"

namespace cairn::ckpt {

/// `bytes` holds out.size() elements, little endian, of any alignment.
void to_doubles(DType dtype, std::span<const std::byte> bytes, std::span<double> out);
/// Rounds to nearest, ties to even. Only for floating point dtypes (is_float).
void from_doubles(DType dtype, std::span<const double> values, std::span<std::byte> out);
bool is_float(DType dtype);

}  // namespace cairn::ckpt
