#pragma once
// What a rank and its agent say to each other over the rendezvous socket: frames of one build, on one host.

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::comm {

enum class FrameKind : uint32_t {
  kPublish = 1,  // rank: this key gets this value
  kWant,         // rank: tell me this key's value, now or when there is one
  kValue,        // agent: this is it
  kMade,         // agent: the key published is new
  kTaken,        // agent: it had a value
};

struct Frame {
  FrameKind kind;
  std::string key, value;
};

/// Frames in a stream of bytes.
class FrameReader {
 public:
  static constexpr uint32_t kMostKeyBytes = 4096, kMostValueBytes = 16 << 20;

  void feed(std::string_view bytes) { bytes_.append(bytes); }

  /// The next one; nothing while it is not complete. Errors: kInternal for what is no frame.
  Result<std::optional<Frame>> next() {
    Header header;
    if (bytes_.size() - at_ < sizeof(header)) return none();
    std::memcpy(&header, bytes_.data() + at_, sizeof(header));
    if (header.kind < static_cast<uint32_t>(FrameKind::kPublish) ||
        header.kind > static_cast<uint32_t>(FrameKind::kTaken) || header.key_bytes > kMostKeyBytes ||
        header.value_bytes > kMostValueBytes) {
      return Error{ErrorCode::kInternal, "rendezvous socket: what came is not a frame of this build"};
    }
    if (bytes_.size() - at_ - sizeof(header) < size_t{header.key_bytes} + header.value_bytes) return none();
    const char* const key = bytes_.data() + at_ + sizeof(header);
    Frame out{static_cast<FrameKind>(header.kind), std::string(key, header.key_bytes),
              std::string(key + header.key_bytes, header.value_bytes)};
    at_ += sizeof(header) + header.key_bytes + header.value_bytes;
    return std::optional<Frame>(std::move(out));
  }

  static void append(std::string& to, FrameKind kind, std::string_view key, std::string_view value) {
    RT_CHECK(key.size() <= kMostKeyBytes && value.size() <= kMostValueBytes, "a rendezvous value of {} bytes",
             value.size());
    const Header header{static_cast<uint32_t>(kind), static_cast<uint32_t>(key.size()),
                        static_cast<uint32_t>(value.size())};
    to.append(reinterpret_cast<const char*>(&header), sizeof(header)).append(key).append(value);
  }

 private:
  struct Header {
    uint32_t kind, key_bytes, value_bytes;
  };

  std::optional<Frame> none() {
    bytes_.erase(0, at_);
    at_ = 0;
    return std::nullopt;
  }

  std::string bytes_;
  size_t at_ = 0;  // where the next frame begins
};

}  // namespace cairn::comm
