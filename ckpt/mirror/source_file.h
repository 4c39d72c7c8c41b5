#pragma once
// A local file that is being copied away: read from front to back, without leaving it in the page cache.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::ckpt {

class SourceFile {
 public:
  static Result<SourceFile> open(const std::filesystem::path& path);
  /// One that lies on no disk: these bytes, under this name.
  static Result<SourceFile> of_text(const std::string& name, std::string_view text);

  const std::filesystem::path& path() const { return path_; }
  std::string name() const { return path_.filename().string(); }
  int64_t bytes() const { return bytes_; }

  /// All of `target`, from `offset`. Errors: kIo also when the file has become shorter.
  Status read(int64_t offset, std::span<std::byte> target);

 private:
  std::filesystem::path path_;
  Fd fd_;
  int64_t bytes_ = 0;
};

/// Holds a rate: spend() sleeps so that no more than `bytes_per_s` pass on average. 0: never sleeps.
class Pace {
 public:
  explicit Pace(int64_t bytes_per_s);
  void spend(int64_t bytes);

 private:
  int64_t bytes_per_s_ = 0;
  int64_t next_ns_ = 0;  // when the next bytes may pass
};

}  // namespace cairn::ckpt
