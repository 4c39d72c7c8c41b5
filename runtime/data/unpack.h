#pragma once
// Text that gzip or zstd has packed, unpacked as it is read. A file is one or more members (zstd: frames), each with
// its own checks: gzip's CRC-32 and length, zstd's XXH64 where the frame has one. Memory: a window, at most 128 MiB.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::data {

/// kTable: the text is the rows of a table, as JSON lines (table.h). The values stand in files (document_origins.h).
enum class Packing { kNone, kGzip, kZstd, kTable };

/// By the first bytes of a file: 4 suffice. A frame that zstd passes over counts as zstd's.
Packing packing_of(std::string_view begin);

/// By a file's name: .gz, .zst.
Packing named_packing(std::string_view path);

/// The name without the .gz or .zst that named_packing() sees.
std::string_view without_packing(std::string_view path);

class Unpacker {
 public:
  static std::unique_ptr<Unpacker> make(Packing packing);
  virtual ~Unpacker() = default;
  Unpacker(const Unpacker&) = delete;
  Unpacker& operator=(const Unpacker&) = delete;

  /// The bytes that one call took and gave. `ended`: behind `in` the member is complete.
  struct Step {
    size_t in = 0, out = 0;
    bool ended = false;
  };
  /// Unpacks some of `in` into `out`; takes and gives nothing only where `in` is empty. Errors, without a place:
  /// kCorrupt, and kInvalidInput for what needs a dictionary or a window of more than 128 MiB.
  virtual Result<Step> step(std::string_view in, std::span<char> out) = 0;

  /// Whether the next member may begin with `in`; nothing but NULs may stand behind the last one of gzip.
  virtual bool begins_member(std::string_view in) const = 0;
  virtual std::string_view member() const = 0;  // its name in messages

 protected:
  Unpacker() = default;
};

}  // namespace cairn::data
