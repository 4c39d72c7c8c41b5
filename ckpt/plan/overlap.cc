#include "ckpt/plan/overlap.h"

#include <fmt/format.h>

#include <algorithm>

namespace cairn::ckpt {

bool inside(const Box& box, const Shape& shape) {
  if (box.lo.size() != shape.size() || box.hi.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (box.lo[d] < 0 || box.lo[d] > box.hi[d] || box.hi[d] > shape[d]) return false;
  }
  return true;
}

bool meet(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.lo.size(); ++d) {
    if (std::max(a.lo[d], b.lo[d]) >= std::min(a.hi[d], b.hi[d])) return false;
  }
  return true;
}

Result<std::vector<CopyRows>> overlap_rows(const Box& saved, const Box& wanted, const Shape& global, DType dtype) {
  for (const Box* box : {&saved, &wanted}) {
    if (!inside(*box, global)) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{} box {} is not a box of a tensor of shape {}", box == &saved ? "saved" : "wanted",
                               to_string(*box), to_string(global))};
    }
  }
  std::vector<CopyRows> copies;
  if (!meet(saved, wanted)) return copies;
  const Box common = intersect(saved, wanted);
  const int64_t dims = common.dims();

  const auto whole = [&](int64_t d) {
    return common.extent(d) == saved.extent(d) && common.extent(d) == wanted.extent(d);
  };

  // A row covers dims [first, dims): the common box is whole, in both boxes, in all dims inside `first`.
  int64_t first = dims;
  int64_t row_elems = 1;
  while (first > 0) {
    --first;
    row_elems *= common.extent(first);
    if (!whole(first)) break;
  }
  std::vector<int64_t> source_stride(dims, 1), target_stride(dims, 1);
  for (int64_t d = dims - 2; d >= 0; --d) {
    source_stride[d] = source_stride[d + 1] * saved.extent(d + 1);
    target_stride[d] = target_stride[d + 1] * wanted.extent(d + 1);
  }
  const int64_t size = dtype_size_bytes(dtype);
  CopyRows copy{.bytes = row_elems * size};
  // Rows lie over dims [outer, first). A dim of one index adds none, so the distance is that of the next one outside.
  int64_t outer = first;
  while (outer > 0) {
    --outer;
    if (common.extent(outer) > 1 && copy.rows == 1) {
      copy.source_stride = source_stride[outer] * size;
      copy.target_stride = target_stride[outer] * size;
    }
    copy.rows *= common.extent(outer);
    if (copy.rows > 1 && !whole(outer)) break;
  }
  int64_t count = 1, source = 0, target = 0;
  for (int64_t d = 0; d < dims; ++d) {
    source += (common.lo[d] - saved.lo[d]) * source_stride[d];
    target += (common.lo[d] - wanted.lo[d]) * target_stride[d];
    if (d < outer) count *= common.extent(d);
  }
  copies.reserve(count);
  std::vector<int64_t> at(outer, 0);
  for (;;) {
    copy.source_offset = source * size;
    copy.target_offset = target * size;
    copies.push_back(copy);
    int64_t d = outer - 1;
    for (; d >= 0; --d) {  // the odometer over the outer dims
      source += source_stride[d];
      target += target_stride[d];
      if (++at[d] < common.extent(d)) break;
      source -= common.extent(d) * source_stride[d];
      target -= common.extent(d) * target_stride[d];
      at[d] = 0;
    }
    if (d < 0) return copies;
  }
}

}  // namespace cairn::ckpt
