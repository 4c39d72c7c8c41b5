#pragma once
// Recognises a folder that is written to for hours by its identity, not by its path. What is saved below the mount
// point of a disk that went, or into a folder that replaced a moved one, is lost when the true one is back.
//
// It is held by a descriptor. Numbers alone would not do: some file systems (FUSE, vfat, overlays of several disks)
// give a folder that nobody holds a new number when memory is short. While it is held, only a lazy unmount takes its
// disk away.

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
