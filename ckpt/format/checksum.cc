#include "ckpt/format/checksum.h"

#include <fmt/format.h>

// libxxhash carries AVX2 and AVX-512 versions behind this header, its static library does not; without it the
// compiler's baseline is used.
#if defined(__x86_64__) && !defined(CAIRN_STATIC_XXHASH)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

namespace cairn::ckpt {

uint64_t hash_bytes(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }
uint64_t hash_bytes(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct StreamingHash::State {
  XXH3_state_t* xxh = XXH3_createState();
  ~State() { XXH3_freeState(xxh); }
};

StreamingHash::StreamingHash() : state_(std::make_unique<State>()) { XXH3_64bits_reset(state_->xxh); }
StreamingHash::~StreamingHash() = default;
StreamingHash::StreamingHash(StreamingHash&&) noexcept = default;
StreamingHash& StreamingHash::operator=(StreamingHash&&) noexcept = default;

void StreamingHash::update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_->xxh, bytes.data(), bytes.size());
}

uint64_t StreamingHash::digest() const { return XXH3_64bits_digest(state_->xxh); }

std::string hash_to_hex(uint64_t hash) { return fmt::format("{:016x}", hash); }

std::optional<uint64_t> hash_from_hex(std::string_view hex) {
  if (hex.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char c : hex) {
    uint64_t digit = 0;
    if (c >= '0' && c <= '9') {
      digit = static_cast<uint64_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<uint64_t>(c - 'a') + 10;
    } else {
      return std::nullopt;
    }
    value = value << 4 | digit;
  }
  return value;
}

}  // namespace cairn::ckpt
