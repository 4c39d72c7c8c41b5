#pragma once
// A fuzz target is one file that defines LLVMFuzzerTestOneInput: whatever the bytes, it returns, or it has found a
// mistake of ours and aborts. Built by clang with CAIRN_FUZZ it becomes a libFuzzer program; in every build
// replay_main.cc drives it over its corpus and some thousand mutations.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace cairn::fuzz {

inline std::string_view text(const uint8_t* data, size_t size) { return {reinterpret_cast<const char*>(data), size}; }

/// Little-endian numbers off the front of an input; zeros behind its end.
class Feed {
 public:
  Feed(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return at_ >= size_; }
  uint64_t number(size_t bytes) {
    uint64_t out = 0;
    for (size_t i = 0; i < bytes && at_ < size_; ++i) out |= static_cast<uint64_t>(data_[at_++]) << (8 * i);
    return out;
  }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

/// `text` with patches of an input: (offset, bytes taken away, bytes put in).
inline std::string patched(std::string text, Feed feed) {
  while (!feed.empty()) {
    const size_t at = feed.number(2) % (text.size() + 1), away = feed.number(1) % 8;
    std::string in;
    for (size_t count = feed.number(1) % 16; count > 0; --count) in += static_cast<char>(feed.number(1));
    text.replace(at, std::min(away, text.size() - at), in);
  }
  return text;
}

}  // namespace cairn::fuzz
