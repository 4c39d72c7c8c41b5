#include "runtime/data/split.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

namespace cairn::data {

Result<std::array<int64_t, 4>> split_bounds(const std::vector<double>& parts, int64_t count) {
  if (parts.empty()) return std::array<int64_t, 4>{0, count, count, count};
  if (parts.size() > 3)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("split has {} parts, expected at most 3: train, valid, test", parts.size())};
  double sum = 0;
  for (const double part : parts) {
    if (!(part >= 0) || !std::isfinite(part))
      return Error{ErrorCode::kInvalidInput, fmt::format("split part is {}, expected 0 or more", part)};
    sum += part;
  }
  if (!(sum > 0) || !std::isfinite(sum))
    return Error{ErrorCode::kInvalidInput, fmt::format("split parts sum to {}, expected more than 0", sum)};
  std::array<int64_t, 4> bounds = {};
  double running = 0;
  for (size_t k = 0; k < 3; ++k) {
    running += (k < parts.size() ? parts[k] : 0.0) / sum;
    // nearbyint rounds halves to even in the default mode, as Python's round does. The running sum may pass 1 by an
    // ulp.
    bounds[k + 1] = std::min(count, static_cast<int64_t>(std::nearbyint(running * static_cast<double>(count))));
  }
  return bounds;
}

Result<std::array<std::unique_ptr<TokenSource>, 3>> split_source(std::shared_ptr<const TokenSource> source,
                                                                 const std::vector<double>& parts) {
  const bool by_tokens = source->sequence_count() == 1;
  auto bounds = split_bounds(parts, by_tokens ? source->token_count() : source->sequence_count());
  if (!bounds.ok()) return std::move(bounds).error().with(source->name());
  std::array<std::unique_ptr<TokenSource>, 3> result;
  for (size_t k = 0; k < 3; ++k) {
    int64_t begin = bounds.value()[k], end = bounds.value()[k + 1];
    if (!by_tokens) {
      RT_TRY_SET(begin, source->sequence_start(begin));
      RT_TRY_SET(end, source->sequence_start(end));
    }
    if (begin < end) result[k] = slice_tokens(source, begin, end);
  }
  if (!result[0])
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{}: split {} of {} {} leaves nothing to train on", source->name(), fmt::join(parts, ","),
                    by_tokens ? source->token_count() : source->sequence_count(), by_tokens ? "tokens" : "documents")};
  return result;
}

}  // namespace cairn::data
