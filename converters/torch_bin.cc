#include "converters/torch_bin.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "converters/safetensors.h"

namespace cairn::convert {

namespace {

constexpr int64_t kGatherBytes = int64_t{64} << 20;  // of a storage in memory, to gather a strided view from
constexpr int64_t kPageBytes = 4096;

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

bool is_contiguous(const Shape& shape, const std::vector<int64_t>& strides) {
  int64_t expected = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] == 0) return true;
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

}  // namespace

Result<std::unique_ptr<TorchBinFile>> TorchBinFile::open(const std::filesystem::path& path, Pickle pickle) {
  std::unique_ptr<TorchBinFile> out(new TorchBinFile());
  RT_TRY_SET(out->archive_, TorchArchive::open(path));
  RT_TRY(out->load(pickle).with(path.string()));
  return out;
}

Result<std::unique_ptr<TorchBinFile>> TorchBinFile::open_tensor(std::shared_ptr<const Fd> fd,
                                                                const std::filesystem::path& path, int64_t begin,
                                                                int64_t bytes) {
  std::unique_ptr<TorchBinFile> out(new TorchBinFile());
  RT_TRY_SET(out->archive_, TorchArchive::open_part(std::move(fd), path, begin, bytes));
  RT_TRY(out->load(Pickle::kTensor).with(path.string()));
  return out;
}

Status TorchBinFile::load(Pickle kind) {
  RT_TRY_SET(const std::string pickle, archive_.pickle());
  auto unpickled = unpickle_state_dict(pickle, kind);
  if (!unpickled.ok()) return std::move(unpickled).error().with(archive_.pickle_name());

  std::vector<SafeTensor> tensors;
  std::vector<View> views;
  for (const PickledTensor& tensor : unpickled.value()) {
    const std::string key = "data/" + tensor.storage;
    const ZipEntry* storage = archive_.storage(tensor.storage);
    if (storage == nullptr)
      return corrupt(fmt::format("tensor \"{}\": its storage \"{}{}\" is missing", tensor.name, archive_.top(), key));
    const int64_t elem = safetensors_dtype_bits(tensor.dtype) / 8;
    if (storage->bytes != tensor.storage_elems * elem)
      return corrupt(fmt::format("tensor \"{}\": storage \"{}{}\" has {} bytes, but {} elements of {} take {}",
                                 tensor.name, archive_.top(), key, storage->bytes, tensor.storage_elems, tensor.dtype,
                                 tensor.storage_elems * elem));
    tensors.push_back({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = tensor.shape,
                       .begin = 0,
                       .end = count_elems(tensor.shape) * elem});
    views.push_back({storage->offset + tensor.offset * elem, elem, tensor.strides,
                     is_contiguous(tensor.shape, tensor.strides), tensor.storage_elems});
  }
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return views[a].data_offset < views[b].data_offset; });
  for (const size_t k : order) {
    tensors_.push_back(std::move(tensors[k]));
    views_.push_back(std::move(views[k]));
  }
  return {};
}

Status TorchBinFile::read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const {
  const auto index = static_cast<size_t>(&tensor - tensors_.data());
  RT_CHECK(index < tensors_.size() && offset >= 0 && bytes >= 0 && offset + bytes <= tensor.end, "{} [{}, +{})",
           tensor.name, offset, bytes);
  const View& view = views_[index];
  const auto named = [&](Status status) {
    return std::move(status).with(fmt::format("{}: tensor {}", path().string(), tensor.name));
  };
  if (bytes == 0) return {};
  // With strides of 0 a file of some bytes would be a model of any size.
  if (count_elems(tensor.shape) > view.stored_elems) {
    return named(
        unsupported(fmt::format("its {} elements are a view that repeats the {} of its storage; save the tensor "
                                "after contiguous()",
                                count_elems(tensor.shape), view.stored_elems)));
  }
  if (view.contiguous) {
    return named(
        archive_.read_at(view.data_offset + offset, {reinterpret_cast<char*>(out), static_cast<size_t>(bytes)}));
  }
  // Element by element: out of the whole stretch of the storage that the view covers, where memory can hold it.
  const int64_t elem = view.elem_bytes;
  RT_CHECK(offset % elem == 0 && bytes % elem == 0, "{}: [{}, +{}) cuts elements", tensor.name, offset, bytes);
  std::vector<int64_t> at(tensor.shape.size());
  int64_t rest = offset / elem, place = 0;
  for (size_t d = at.size(); d-- > 0;) {
    at[d] = rest % tensor.shape[d];
    rest /= tensor.shape[d];
    place += at[d] * view.strides[d];
  }
  int64_t covered = elem;
  for (size_t d = 0; d < at.size(); ++d) covered += (tensor.shape[d] - 1) * view.strides[d] * elem;
  const bool whole = covered <= kGatherBytes;
  std::vector<char> block;
  int64_t block_begin = 0;
  for (int64_t k = 0; k < bytes / elem; ++k) {
    const int64_t byte = view.data_offset + place * elem;
    if (byte < block_begin || byte + elem > block_begin + static_cast<int64_t>(block.size())) {
      block_begin = whole ? view.data_offset : byte;
      block.resize(static_cast<size_t>(whole ? covered : std::min(kPageBytes, archive_.bytes() - byte)));
      RT_TRY(named(archive_.read_at(block_begin, block)));
    }
    std::memcpy(out + k * elem, block.data() + (byte - block_begin), static_cast<size_t>(elem));
    for (size_t d = at.size(); d-- > 0;) {
      place += view.strides[d];
      if (++at[d] < tensor.shape[d]) break;
      place -= tensor.shape[d] * view.strides[d];
      at[d] = 0;
    }
  }
  return {};
}

}  // namespace cairn::convert
