#include "converters/torch_bin.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <string_view>

#include "converters/foreign_file.h"
#include "converters/safetensors.h"

namespace cairn::convert {

namespace {

constexpr int64_t kMaxPickleBytes = int64_t{64} << 20;
constexpr int64_t kMaxTextBytes = 64;
constexpr int64_t kBlockBytes = int64_t{4} << 20;
constexpr int64_t kGatherBytes = int64_t{64} << 20;  // of a storage in memory, to gather a strided view from
constexpr int64_t kPageBytes = 4096;
constexpr std::string_view kLegacyMagic = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
constexpr std::string_view kHowToConvert =
    "load and save it once with a current torch: torch.save(torch.load(FILE, weights_only=True), FILE)";

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

/// Formats that are no zip archive, by their first bytes.
Status refuse_other_formats(std::string_view head) {
  if (head.starts_with("PK\x03\x04")) return {};
  if (head.starts_with(kLegacyMagic))
    return unsupported(fmt::format("is in the format that torch wrote before 1.6; {}", kHowToConvert));
  if (head.size() >= 262 && head.substr(257, 5) == "ustar")
    return unsupported(fmt::format("is a tar archive, which torch wrote before 0.1.10; {}", kHowToConvert));
  if (head.starts_with("\x80"))
    return unsupported(fmt::format("is a bare pickle, not an archive that torch.save writes; {}", kHowToConvert));
  return corrupt("is no file of torch.save: it does not begin as a zip archive");
}

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
  out->path_ = path;
  RT_TRY_SET(ForeignFile file, open_foreign(path));
  out->fd_ = std::make_shared<const Fd>(std::move(file.fd));
  out->file_bytes_ = file.bytes;
  Status loaded = out->load(pickle);
  if (!loaded.ok()) return std::move(loaded).error().with(path.string());
  return out;
}

Result<std::unique_ptr<TorchBinFile>> TorchBinFile::open_tensor(std::shared_ptr<const Fd> fd,
                                                                const std::filesystem::path& path, int64_t begin,
                                                                int64_t bytes) {
  std::unique_ptr<TorchBinFile> out(new TorchBinFile());
  out->path_ = path;
  out->fd_ = std::move(fd);
  struct stat info {};
  if (::fstat(out->fd_->get(), &info) != 0) return os_error(errno, path.string());
  if (begin < 0 || bytes < 0 || begin > info.st_size || bytes > info.st_size - begin) {
    return corrupt(fmt::format("{}: bytes [{}, +{}) are not in its {}", path.string(), begin, bytes, info.st_size));
  }
  out->begin_ = begin;
  out->file_bytes_ = bytes;
  Status loaded = out->load(Pickle::kTensor);
  if (!loaded.ok()) return std::move(loaded).error().with(path.string());
  return out;
}

Status TorchBinFile::read_at(int64_t offset, std::span<char> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_->get(), out.data(), std::min<size_t>(out.size(), size_t{1} << 30), begin_ + offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, "read");
    if (n == 0) return corrupt(fmt::format("the file ends at byte {}", offset));
    out = out.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return {};
}

Status TorchBinFile::load(Pickle kind) {
  std::string head(static_cast<size_t>(std::min<int64_t>(file_bytes_, 512)), '\0');
  RT_TRY(read_at(0, head));
  RT_TRY(refuse_other_formats(head));
  RT_TRY_SET(entries_, read_zip_directory(
                           file_bytes_, [this](int64_t offset, std::span<char> out) { return read_at(offset, out); }));
  std::map<std::string_view, const ZipEntry*> by_name;  // without the top folder, which all share
  const std::string top = entries_.empty() ? "" : entries_[0].name.substr(0, entries_[0].name.find('/') + 1);
  if (top.empty()) return corrupt("the archive has no top folder, as torch.save makes one");
  for (const ZipEntry& entry : entries_) {
    if (!entry.name.starts_with(top))
      return corrupt(fmt::format("entry \"{}\" is not in the top folder \"{}\"", entry.name, top));
    by_name[std::string_view(entry.name).substr(top.size())] = &entry;
  }
  const auto text_of = [&](std::string_view name, int64_t max_bytes) -> Result<std::string> {
    const ZipEntry& entry = *by_name.at(name);
    if (entry.bytes > max_bytes)
      return corrupt(
          fmt::format("entry \"{}\" has {} bytes, at most {} are expected", entry.name, entry.bytes, max_bytes));
    std::string out(static_cast<size_t>(entry.bytes), '\0');
    RT_TRY(read_at(entry.offset, out));
    const auto crc =
        static_cast<uint32_t>(::crc32_z(0, reinterpret_cast<const unsigned char*>(out.data()), out.size()));
    if (entry.crc32 != 0 && crc != entry.crc32)
      return corrupt(fmt::format("entry \"{}\": CRC-32 {:08x}, the archive says {:08x}", entry.name, crc, entry.crc32));
    return out;
  };
  if (by_name.contains("constants.pkl"))
    return unsupported("is a TorchScript archive, a program; save the model's state dict instead");
  if (by_name.contains("byteorder")) {
    RT_TRY_SET(const std::string order, text_of("byteorder", kMaxTextBytes));
    if (order != "little") return unsupported(fmt::format("byteorder is \"{}\": only little-endian is read", order));
  }
  if (by_name.contains("version")) {
    RT_TRY_SET(const std::string version, text_of("version", kMaxTextBytes));
    const int64_t n = std::atoll(version.c_str());
    if (n < 1 || n > 10) return unsupported(fmt::format("its version is \"{}\", known are 1 to 10", version));
  }
  if (!by_name.contains("data.pkl")) return corrupt(fmt::format("has no entry \"{}data.pkl\"", top));
  RT_TRY_SET(const std::string pickle, text_of("data.pkl", kMaxPickleBytes));
  auto unpickled = unpickle_state_dict(pickle, kind);
  if (!unpickled.ok()) return std::move(unpickled).error().with(top + "data.pkl");

  std::vector<SafeTensor> tensors;
  std::vector<View> views;
  for (const PickledTensor& tensor : unpickled.value()) {
    const std::string key = "data/" + tensor.storage;
    const auto storage = by_name.find(key);
    if (storage == by_name.end())
      return corrupt(fmt::format("tensor \"{}\": its storage \"{}{}\" is missing", tensor.name, top, key));
    const int64_t elem = safetensors_dtype_bits(tensor.dtype) / 8;
    if (storage->second->bytes != tensor.storage_elems * elem)
      return corrupt(fmt::format("tensor \"{}\": storage \"{}{}\" has {} bytes, but {} elements of {} take {}",
                                 tensor.name, top, key, storage->second->bytes, tensor.storage_elems, tensor.dtype,
                                 tensor.storage_elems * elem));
    tensors.push_back({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = tensor.shape,
                       .begin = 0,
                       .end = count_elems(tensor.shape) * elem});
    views.push_back({storage->second->offset + tensor.offset * elem, elem, tensor.strides,
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
    return std::move(status).with(fmt::format("{}: tensor {}", path_.string(), tensor.name));
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
    return named(read_at(view.data_offset + offset, {reinterpret_cast<char*>(out), static_cast<size_t>(bytes)}));
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
      block.resize(static_cast<size_t>(whole ? covered : std::min(kPageBytes, file_bytes_ - byte)));
      RT_TRY(named(read_at(block_begin, block)));
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

Status TorchBinFile::verify() const {
  std::vector<char> block(static_cast<size_t>(kBlockBytes));
  for (const ZipEntry& entry : entries_) {
    if (entry.crc32 == 0) continue;
    uLong crc = 0;
    for (int64_t at = 0; at < entry.bytes; at += static_cast<int64_t>(block.size())) {
      const auto n = static_cast<size_t>(std::min<int64_t>(entry.bytes - at, static_cast<int64_t>(block.size())));
      RT_TRY(read_at(entry.offset + at, std::span(block).first(n)).with(path_.string()));
      crc = ::crc32_z(crc, reinterpret_cast<const unsigned char*>(block.data()), n);
    }
    if (static_cast<uint32_t>(crc) != entry.crc32) {
      return corrupt(fmt::format("{}: entry \"{}\": CRC-32 {:08x}, the archive says {:08x}", path_.string(), entry.name,
                                 crc, entry.crc32));
    }
  }
  return {};
}

}  // namespace cairn::convert
