#include "ckpt/tensors/diff.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ckpt/tensors/numbers.h"

namespace cairn::ckpt {

bool matches(const TensorEntry& tensor, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return true;
  const std::string full = tensor.kind + "/" + tensor.name;
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return ::fnmatch(pattern.c_str(), tensor.name.c_str(), 0) == 0 || ::fnmatch(pattern.c_str(), full.c_str(), 0) == 0;
  });
}

namespace {

/// Elements `first`... of both sides. `bits`: same dtype, so that bits are compared, and a NaN equals itself.
template <typename Value>
void compare(std::span<const std::byte> a_bytes, std::span<const std::byte> b_bytes, std::span<const Value> a,
             std::span<const Value> b, bool bits, int64_t first, TensorDiff& out) {
  const size_t size = bits && !a.empty() ? a_bytes.size() / a.size() : 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool same = bits ? std::memcmp(a_bytes.data() + i * size, b_bytes.data() + i * size, size) == 0
                           : a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]));
    if (same) continue;
    ++out.differing;
    if (std::isnan(a[i]) || std::isnan(b[i])) {
      ++out.nans;
      continue;
    }
    const Value apart = a[i] == b[i] ? 0 : std::fabs(a[i] - b[i]);  // inf - inf; 0 and -0
    const Value larger = std::max(std::fabs(a[i]), std::fabs(b[i]));
    if (out.max_abs_at < 0 || apart > out.max_abs) {
      out.max_abs = apart;
      out.max_abs_at = first + static_cast<int64_t>(i);
    }
    if (larger > 0) {
      out.max_rel =
          std::max(out.max_rel, std::isinf(larger) ? (apart > 0 ? 1.0 : 0.0) : static_cast<double>(apart / larger));
    }
  }
}

/// A piece of a tensor's both sides; its memory is kept for the next one.
struct Piece {
  std::vector<std::byte> a_bytes, b_bytes;
  std::vector<double> a, b;
  std::vector<long double> a_long, b_long;

  void compare_as(DType dtype_a, DType dtype_b, size_t elems, int64_t first, TensorDiff& out) {
    const bool bits = dtype_a == dtype_b;
    if (bits && std::memcmp(a_bytes.data(), b_bytes.data(), a_bytes.size()) == 0) return;
    if (outgrows_double(dtype_a) || outgrows_double(dtype_b)) {
      a_long.resize(elems);
      b_long.resize(elems);
      to_long_doubles(dtype_a, a_bytes, a_long);
      to_long_doubles(dtype_b, b_bytes, b_long);
      return compare<long double>(a_bytes, b_bytes, a_long, b_long, bits, first, out);
    }
    a.resize(elems);
    b.resize(elems);
    to_doubles(dtype_a, a_bytes, a);
    to_doubles(dtype_b, b_bytes, b);
    compare<double>(a_bytes, b_bytes, a, b, bits, first, out);
  }
};

}  // namespace

Result<std::vector<TensorDiff>> diff_tensors(CheckpointReader& left, CheckpointReader& right,
                                             const DiffOptions& options) {
  constexpr int64_t kPieceElems = 64 << 10;
  const Manifest &a = left.manifest(), &b = right.manifest();
  const LoadPlanner plan_a(a), plan_b(b);
  std::vector<TensorDiff> out;
  std::vector<StreamItem> items_a, items_b;
  std::vector<size_t> of_item;
  int64_t done = 0, total = 0;
  for (size_t t = 0; t < a.tensors.size(); ++t) {
    const TensorEntry& tensor = a.tensors[t];
    if (!matches(tensor, options.only)) continue;
    TensorDiff diff{.left = static_cast<int64_t>(t), .right = plan_b.find(tensor.kind, tensor.name)};
    if (diff.right < 0) {
      diff.what = TensorDiff::What::kOnlyLeft;
    } else if (b.tensors[static_cast<size_t>(diff.right)].shape != tensor.shape) {
      diff.what = TensorDiff::What::kOtherShape;
    } else {
      items_a.push_back(stream_item(a, diff.left, Box::whole(tensor.shape)));
      items_b.push_back(stream_item(b, diff.right, Box::whole(tensor.shape)));
      diff.elements = count_elems(tensor.shape);
      total += items_a.back().bytes + items_b.back().bytes;
      of_item.push_back(out.size());
    }
    out.push_back(diff);
  }
  for (size_t t = 0; t < b.tensors.size(); ++t) {
    const TensorEntry& tensor = b.tensors[t];
    if (!matches(tensor, options.only) || plan_a.find(tensor.kind, tensor.name) >= 0) continue;
    out.push_back({.what = TensorDiff::What::kOnlyRight, .right = static_cast<int64_t>(t)});
  }

  BoxStream stream_a(left, plan_a, items_a, options.stream), stream_b(right, plan_b, items_b, options.stream);
  Piece piece;
  for (size_t i = 0; i < items_a.size(); ++i) {
    TensorDiff& diff = out[of_item[i]];
    const StreamItem &item_a = items_a[i], &item_b = items_b[i];
    const DType dtype_a = a.tensors[static_cast<size_t>(item_a.tensor)].dtype;
    const DType dtype_b = b.tensors[static_cast<size_t>(item_b.tensor)].dtype;
    for (int64_t first = 0; first < diff.elements;) {
      const auto elems = static_cast<size_t>(std::min(kPieceElems, diff.elements - first));
      piece.a_bytes.resize(elems * static_cast<size_t>(item_a.elem_bytes));
      piece.b_bytes.resize(elems * static_cast<size_t>(item_b.elem_bytes));
      RT_TRY(stream_a.copy(static_cast<int64_t>(i), first * item_a.elem_bytes, piece.a_bytes));
      RT_TRY(stream_b.copy(static_cast<int64_t>(i), first * item_b.elem_bytes, piece.b_bytes));
      piece.compare_as(dtype_a, dtype_b, elems, first, diff);
      first += static_cast<int64_t>(elems);
      done += static_cast<int64_t>(piece.a_bytes.size() + piece.b_bytes.size());
      if (options.progress) options.progress(done, total);
    }
    diff.what = diff.differing > 0 || dtype_a != dtype_b ? TensorDiff::What::kDiffers : TensorDiff::What::kEqual;
  }
  return out;
}

}  // namespace cairn::ckpt
