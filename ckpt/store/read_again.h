#pragma once
// What a disk has failed, a network file system may have again in a moment (a soft mount's time-out, an evicted
// client). What is damaged stays so.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <span>
#include <thread>

#include "runtime/core/result.h"

namespace cairn::ckpt {

inline constexpr std::chrono::milliseconds kReadAgain[] = {std::chrono::milliseconds(500),
                                                           std::chrono::milliseconds(2500)};

/// Whether the disk itself does not have it any more. Through the page cache that is EIO; a direct read gives the block
/// layer's own word (a bad sector, a target's error, a checksum below), a file system its own for what does not hold.
inline bool disk_fails(int os_errno) {
  switch (os_errno) {
    case EIO:
    case ENODATA:
    case EREMOTEIO:
    case EILSEQ:
    case EUCLEAN:
    case EBADMSG:
      return true;
    default:
      return false;
  }
}

inline bool disk_failed(const Status& status) { return !status.ok() && disk_fails(status.error().os_errno); }
template <typename T>
bool disk_failed(const Result<T>& result) {
  return !result.ok() && disk_fails(result.error().os_errno);
}

/// read(), and again after each of `waits` while that is what a disk has failed, or until `stop` says so (may be
/// empty).
template <typename Read>
auto read_again(const Read& read, std::span<const std::chrono::milliseconds> waits, const std::function<bool()>& stop) {
  constexpr std::chrono::milliseconds kSlice(50);
  auto result = read();
  for (std::chrono::milliseconds wait : waits) {
    for (; disk_failed(result) && wait.count() > 0 && !(stop && stop()); wait -= kSlice)
      std::this_thread::sleep_for(std::min(wait, kSlice));
    if (!disk_failed(result) || (stop && stop())) break;
    result = read();
  }
  return result;
}

}  // namespace cairn::ckpt
