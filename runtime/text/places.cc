#include "runtime/text/places.h"

#include <algorithm>

namespace cairn::text {
namespace {

/// `before`: the ids of the bytes in front of the place, by themselves; `all`: of the complete part. They are alike up
/// to a token that the place cuts; from there on the bytes that both spell are counted.
Result<Place> place_in(const Tokenizer& tokenizer, std::span<const int32_t> before, std::span<const int32_t> all) {
  const auto alike = static_cast<size_t>(std::ranges::mismatch(before, all).in1 - before.begin());
  if (alike == before.size()) return Place{alike, alike};
  RT_TRY_SET(const std::string wanted, tokenizer.decode(before.subspan(alike)));
  Place out{alike, all.size()};
  for (size_t end = alike + 1; end <= all.size(); ++end) {
    RT_TRY_SET(const std::string spelled, tokenizer.decode(all.subspan(alike, end - alike)));
    if (spelled.size() <= wanted.size()) out.ended = end;
    if (spelled.size() < wanted.size()) continue;
    out.begun = end;
    break;
  }
  return out;
}

}  // namespace

Result<std::vector<Place>> encode_with_places(
    const Tokenizer& tokenizer, std::span<const TextPart> parts, std::span<const size_t> bytes,
    const std::function<Status(size_t begin, size_t end, std::vector<int32_t>* ids)>& encode,
    std::vector<int32_t>* ids) {
  const size_t first = ids->size();
  std::vector<Place> out;
  for (const TextPart& part : parts) {
    const size_t at = ids->size();
    for (; out.size() < bytes.size() && bytes[out.size()] <= part.begin;) out.push_back({at - first, at - first});
    if (part.id >= 0) {
      ids->push_back(part.id);
      for (; out.size() < bytes.size() && bytes[out.size()] < part.end;) {
        out.push_back({at - first, at + 1 - first});
      }
      continue;
    }
    RT_TRY(encode(part.begin, part.end, ids));
    for (; out.size() < bytes.size() && bytes[out.size()] < part.end;) {
      std::vector<int32_t> before;
      RT_TRY(encode(part.begin, bytes[out.size()], &before));
      RT_TRY_SET(const Place within, place_in(tokenizer, before, std::span(*ids).subspan(at)));
      out.push_back({at - first + within.ended, at - first + within.begun});
    }
  }
  out.resize(bytes.size(), {ids->size() - first, ids->size() - first});
  return out;
}

}  // namespace cairn::text
