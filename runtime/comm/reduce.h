#pragma once
// The one sum and the one maximum of all engines, in a fixed order, so that every member of a group computes the same
// bits and a rerun computes them again.

#include <cstdint>
#include <string_view>

#include "runtime/comm/comm.h"

namespace cairn::comm {

/// out[i] = inputs[0][i] (+) inputs[1][i] (+) ... (+) inputs[n-1][i], folded in that order, for i in [0, count).
/// kTreeSum: neighbours are added first, then neighbouring sums, and so on; behind the largest power of two comes the
/// tree of the rest.
///
/// bf16 and f16 are folded in float32 and rounded once at the end; f32, f64 and i64 fold in their own type (i64 wraps).
/// A maximum hands a NaN on. `out` may be one of the inputs, and must not overlap one in part.
/// The dtype must be one that `check_reducible` accepts. Threads: pure.
void reduce_ordered(void* out, const void* const* inputs, int64_t n, int64_t count, DType dtype, ReduceOp op);

/// out[i] += inputs[0][i], then (+) inputs[1][i], ...: each of those is a tree sum of `tree` neighbours, which divides
/// n. `out` is none of the inputs; else as above.
void add_ordered(void* out, const void* const* inputs, int64_t n, int64_t tree, int64_t count, DType dtype);

/// kInvalidInput for a dtype that collectives do not add up.
Status check_reducible(DType dtype);

std::string_view reduce_op_name(ReduceOp op);

}  // namespace cairn::comm
