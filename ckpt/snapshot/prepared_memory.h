#pragma once
// Memory for an arena that is to come, reserved and touched before it is known whose ranks it will have: first touch is
// most of what making an arena costs. Until then it has no name, and goes with its process.
//
// Threads: make() on any; take() once.

#include <cstdint>
#include <functional>
#include <string>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::ckpt {

class PreparedMemory {
 public:
  /// Zeros in a folder of memory. The caller has looked for room (Arena::has_room). Uses no processor once it is made.
  /// `stop` is asked between parts. Errors: kStopped; kNoSpace where the memory ends on the way; kUnsupported: a folder
  /// on a disk, or without files that have no name.
  static Result<PreparedMemory> make(const std::string& folder, int64_t bytes, bool huge_pages,
                                     const std::function<bool()>& stop);

  const std::string& folder() const { return folder_; }
  /// 0: it has been taken.
  int64_t bytes() const { return fd_ ? bytes_ : 0; }
  /// Gives it this name. Empty, and the memory is gone: that could not be done.
  Fd take(const std::string& name);

 private:
  PreparedMemory(Fd fd, std::string folder, int64_t bytes)
      : fd_(std::move(fd)), folder_(std::move(folder)), bytes_(bytes) {}
  Fd fd_;
  std::string folder_;
  int64_t bytes_ = 0;
};

}  // namespace cairn::ckpt
