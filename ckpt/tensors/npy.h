#pragma once
// A tensor, or a part of it, as NumPy's .npy (format 1.0, numpy.lib.format). Pure but for the sink.

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/persist/read.h"
#include "ckpt/tensors/box_stream.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

/// A part of a tensor as NumPy writes it: "0:10, :, -1". Ranges keep their dim, a single index drops it; dims that are
/// not named are whole; negative numbers count from the end.
struct Slice {
  Box box;
  Shape shape;  // without the dropped dims
};
/// An empty text is the whole tensor. Errors: kInvalidInput naming the part, the dim and what it has.
Result<Slice> parse_slice(std::string_view text, const Shape& shape);

/// NumPy has no bfloat16: that is written as float32, which holds it exactly.
DType npy_dtype(DType dtype);
/// Everything before the data.
std::string npy_header(DType dtype, const Shape& shape);

/// Writes header and data, piece by piece. Errors: those of reading and of the sink.
Status write_npy(CheckpointReader& reader, int64_t tensor, const Slice& slice, const StreamOptions& options,
                 const std::function<Status(std::span<const std::byte>)>& sink);

}  // namespace cairn::ckpt
