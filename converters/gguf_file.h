#pragma once
// A GGUF file, version 3: keys with values, infos of tensors, then their bytes. Little-endian.
//
//   "GGUF", u32 3, u64 tensors, u64 keys
//   each key: text, u32 type of the value, value; a text is u64 length and bytes
//   each tensor: text, u32 dims, u64 sizes fastest first, u32 type, u64 offset from the data's begin
//   zeros up to a multiple of 32; the tensors, each padded to 32
// Source: ggml docs/gguf.md.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/shape.h"

namespace cairn::convert {

static_assert(std::endian::native == std::endian::little);

enum class GgufType : uint32_t { kF32 = 0, kF16 = 1, kQ8_0 = 8, kBf16 = 30 };

/// "f32", "f16", "bf16", "q8_0".
std::string_view gguf_type_name(GgufType type);

/// Numbers of a block of Q8_0: a scale in f16, then an int8 for each.
inline constexpr int64_t kQ8Group = 32, kQ8GroupBytes = 34;

struct GgufTensor {
  std::string name;
  Shape shape;  // row-major; the file has the sizes in the other order
  GgufType type = GgufType::kF32;
};

/// Bytes of `elems` elements, for Q8_0 a multiple of kQ8Group.
int64_t gguf_bytes(GgufType type, int64_t elems);

inline constexpr int64_t kGgufAlignment = 32;
constexpr int64_t gguf_padded(int64_t bytes) { return (bytes + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment; }

/// Keys in the order in which they are put.
class GgufKeys {
 public:
  void put(std::string_view key, uint32_t value);
  void put(std::string_view key, float value);
  void put(std::string_view key, bool value);
  void put(std::string_view key, std::string_view value);
  void put(std::string_view key, const char* value) { put(key, std::string_view(value)); }
  void put(std::string_view key, std::span<const std::string> values);
  void put(std::string_view key, std::span<const int32_t> values);
  void put(std::string_view key, std::span<const float> values);
  void put(std::string_view key, std::span<const bool> values);

  uint64_t count() const { return count_; }
  const std::string& bytes() const { return bytes_; }

 private:
  void begin(std::string_view key, uint32_t type);
  void begin_array(std::string_view key, uint32_t type, uint64_t count);

  std::string bytes_;
  uint64_t count_ = 0;
};

/// All up to the tensors' bytes, which lie in the order given.
std::string gguf_head(const GgufKeys& keys, std::span<const GgufTensor> tensors);

/// Numbers in blocks of kQ8Group: the scale is the largest magnitude / 127, the codes are the numbers over it, rounded,
/// halves away from zero. values.size() is a multiple of kQ8Group. Returns the index of the first that is not finite or
/// has a scale beyond f16, or -1.
int64_t to_q8(std::span<const float> values, std::byte* out);

}  // namespace cairn::convert
