#include "runtime/core/shape.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/core/check.h"

namespace cairn {

int64_t count_elems(const Shape& shape) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return n;
}

std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Box Box::whole(const Shape& shape) { return Box{std::vector<int64_t>(shape.size(), 0), shape}; }

bool Box::is_whole(const Shape& shape) const {
  return hi == shape && lo.size() == shape.size() &&
         std::all_of(lo.begin(), lo.end(), [](int64_t b) { return b == 0; });
}

Shape Box::extents() const {
  Shape shape(lo.size());
  for (size_t d = 0; d < lo.size(); ++d) shape[d] = hi[d] - lo[d];
  return shape;
}

int64_t Box::count_elems() const {
  int64_t n = 1;
  for (size_t d = 0; d < lo.size(); ++d) n *= std::max<int64_t>(0, hi[d] - lo[d]);
  return n;
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.lo.size(); ++d) text += fmt::format("{}{}:{}", d ? ", " : "", box.lo[d], box.hi[d]);
  return text + "]";
}

Box intersect(const Box& a, const Box& b) {
  RT_CHECK(a.dims() == b.dims(), "{} and {}", to_string(a), to_string(b));
  Box out = a;
  for (size_t d = 0; d < a.lo.size(); ++d) {
    out.lo[d] = std::max(a.lo[d], b.lo[d]);
    out.hi[d] = std::max(out.lo[d], std::min(a.hi[d], b.hi[d]));
  }
  return out;
}

bool contains(const Box& outer, const Box& inner) {
  if (outer.dims() != inner.dims()) return false;
  for (size_t d = 0; d < outer.lo.size(); ++d) {
    if (inner.lo[d] < outer.lo[d] || inner.hi[d] > outer.hi[d]) return false;
  }
  return true;
}

namespace {

// Tiles [begin, end) of the sub-tensor of dims d.., whose outer indices are fixed in `prefix`.
void tile(const Shape& shape, size_t d, int64_t begin, int64_t end, const std::vector<int64_t>& prefix,
          std::vector<Box>& out) {
  if (begin >= end) return;
  int64_t inner = 1;
  for (size_t k = d + 1; k < shape.size(); ++k) inner *= shape[k];
  const auto emit = [&](int64_t lo, int64_t hi) {
    if (lo >= hi) return;
    Box box;
    for (const int64_t index : prefix) {
      box.lo.push_back(index);
      box.hi.push_back(index + 1);
    }
    box.lo.push_back(lo);
    box.hi.push_back(hi);
    for (size_t k = d + 1; k < shape.size(); ++k) {
      box.lo.push_back(0);
      box.hi.push_back(shape[k]);
    }
    out.push_back(std::move(box));
  };
  const auto descend = [&](int64_t row, int64_t from, int64_t to) {
    std::vector<int64_t> deeper = prefix;
    deeper.push_back(row);
    tile(shape, d + 1, from, to, deeper, out);
  };
  const int64_t first = begin / inner, last = end / inner;
  if (first == last) {  // inside one row
    descend(first, begin - first * inner, end - first * inner);
    return;
  }
  const int64_t full_from = (begin % inner == 0) ? first : first + 1;
  if (full_from != first) descend(first, begin - first * inner, inner);
  emit(full_from, last);
  if (end % inner != 0) descend(last, 0, end - last * inner);
}

}  // namespace

std::vector<Box> boxes_of_flat_range(const Shape& shape, int64_t begin, int64_t end) {
  RT_CHECK(0 <= begin && begin <= end && end <= count_elems(shape), "[{}, {}) of {}", begin, end, to_string(shape));
  std::vector<Box> out;
  if (begin == end) return out;
  if (shape.empty()) return {Box{}};
  tile(shape, 0, begin, end, {}, out);
  return out;
}

int64_t flat_offset(const Shape& shape, const std::vector<int64_t>& index) {
  int64_t offset = 0;
  for (size_t d = 0; d < shape.size(); ++d) offset = offset * shape[d] + index[d];
  return offset;
}

}  // namespace cairn
