#pragma once
// Numbers that a device leaves for the host: pinned memory in which copies of a stream end. They may be read when the
// stream has been settled behind the last of these copies, and reading earlier is a mistake of ours that stops.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/device/stream.h"

namespace cairn {

template <typename T>
class HostNumbers {
 public:
  HostNumbers(Stream& stream, int64_t count) : stream_(&stream), numbers_(static_cast<size_t>(count)) {}

  int64_t size() const { return std::ssize(numbers_); }
  /// Where a copy that is ordered next ends.
  std::span<T> room(int64_t first, int64_t count) {
    RT_CHECK(first >= 0 && count >= 0 && first + count <= size(), "numbers [{}, +{}) of {}", first, count, size());
    ordered_at_ = stream_->settled();
    return std::span(numbers_).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  }
  std::span<T> room() { return room(0, size()); }
  std::span<const T> read() const {
    RT_CHECK(stream_->settled() > ordered_at_, "numbers of a device are read before its stream is settled");
    return numbers_;
  }

 private:
  Stream* stream_;
  std::vector<T> numbers_;
  int64_t ordered_at_ = 0;
};

}  // namespace cairn
