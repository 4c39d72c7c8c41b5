#pragma once
// A folder that is written to for hours, known again by what it is and not by its path: what is saved below the mount
// point of a disk that went, or into what took the place of a folder that was moved, nobody finds when that is back.
//
// It is held by a descriptor. Numbers alone would not do: some file systems (FUSE, vfat, overlays of several disks)
// give a folder that nobody holds a new one when memory is short. While it is held its disk cannot be unmounted but
// lazily.

#include <filesystem>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::ckpt {

class HeldFolder {
 public:
  static Result<HeldFolder> open(const std::filesystem::path& path);

  /// That the path still leads to it. Errors: kIo, with what was found and what to do; the system's.
  Status check() const;

 private:
  std::filesystem::path path_;
  Fd fd_;
};

}  // namespace cairn::ckpt
