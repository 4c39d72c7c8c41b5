#include "ckpt/tensors/npy.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

namespace cairn::ckpt {

namespace {

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::string_view npy_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kBf16:
      return "<f4";
    case DType::kF64:
      return "<f8";
    case DType::kF16:
      return "<f2";
    case DType::kU8:
      return "|u1";
    case DType::kU16:
      return "<u2";
    case DType::kU32:
      return "<u4";
    case DType::kI8:
      return "|i1";
    case DType::kI16:
      return "<i2";
    case DType::kI32:
      return "<i4";
    case DType::kI64:
      return "<i8";
  }
  return "|V1";
}

}  // namespace

Result<Slice> parse_slice(std::string_view text, const Shape& shape) {
  Slice out{Box::whole(shape), {}};
  std::vector<bool> dropped(shape.size(), false);
  const auto refuse = [&](std::string_view part, std::string why) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("slice \"{}\": \"{}\": {}; the tensor is {}, expected for example \"0:2, :, -1\"", text,
                             part, why, to_string(shape))};
  };
  std::string_view rest = text;
  for (size_t dim = 0; !trim(rest).empty(); ++dim) {
    const size_t comma = rest.find(',');
    const std::string_view part = trim(rest.substr(0, comma));
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    if (dim >= shape.size()) return refuse(part, fmt::format("the tensor has only {} dims", shape.size()));
    const int64_t size = shape[dim];
    const auto number = [&](std::string_view word) -> std::optional<int64_t> {
      word = trim(word);
      int64_t value = 0;
      const auto [end, failed] = std::from_chars(word.data(), word.data() + word.size(), value);
      if (failed != std::errc() || end != word.data() + word.size() || word.empty()) return std::nullopt;
      return value < 0 ? value + size : value;
    };
    const size_t colon = part.find(':');
    int64_t lo = 0, hi = size;
    if (colon == std::string_view::npos) {
      const std::optional<int64_t> index = number(part);
      if (!index) return refuse(part, "is no index and no range");
      if (*index < 0 || *index >= size) return refuse(part, fmt::format("dim {} has {} entries", dim, size));
      lo = *index;
      hi = *index + 1;
      dropped[dim] = true;
    } else {
      const std::string_view left = trim(part.substr(0, colon)), right = trim(part.substr(colon + 1));
      const std::optional<int64_t> from = left.empty() ? 0 : number(left), to = right.empty() ? size : number(right);
      if (!from || !to) return refuse(part, "is no range of two numbers; steps are not supported");
      if (*from < 0 || *to > size || *from >= *to)
        return refuse(part, fmt::format("is empty or leaves dim {}, which has {} entries", dim, size));
      lo = *from;
      hi = *to;
    }
    out.box.lo[dim] = lo;
    out.box.hi[dim] = hi;
  }
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (!dropped[dim]) out.shape.push_back(out.box.hi[dim] - out.box.lo[dim]);
  }
  return out;
}

DType npy_dtype(DType dtype) { return dtype == DType::kBf16 ? DType::kF32 : dtype; }

std::string npy_header(DType dtype, const Shape& shape) {
  std::string dims;
  for (const int64_t n : shape) dims += fmt::format("{},", n);
  if (shape.size() > 1) dims.pop_back();
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", npy_type(dtype), dims);
  constexpr size_t kPrefix = 10, kAlign = 64;  // magic, version, length; data begins at a multiple of 64
  text.append((kAlign - (kPrefix + text.size() + 1) % kAlign) % kAlign, ' ');
  text += '\n';
  const auto length = static_cast<uint16_t>(text.size());
  std::string out = "\x93NUMPY";
  out += '\x01';
  out += '\0';
  out += static_cast<char>(length & 0xff);
  out += static_cast<char>(length >> 8);
  return out + text;
}

Status write_npy(CheckpointReader& reader, int64_t tensor, const Slice& slice, const StreamOptions& options,
                 const std::function<Status(std::span<const std::byte>)>& sink) {
  constexpr int64_t kPieceElems = 256 << 10;
  const Manifest& manifest = reader.manifest();
  const DType dtype = manifest.tensors[static_cast<size_t>(tensor)].dtype, written = npy_dtype(dtype);
  const LoadPlanner planner(manifest);
  const std::vector<StreamItem> items = {stream_item(manifest, tensor, slice.box)};
  BoxStream stream(reader, planner, items, options);
  const std::string header = npy_header(dtype, slice.shape);
  RT_TRY(sink(std::as_bytes(std::span(header))));
  std::vector<std::byte> bytes, wide;
  for (int64_t at = 0; at < items[0].bytes;) {
    const int64_t elems = std::min(kPieceElems, (items[0].bytes - at) / items[0].elem_bytes);
    bytes.resize(static_cast<size_t>(elems * items[0].elem_bytes));
    RT_TRY(stream.copy(0, at, bytes));
    at += static_cast<int64_t>(bytes.size());
    if (written == dtype) {
      RT_TRY(sink(bytes));
      continue;
    }
    wide.assign(2 * bytes.size(), std::byte{0});  // the upper halves; arithmetic would change some NaNs
    for (size_t i = 0; i < bytes.size(); ++i) wide[i / 2 * 4 + 2 + i % 2] = bytes[i];
    RT_TRY(sink(wide));
  }
  return {};
}

}  // namespace cairn::ckpt
