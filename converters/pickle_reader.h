#pragma once
// The bytes of a pickle, for the two interpreters of them (unpickler.h, dist_metadata.h). A pickle is a program for a
// stack machine that may name any Python function and call it; both know a closed list of operations and names, look
// nothing up and call nothing.
// Source: CPython Lib/pickletools.py.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/core/result.h"

namespace cairn::convert {

/// Errors carry no place: whoever runs the pickle adds the byte of the operation (op_at).
class PickleReader {
 protected:
  static constexpr int64_t kMaxName = 64 << 10;

  explicit PickleReader(std::string_view text) : text_(text) {}

  static Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
  static Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

  int64_t size() const { return static_cast<int64_t>(text_.size()); }
  size_t op_at() const { return op_at_; }

  /// The next operation.
  Result<uint8_t> next() {
    op_at_ = at_;
    return byte();
  }
  Result<std::string_view> take(uint64_t bytes) {
    if (bytes > text_.size() - at_) return corrupt("the pickle is cut short");
    const std::string_view out = text_.substr(at_, bytes);
    at_ += bytes;
    return out;
  }
  Result<uint8_t> byte() {
    RT_TRY_SET(const std::string_view one, take(1));
    return static_cast<uint8_t>(one[0]);
  }
  /// Little-endian, of at most 8 bytes.
  Result<uint64_t> number(int bytes) {
    RT_TRY_SET(const std::string_view raw, take(static_cast<uint64_t>(bytes)));
    uint64_t out = 0;
    for (int k = 0; k < bytes; ++k) out |= static_cast<uint64_t>(static_cast<uint8_t>(raw[k])) << (8 * k);
    return out;
  }
  /// Up to a newline, which is taken too.
  Result<std::string_view> line() {
    const size_t end = text_.find('\n', at_);
    if (end == text_.npos || end - at_ > static_cast<size_t>(kMaxName)) return corrupt("a name has no end");
    const std::string_view out = text_.substr(at_, end - at_);
    at_ = end + 1;
    return out;
  }

 private:
  std::string_view text_;
  size_t at_ = 0, op_at_ = 0;
};

/// For messages: what may be shown of foreign text.
inline std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 120)) out += c >= 0x20 && c < 0x7f ? c : '?';
  return out;
}

}  // namespace cairn::convert
