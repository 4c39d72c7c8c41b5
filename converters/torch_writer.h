#pragma once
// Writes as torch.save and torch.distributed.checkpoint do: pickles of protocol 2, put together from operations, and
// archives of one value, one behind the other in a file.
// Source: pytorch torch/serialization.py, caffe2/serialize/inline_container.cc; CPython Lib/pickletools.py.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/core/unique_handle.h"

namespace cairn::convert {

/// Operations of a pickle, as text that is put together.
namespace pickles {
std::string text(std::string_view value);
std::string integer(int64_t value);
std::string real(double value);
std::string boolean(bool value);
inline constexpr std::string_view kNone = "N";
std::string name(std::string_view module, std::string_view name);
/// `items`: pickled values, one behind the other; of a dict keys and values.
std::string tuple(std::string_view items);
std::string list(std::string_view items);
std::string dict(std::string_view items);
std::string size(const Shape& shape);  // torch.Size
/// An object of a class with this state; an empty one is never set.
std::string object(std::string_view module, std::string_view name, std::string_view state);
/// A tensor that is all of storage "0". `storage_class`: "FloatStorage".
std::string tensor(std::string_view storage_class, const Shape& shape);
/// The whole pickle of a value.
std::string whole(std::string_view value);
}  // namespace pickles

/// A file of archives, written front to back.
class TorchWriter {
 public:
  /// Errors: kIo, kNoSpace; for a file that exists too.
  static Result<TorchWriter> create(const std::filesystem::path& path);
  struct Place {
    int64_t begin = 0, bytes = 0;
  };
  /// An archive of a value, and of storage "0" where it is a tensor. Errors: kIo, kNoSpace; kInvalidInput for more than
  /// 2 GiB.
  Result<Place> add(std::string_view pickle, std::span<const std::byte> storage);
  int64_t bytes() const { return at_; }
  /// Makes what was written durable, and closes.
  Status finish();

 private:
  Status write(std::span<const std::byte> bytes);
  std::filesystem::path path_;
  Fd fd_;
  int64_t at_ = 0;
};

}  // namespace cairn::convert
