#pragma once
// Numbers that a device leaves for the host: pinned memory in which copies of a stream end. They may be read when the
// stream has been settled behind the last of these copies, and reading earlier is a mistake of ours that stops.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "runtime/core/check.h"
#include "runtime/device/stream.h"

namespace cairn {

template <typename T>
class HostNumbers {
 public:
  static_assert(std::is_trivially_copyable_v<T>);

  HostNumbers(Stream& stream, int64_t count)
      : stream_(&stream),
        memory_(stream.host_memory(count * static_cast<int64_t>(sizeof(T)))),
        numbers_(reinterpret_cast<T*>(memory_.get()), static_cast<size_t>(count)) {}
  HostNumbers(HostNumbers&&) noexcept = default;
  HostNumbers& operator=(HostNumbers&&) noexcept = default;
  HostNumbers(const HostNumbers&) = delete;
  HostNumbers& operator=(const HostNumbers&) = delete;

  int64_t size() const { return std::ssize(numbers_); }
  /// Where a copy that is ordered next ends.
  std::span<T> room(int64_t first, int64_t count) {
    RT_CHECK(first >= 0 && count >= 0 && first + count <= size(), "numbers [{}, +{}) of {}", first, count, size());
    ordered_at_ = stream_->settled();
    return numbers_.subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  }
  std::span<T> room() { return room(0, size()); }
  std::span<const T> read() const {
    RT_CHECK(stream_->settled() > ordered_at_, "numbers of a device are read before its stream is settled");
    return numbers_;
  }

 private:
  Stream* stream_;
  std::shared_ptr<std::byte> memory_;
  std::span<T> numbers_;
  int64_t ordered_at_ = 0;
};

}  // namespace cairn
