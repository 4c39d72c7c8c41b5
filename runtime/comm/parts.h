#pragma once
// What the engines' all_to_all have in common: parts are checked, counted by peer and walked as streams of bytes.

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/comm/group.h"

namespace cairn::comm {

/// kInvalidInput for a negative size, a peer outside of the group, and peers that do not ascend.
template <typename Part>
Status check_parts(const Site& site, std::span<const Part> parts, int64_t size) {
  int64_t before = 0;
  for (const Part& part : parts) {
    RT_TRY(check_bytes(site, part.bytes));
    RT_TRY(check_peer(site, "peer", part.peer, size));
    if (part.peer < before) {
      return Error{ErrorCode::kInvalidInput, site.text() + ": the parts are not in the order of their peers"};
    }
    before = part.peer;
  }
  return {};
}

/// Bytes of the parts of each peer.
template <typename Part>
void count_parts(std::span<const Part> parts, std::span<int64_t> bytes_of) {
  std::fill(bytes_of.begin(), bytes_of.end(), 0);
  for (const Part& part : parts) bytes_of[static_cast<size_t>(part.peer)] += part.bytes;
}

/// The parts of one peer.
template <typename Part>
std::span<const Part> parts_of(std::span<const Part> parts, int64_t peer) {
  const auto first = std::ranges::lower_bound(parts, peer, {}, &Part::peer);
  const auto end = std::ranges::upper_bound(parts, peer, {}, &Part::peer);
  return {first, end};
}

/// A place in the stream that parts make one after another.
template <typename Part>
class PartCursor {
 public:
  PartCursor() = default;
  explicit PartCursor(std::span<const Part> parts) : parts_(parts) {}

  /// Moves the next `bytes` between the parts and `other`: out of outgoing parts, into incoming ones.
  template <typename Char>
  void move(Char* other, int64_t bytes) {
    while (bytes > 0) {
      const Part& part = parts_[index_];
      const int64_t n = std::min(bytes, part.bytes - at_);
      if constexpr (std::is_same_v<Part, OutPart>) {
        if (n > 0) std::memcpy(other, static_cast<const char*>(part.data) + at_, static_cast<size_t>(n));
      } else {
        if (n > 0) std::memcpy(static_cast<char*>(part.data) + at_, other, static_cast<size_t>(n));
      }
      other += n, bytes -= n, at_ += n;
      if (at_ == part.bytes) ++index_, at_ = 0;
    }
  }

 private:
  std::span<const Part> parts_;
  size_t index_ = 0;
  int64_t at_ = 0;
};

/// What a rank sends to itself. Both sides must have the same bytes.
inline void move_own(std::span<const OutPart> out, std::span<const InPart> in) {
  PartCursor<InPart> to(in);
  for (const OutPart& part : out) to.move(static_cast<const char*>(part.data), part.bytes);
}

/// The message when a peer sends other sizes than this rank takes.
inline Error sizes_differ(const Site& site, int64_t world_rank, int64_t sent, int64_t expected) {
  return Error{ErrorCode::kInternal, site.text() + ": rank " + std::to_string(world_rank) + " sends " +
                                         std::to_string(sent) + " bytes, this rank expects " +
                                         std::to_string(expected)};
}

}  // namespace cairn::comm
