// Input: the first byte chooses; the rest is a pickle, or an archive. What is accepted lies inside its storages, and an
// archive's entries lie inside the file, one behind the other.
#include <algorithm>

#include "converters/safetensors.h"
#include "converters/unpickler.h"
#include "converters/zip_directory.h"
#include "tests/fuzz/target.h"

using namespace cairn;
using namespace cairn::convert;

namespace {

void unpickle(std::string_view text) {
  const auto tensors = unpickle_state_dict(text);
  if (!tensors.ok()) {
    RT_CHECK(!tensors.error().message.empty(), "refused without a word");
    return;
  }
  RT_CHECK(!tensors.value().empty(), "accepted without tensors");
  for (const PickledTensor& tensor : tensors.value()) {
    RT_CHECK(tensor.shape.size() == tensor.strides.size() && safetensors_dtype_bits(tensor.dtype) > 0, "{}",
             tensor.name);
    int64_t last = tensor.offset;
    for (size_t d = 0; d < tensor.shape.size(); ++d) last += (tensor.shape[d] - 1) * tensor.strides[d];
    RT_CHECK(count_elems(tensor.shape) == 0 || (tensor.offset >= 0 && last < tensor.storage_elems),
             "{} leaves its storage", tensor.name);
  }
}

void open_archive(std::string_view file) {
  const auto size = static_cast<int64_t>(file.size());
  const auto entries = read_zip_directory(size, [&](int64_t offset, std::span<char> out) -> Status {
    RT_CHECK(offset >= 0 && offset + static_cast<int64_t>(out.size()) <= size, "a read at {} of {}", offset, size);
    std::copy_n(file.begin() + offset, out.size(), out.begin());
    return {};
  });
  if (!entries.ok()) {
    RT_CHECK(!entries.error().message.empty(), "refused without a word");
    return;
  }
  int64_t at = 0;
  for (const ZipEntry& entry : entries.value()) {
    RT_CHECK(entry.offset >= at && entry.bytes >= 0 && entry.bytes <= size - entry.offset, "{} lies at {} + {} of {}",
             entry.name, entry.offset, entry.bytes, size);
    at = entry.offset + entry.bytes;
    if (entry.name.ends_with("data.pkl"))
      unpickle(file.substr(static_cast<size_t>(entry.offset), static_cast<size_t>(entry.bytes)));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest = fuzz::text(data + 1, size - 1);
  if (data[0] == 'p') {
    unpickle(rest);
  } else {
    open_archive(rest);
  }
  return 0;
}
