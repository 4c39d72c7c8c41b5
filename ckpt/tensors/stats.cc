#include "ckpt/tensors/stats.h"

#include <algorithm>
#include <cmath>

#include "ckpt/tensors/numbers.h"

namespace cairn::ckpt {

template <typename Value>
void StatsSum::add_piece(std::span<const Value> values) {
  const auto before = static_cast<long double>(sum_.finite());
  Value count = 0, total = 0, low = 0, high = 0;
  for (const Value x : values) {
    ++sum_.elements;
    if (x == 0) ++sum_.zeros;
    if (!std::isfinite(x)) {
      ++(std::isnan(x) ? sum_.nans : sum_.infs);
      continue;
    }
    low = count == 0 ? x : std::min(low, x);
    high = count == 0 ? x : std::max(high, x);
    total += x;
    ++count;
  }
  if (count == 0) return;
  const Value mean = total / count;
  Value squares = 0;
  for (const Value x : values) {
    if (std::isfinite(x)) squares += (x - mean) * (x - mean);
  }
  const long double added = count, apart = mean - mean_;
  sum_.min = before == 0 ? low : std::min<long double>(sum_.min, low);
  sum_.max = before == 0 ? high : std::max<long double>(sum_.max, high);
  mean_ += apart * added / (before + added);
  squares_ += squares + apart * apart * before * added / (before + added);
}

template void StatsSum::add_piece(std::span<const double>);
template void StatsSum::add_piece(std::span<const long double>);

TensorStats StatsSum::result() const {
  TensorStats out = sum_;
  if (out.finite() == 0) return out;
  out.mean = static_cast<double>(mean_);
  out.std = static_cast<double>(std::sqrt(squares_ / static_cast<long double>(out.finite())));
  return out;
}

Result<std::vector<TensorStats>> tensor_stats(CheckpointReader& reader, std::span<const int64_t> tensors,
                                              const StreamOptions& options, const StreamProgress& progress) {
  constexpr int64_t kPieceElems = 64 << 10;
  const Manifest& manifest = reader.manifest();
  const LoadPlanner planner(manifest);
  std::vector<StreamItem> items;
  int64_t done = 0, total = 0;
  for (const int64_t t : tensors) {
    items.push_back(stream_item(manifest, t, Box::whole(manifest.tensors[static_cast<size_t>(t)].shape)));
    total += items.back().bytes;
  }
  BoxStream stream(reader, planner, items, options);
  std::vector<TensorStats> out;
  std::vector<std::byte> bytes;
  std::vector<double> values;
  std::vector<long double> long_values;
  for (size_t i = 0; i < items.size(); ++i) {
    const StreamItem& item = items[i];
    const DType dtype = manifest.tensors[static_cast<size_t>(item.tensor)].dtype;
    StatsSum sum;
    for (int64_t at = 0; at < item.bytes;) {
      const int64_t elems = std::min(kPieceElems, (item.bytes - at) / item.elem_bytes);
      bytes.resize(static_cast<size_t>(elems * item.elem_bytes));
      RT_TRY(stream.copy(static_cast<int64_t>(i), at, bytes));
      if (outgrows_double(dtype)) {
        long_values.resize(static_cast<size_t>(elems));
        to_long_doubles(dtype, bytes, long_values);
        sum.add(long_values);
      } else {
        values.resize(static_cast<size_t>(elems));
        to_doubles(dtype, bytes, values);
        sum.add(values);
      }
      at += elems * item.elem_bytes;
      done += elems * item.elem_bytes;
      if (progress) progress(done, total);
    }
    out.push_back(sum.result());
  }
  return out;
}

}  // namespace cairn::ckpt
