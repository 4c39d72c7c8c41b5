#pragma once
// Shapes and boxes. A box is the half-open index range [lo, hi) of each dim: the unit in which state is owned, saved,
// moved and loaded. No layout word (rank, tp, pp) appears here.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

using Shape = std::vector<int64_t>;

/// Number of elements; 1 for a scalar (no dims).
int64_t count_elems(const Shape& shape);
std::string to_string(const Shape& shape);  // "[2, 3]"

struct Box {
  std::vector<int64_t> lo, hi;

  static Box whole(const Shape& shape);
  bool is_whole(const Shape& shape) const;  // equal to whole(shape)
  int64_t dims() const { return static_cast<int64_t>(lo.size()); }
  int64_t extent(int64_t dim) const { return hi[dim] - lo[dim]; }
  Shape extents() const;
  int64_t count_elems() const;
  bool empty() const { return count_elems() == 0; }
  bool operator==(const Box&) const = default;
};

std::string to_string(const Box& box);  // "[0:2, 3:8]"

/// The common part; an empty box (count_elems() == 0) when they do not meet. Both need the same number of dims.
Box intersect(const Box& a, const Box& b);
bool contains(const Box& outer, const Box& inner);

/// Boxes that tile the row-major element range [begin, end) of a tensor of `shape`, in order; each is contiguous in it.
/// At most 2 * dims - 1 boxes. Source: own derivation (peel the ragged head and tail of each dim).
std::vector<Box> boxes_of_flat_range(const Shape& shape, int64_t begin, int64_t end);

/// Offset, in elements, of the box's first element in a row-major tensor of `shape`.
int64_t flat_offset(const Shape& shape, const std::vector<int64_t>& index);

}  // namespace cairn
