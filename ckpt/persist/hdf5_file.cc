#include "ckpt/persist/hdf5_file.h"

#include <fmt/format.h>
#include <hdf5.h>

#include <algorithm>
#include <set>

#include "runtime/core/unique_handle.h"

namespace cairn::ckpt {
namespace {

/// Holds hdf5_mutex(). libhdf5 also leaves errors of calls that succeed on the calling thread's stack, as for a filter
/// that it does not have. What a thread ends with there is never given back: the library, closing at exit, would go
/// round in circles and say so on stderr.
struct Lock {
  std::lock_guard<std::recursive_mutex> held{hdf5_mutex()};
  Lock() = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() { H5Eclear2(H5E_DEFAULT); }
};

// All identifiers close with H5Idec_ref, whatever they name. The holder has hdf5_mutex().
struct H5Traits {
  using Handle = hid_t;
  static constexpr hid_t kInvalid = -1;
  static void close(hid_t id) {
    if (id >= 0) H5Idec_ref(id);
  }
};
using H5Id = UniqueHandle<H5Traits>;

herr_t innermost(unsigned, const H5E_error2_t* error, void* out) {
  auto& text = *static_cast<std::string*>(out);
  if (text.empty() && error->desc != nullptr) text = error->desc;
  return 0;
}

Error hdf5_failed(std::string_view what, ErrorCode code = ErrorCode::kInternal) {
  std::string why;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, innermost, &why);
  return Error{code, fmt::format("HDF5: {}: {}", what, why.empty() ? "no reason given" : why)};
}

constexpr size_t kMostChunksCompared = 4096;
constexpr H5Z_filter_t kZstdFilter = 32015;  // as registered with The HDF Group

void quiet() { H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr); }  // errors are told once, by us

// Little endian on every machine; bf16 has no HDF5 type that other tools know, so it is stored as its 16 bits.
H5Id file_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return H5Id(H5Tcopy(H5T_IEEE_F32LE));
    case DType::kF64:
      return H5Id(H5Tcopy(H5T_IEEE_F64LE));
    case DType::kF16: {
      H5Id half(H5Tcopy(H5T_IEEE_F32LE));  // IEEE binary16: 1 sign, 5 exponent, 10 fraction bits
      if (H5Tset_fields(half.get(), 15, 10, 5, 0, 10) < 0 || H5Tset_size(half.get(), 2) < 0 ||
          H5Tset_ebias(half.get(), 15) < 0)
        return H5Id();
      return half;
    }
    case DType::kBf16:
    case DType::kU16:
      return H5Id(H5Tcopy(H5T_STD_U16LE));
    case DType::kU8:
      return H5Id(H5Tcopy(H5T_STD_U8LE));
    case DType::kU32:
      return H5Id(H5Tcopy(H5T_STD_U32LE));
    case DType::kI8:
      return H5Id(H5Tcopy(H5T_STD_I8LE));
    case DType::kI16:
      return H5Id(H5Tcopy(H5T_STD_I16LE));
    case DType::kI32:
      return H5Id(H5Tcopy(H5T_STD_I32LE));
    case DType::kI64:
      return H5Id(H5Tcopy(H5T_STD_I64LE));
  }
  return H5Id();
}

H5Id simple_space(const std::vector<int64_t>& extents) {
  if (extents.empty()) return H5Id(H5Screate(H5S_SCALAR));
  const std::vector<hsize_t> dims(extents.begin(), extents.end());
  return H5Id(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
}

Status write_array(hid_t object, const char* name, hid_t disk_type, hid_t memory_type, const void* values,
                   size_t count) {
  const hsize_t dims[] = {count};
  const H5Id space(H5Screate_simple(1, dims, nullptr));
  const H5Id attribute(H5Acreate2(object, name, disk_type, space.get(), H5P_DEFAULT, H5P_DEFAULT));
  if (!attribute || H5Awrite(attribute.get(), memory_type, values) < 0)
    return hdf5_failed(fmt::format("attribute {}", name));
  return {};
}

Status write_ints(hid_t object, const char* name, const std::vector<int64_t>& values) {
  const int64_t none = 0;
  return write_array(object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, values.empty() ? &none : values.data(),
                     values.size());
}

Status write_int(hid_t object, const char* name, int64_t value) {
  const H5Id space(H5Screate(H5S_SCALAR));
  const H5Id attribute(H5Acreate2(object, name, H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT));
  if (!attribute || H5Awrite(attribute.get(), H5T_NATIVE_INT64, &value) < 0)
    return hdf5_failed(fmt::format("attribute {}", name));
  return {};
}

Status write_text(hid_t object, const char* name, std::string_view text) {
  const H5Id space(H5Screate(H5S_SCALAR));
  const H5Id type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type.get(), std::max<size_t>(1, text.size()));
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  const H5Id attribute(H5Acreate2(object, name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT));
  if (!attribute || H5Awrite(attribute.get(), type.get(), text.data()) < 0)
    return hdf5_failed(fmt::format("attribute {}", name));
  return {};
}

std::string box_name(const Box& box) { return box.lo.empty() ? "scalar" : fmt::format("{}", fmt::join(box.lo, "_")); }

}  // namespace

std::string dataset_path(const TensorEntry& tensor, const Box& box) {
  return fmt::format("/{}/{}/{}", tensor.kind, tensor.name, box_name(box));
}

struct Hdf5Writer::Impl {
  std::unique_ptr<Hdf5Image> image = std::make_unique<Hdf5Image>();
  H5Id file, dataset_props, group_props;
  std::vector<H5Id> datasets;
  std::set<std::string> groups;

  ~Impl() {
    const Lock lock;
    close();
  }
  herr_t close() {
    datasets.clear();
    dataset_props.reset();
    group_props.reset();
    if (!file) return 0;
    return H5Fclose(file.release());
  }
  Status ensure_group(const std::string& path) {
    if (!groups.insert(path).second) return {};
    const H5Id group(H5Gcreate2(file.get(), path.c_str(), H5P_DEFAULT, group_props.get(), H5P_DEFAULT));
    if (!group) return hdf5_failed(fmt::format("group {}", path));
    return {};
  }
  Status make_dataset(const TensorEntry& tensor, const Box& box, hid_t props);
};

Hdf5Writer::Hdf5Writer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Hdf5Writer::~Hdf5Writer() = default;
std::unique_ptr<Hdf5Image> Hdf5Writer::take_image() {
  RT_CHECK(!impl_->file, "the image of an HDF5 file that is still open");
  return std::move(impl_->image);
}

Result<std::unique_ptr<Hdf5Writer>> Hdf5Writer::create(int64_t step, int64_t shard_count, int64_t user_block_bytes) {
  const Lock lock;
  quiet();
  auto impl = std::make_unique<Impl>();
  // A dataset with its attributes and groups takes 1 to 2 KiB; whole blocks keep metadata together and few in number.
  const int64_t meta_block = std::clamp<int64_t>(shard_count * 2048 / kIoAlign * kIoAlign, 2 * kIoAlign, 256 << 10);
  const H5Id access(make_image_access(*impl->image, meta_block));
  const H5Id create(H5Pcreate(H5P_FILE_CREATE));
  impl->dataset_props = H5Id(H5Pcreate(H5P_DATASET_CREATE));
  impl->group_props = H5Id(H5Pcreate(H5P_GROUP_CREATE));
  // No time stamps: the same state gives the same bytes. Space now, never filled: payload is written past the library.
  if (!access || !create || !impl->dataset_props || !impl->group_props ||
      H5Pset_userblock(create.get(), static_cast<hsize_t>(user_block_bytes)) < 0 ||
      H5Pset_obj_track_times(create.get(), false) < 0 || H5Pset_obj_track_times(impl->dataset_props.get(), false) < 0 ||
      H5Pset_obj_track_times(impl->group_props.get(), false) < 0 ||
      H5Pset_layout(impl->dataset_props.get(), H5D_CONTIGUOUS) < 0 ||
      H5Pset_alloc_time(impl->dataset_props.get(), H5D_ALLOC_TIME_EARLY) < 0 ||
      H5Pset_fill_time(impl->dataset_props.get(), H5D_FILL_TIME_NEVER) < 0)
    return hdf5_failed("property lists");
  impl->file = H5Id(H5Fcreate("shard", H5F_ACC_TRUNC, create.get(), access.get()));
  if (!impl->file) return hdf5_failed("create");
  RT_TRY(write_text(impl->file.get(), "format", kFormatName));
  RT_TRY(write_int(impl->file.get(), "version", kFormatVersion));
  RT_TRY(write_int(impl->file.get(), "step", step));
  return std::unique_ptr<Hdf5Writer>(new Hdf5Writer(std::move(impl)));
}

Status Hdf5Writer::Impl::make_dataset(const TensorEntry& tensor, const Box& box, hid_t props) {
  const std::string path = dataset_path(tensor, box);
  RT_TRY(ensure_group("/" + tensor.kind));
  RT_TRY(ensure_group("/" + tensor.kind + "/" + tensor.name));
  const H5Id type = file_type(tensor.dtype);
  const H5Id space = simple_space(box.extents());
  if (!type || !space) return hdf5_failed(fmt::format("type and shape of {}", path));
  H5Id dataset(H5Dcreate2(file.get(), path.c_str(), type.get(), space.get(), H5P_DEFAULT, props, H5P_DEFAULT));
  if (!dataset) return hdf5_failed(fmt::format("dataset {}", path));
  RT_TRY(write_text(dataset.get(), "dtype", dtype_name(tensor.dtype)));
  RT_TRY(write_ints(dataset.get(), "global_shape", tensor.shape));
  RT_TRY(write_ints(dataset.get(), "lo", box.lo));
  RT_TRY(write_ints(dataset.get(), "hi", box.hi));
  datasets.push_back(std::move(dataset));
  return {};
}

Result<int64_t> Hdf5Writer::place(const TensorEntry& tensor, const Box& box) {
  const Lock lock;
  RT_TRY(impl_->make_dataset(tensor, box, impl_->dataset_props.get()));
  const haddr_t offset = H5Dget_offset(impl_->datasets.back().get());
  if (offset == HADDR_UNDEF) return hdf5_failed(fmt::format("offset of {}", dataset_path(tensor, box)));
  return static_cast<int64_t>(offset);
}

Status Hdf5Writer::place_coded(const TensorEntry& tensor, const Box& box, std::span<const int64_t> chunk) {
  const Lock lock;
  const std::vector<hsize_t> dims(chunk.begin(), chunk.end());
  const H5Id props(H5Pcreate(H5P_DATASET_CREATE));
  // The filter is asked for by number: writing needs no plugin, for the chunks come to HDF5 as they are stored.
  if (!props || H5Pset_obj_track_times(props.get(), false) < 0 ||
      H5Pset_chunk(props.get(), static_cast<int>(dims.size()), dims.data()) < 0 ||
      H5Pset_fill_time(props.get(), H5D_FILL_TIME_NEVER) < 0 || H5Pset_shuffle(props.get()) < 0 ||
      H5Pset_filter(props.get(), kZstdFilter, H5Z_FLAG_OPTIONAL, 0, nullptr) < 0)
    return hdf5_failed("property lists of a coded dataset");
  return impl_->make_dataset(tensor, box, props.get());
}

Result<int64_t> Hdf5Writer::place_chunk(int64_t index, std::span<const int64_t> corner,
                                        std::span<const std::byte> stored, uint32_t filter_mask) {
  const Lock lock;
  const std::vector<hsize_t> at(corner.begin(), corner.end());
  Hdf5Image& image = *impl_->image;
  image.divert_payload = true;
  image.diverted_at = -1;
  const herr_t placed = H5Dwrite_chunk(impl_->datasets[static_cast<size_t>(index)].get(), H5P_DEFAULT, filter_mask,
                                       at.data(), stored.size(), stored.data());
  image.divert_payload = false;
  if (placed < 0 || image.diverted_at < 0) return hdf5_failed(fmt::format("a chunk of {} bytes", stored.size()));
  return image.diverted_at;
}

Hdf5Image& Hdf5Writer::image() { return *impl_->image; }

Result<std::vector<int64_t>> Hdf5Writer::header_addresses() {
  const Lock lock;
  std::vector<int64_t> out;
  const auto add = [&](hid_t object) {
#if H5_VERSION_GE(1, 12, 0)
    H5O_info1_t info{};  // the form that has addresses in the file
#else
    H5O_info_t info{};
#endif
    if (H5Oget_info2(object, &info, H5O_INFO_BASIC) < 0) return false;
    out.push_back(static_cast<int64_t>(info.addr));
    return true;
  };
  for (const H5Id& dataset : impl_->datasets) {
    if (!add(dataset.get())) return hdf5_failed("address of a dataset");
  }
  if (!add(impl_->file.get())) return hdf5_failed("address of the root group");
  return out;
}

Status Hdf5Writer::set_hashes(int64_t index, int64_t chunk_bytes, std::span<const uint64_t> hashes) {
  const Lock lock;
  const hid_t dataset = impl_->datasets[static_cast<size_t>(index)].get();
  RT_TRY(write_int(dataset, "chunk_bytes", chunk_bytes));
  RT_TRY(write_array(dataset, "chunk_xxh3_64", H5T_STD_U64LE, H5T_NATIVE_UINT64, hashes.data(), hashes.size()));
  // Not needed any more; thousands of open objects would make the close slow.
  impl_->datasets[static_cast<size_t>(index)].reset();
  return {};
}

Status Hdf5Writer::finish() {
  const Lock lock;
  if (impl_->close() < 0) return hdf5_failed("close");
  if (impl_->image->error) return *impl_->image->error;
  return {};
}

bool Hdf5Dataset::fits(const ShardEntry& shard) const {
  if (shard.codec == Codec::kRaw) return offset == shard.offset && bytes == shard.bytes;
  int64_t stored = 0;
  for (const StoredChunk& chunk : shard.stored) stored += chunk.bytes;
  return offset < 0 && bytes == stored && (chunks == shard.stored || shard.stored.size() > kMostChunksCompared);
}

Result<std::vector<Hdf5Dataset>> find_datasets(IoFile& file, std::span<const std::string> paths) {
  const Lock lock;
  quiet();
  RT_TRY_SET(const int64_t size, file.size());
  Hdf5Image image(file, size);
  const auto failed = [&](std::string_view what) -> Error {
    if (image.error) return *image.error;
    return hdf5_failed(what, ErrorCode::kCorrupt);
  };
  const H5Id access(make_image_access(image, 2 * kIoAlign));
  if (!access) return hdf5_failed("property lists");
  const H5Id h5(H5Fopen("shard", H5F_ACC_RDONLY, access.get()));
  if (!h5) return failed("open");
  std::vector<Hdf5Dataset> found;
  for (const std::string& path : paths) {
    const H5Id dataset(H5Dopen2(h5.get(), path.c_str(), H5P_DEFAULT));
    if (!dataset) return failed(fmt::format("dataset {}", path));
    const haddr_t offset = H5Dget_offset(dataset.get());
    found.push_back({offset == HADDR_UNDEF ? -1 : static_cast<int64_t>(offset),
                     static_cast<int64_t>(H5Dget_storage_size(dataset.get())),
                     {}});
    const H5Id props(H5Dget_create_plist(dataset.get()));
    if (!props || H5Pget_layout(props.get()) != H5D_CHUNKED) continue;
    const H5Id space(H5Dget_space(dataset.get()));
    hsize_t count = 0;
    if (!space || H5Dget_num_chunks(dataset.get(), space.get(), &count) < 0)
      return failed(fmt::format("chunks of {}", path));
    if (count > kMostChunksCompared) continue;  // libhdf5 walks from the first one each time
    for (hsize_t i = 0; i < count; ++i) {
      hsize_t corner[H5S_MAX_RANK] = {};
      unsigned mask = 0;
      haddr_t address = HADDR_UNDEF;
      hsize_t bytes = 0;
      if (H5Dget_chunk_info(dataset.get(), space.get(), i, corner, &mask, &address, &bytes) < 0)
        return failed(fmt::format("chunk {} of {}", i, path));
      found.back().chunks.push_back({static_cast<int64_t>(address), static_cast<int64_t>(bytes), mask});
    }
  }
  return found;
}

}  // namespace cairn::ckpt
