#include "converters/gguf_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "converters/elements.h"
#include "runtime/core/dtype.h"

namespace cairn::convert {
namespace {

enum : uint32_t { kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7, kText = 8, kArray = 9 };

template <class T>
void add(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void add_text(std::string& to, std::string_view text) {
  add(to, static_cast<uint64_t>(text.size()));
  to += text;
}

}  // namespace

std::string_view gguf_type_name(GgufType type) {
  switch (type) {
    case GgufType::kF32:
      return "f32";
    case GgufType::kF16:
      return "f16";
    case GgufType::kBf16:
      return "bf16";
    case GgufType::kQ8_0:
      return "q8_0";
  }
  return "?";
}

int64_t gguf_bytes(GgufType type, int64_t elems) {
  if (type == GgufType::kQ8_0) return elems / kQ8Group * kQ8GroupBytes;
  return elems * (type == GgufType::kF32 ? 4 : 2);
}

void GgufKeys::begin(std::string_view key, uint32_t type) {
  add_text(bytes_, key);
  add(bytes_, type);
  ++count_;
}
void GgufKeys::begin_array(std::string_view key, uint32_t type, uint64_t count) {
  begin(key, kArray);
  add(bytes_, type);
  add(bytes_, count);
}

void GgufKeys::put(std::string_view key, uint32_t value) {
  begin(key, kU32);
  add(bytes_, value);
}
void GgufKeys::put(std::string_view key, float value) {
  begin(key, kF32);
  add(bytes_, value);
}
void GgufKeys::put(std::string_view key, bool value) {
  begin(key, kBool);
  add(bytes_, static_cast<uint8_t>(value));
}
void GgufKeys::put(std::string_view key, std::string_view value) {
  begin(key, kText);
  add_text(bytes_, value);
}
void GgufKeys::put(std::string_view key, std::span<const std::string> values) {
  begin_array(key, kText, values.size());
  for (const std::string& value : values) add_text(bytes_, value);
}
void GgufKeys::put(std::string_view key, std::span<const int32_t> values) {
  begin_array(key, kI32, values.size());
  for (const int32_t value : values) add(bytes_, value);
}
void GgufKeys::put(std::string_view key, std::span<const float> values) {
  begin_array(key, kF32, values.size());
  for (const float value : values) add(bytes_, value);
}
void GgufKeys::put(std::string_view key, std::span<const bool> values) {
  begin_array(key, kBool, values.size());
  for (const bool value : values) add(bytes_, static_cast<uint8_t>(value));
}

std::string gguf_head(const GgufKeys& keys, std::span<const GgufTensor> tensors) {
  std::string out = "GGUF";
  add(out, uint32_t{3});
  add(out, static_cast<uint64_t>(tensors.size()));
  add(out, keys.count());
  out += keys.bytes();
  int64_t offset = 0;
  for (const GgufTensor& tensor : tensors) {
    add_text(out, tensor.name);
    add(out, static_cast<uint32_t>(tensor.shape.size()));
    for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size) {
      add(out, static_cast<uint64_t>(*size));
    }
    add(out, static_cast<uint32_t>(tensor.type));
    add(out, static_cast<uint64_t>(offset));
    offset += gguf_padded(gguf_bytes(tensor.type, count_elems(tensor.shape)));
  }
  out.resize(static_cast<size_t>(gguf_padded(std::ssize(out))));
  return out;
}

int64_t to_q8(std::span<const float> values, std::byte* out) {
  for (size_t at = 0; at < values.size(); at += kQ8Group, out += kQ8GroupBytes) {
    const std::span<const float> group = values.subspan(at, kQ8Group);
    float most = 0;
    for (size_t k = 0; k < group.size(); ++k) {
      if (!std::isfinite(group[k])) return static_cast<int64_t>(at + k);
      most = std::max(most, std::abs(group[k]));
    }
    const float scale = most / 127.0f, inverse = scale == 0 ? 0 : 1.0f / scale;
    if (from_floats(DType::kF16, std::span(&scale, 1), out) >= 0) return static_cast<int64_t>(at);
    for (size_t k = 0; k < group.size(); ++k) {
      const auto code = static_cast<int8_t>(std::round(group[k] * inverse));
      std::memcpy(out + 2 + k, &code, 1);
    }
  }
  return -1;
}

}  // namespace cairn::convert
