#include "ckpt/persist/vfd.h"

#include <hdf5.h>

#include <algorithm>
#include <cstring>

#include "ckpt/format/manifest.h"

namespace cairn::ckpt {

std::recursive_mutex& hdf5_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

Result<Hdf5Image::Page*> Hdf5Image::page(int64_t number) {
  std::unique_ptr<Page>& slot = pages_[number];
  if (!slot) {
    auto made = std::make_unique<Page>();
    made->fill(std::byte{0});
    if (source_ != nullptr) {
      const int64_t begin = number * kIoAlign, bytes = std::min(kIoAlign, eof - begin);
      if (bytes > 0) RT_TRY(source_->read(begin, std::span(*made).first(static_cast<size_t>(bytes))));
    }
    slot = std::move(made);
  }
  return slot.get();
}

void Hdf5Image::put(int64_t offset, std::span<const std::byte> bytes) {
  RT_CHECK(source_ == nullptr, "writing into an image that is read");
  while (!bytes.empty()) {
    const int64_t within = offset % kIoAlign;
    const size_t n = std::min(bytes.size(), static_cast<size_t>(kIoAlign - within));
    std::memcpy(page(offset / kIoAlign).value()->data() + within, bytes.data(), n);
    bytes = bytes.subspan(n);
    offset += static_cast<int64_t>(n);
  }
}

void Hdf5Image::touch(int64_t offset, int64_t bytes) {
  for (int64_t number = offset / kIoAlign; number * kIoAlign < offset + bytes; ++number)
    RT_CHECK(page(number).ok(), "a page in memory cannot fail");
}

Status Hdf5Image::get(int64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const int64_t within = offset % kIoAlign;
    const size_t n = std::min(bytes.size(), static_cast<size_t>(kIoAlign - within));
    const auto there = pages_.find(offset / kIoAlign);
    if (there != pages_.end()) {
      std::memcpy(bytes.data(), there->second->data() + within, n);
    } else if (source_ == nullptr) {
      std::memset(bytes.data(), 0, n);  // reading does not make pages that would then be written
    } else {
      RT_TRY_SET(const Page* from, page(offset / kIoAlign));
      std::memcpy(bytes.data(), from->data() + within, n);
    }
    bytes = bytes.subspan(n);
    offset += static_cast<int64_t>(n);
  }
  return {};
}

namespace {

struct ImageInfo {
  Hdf5Image* image;
};

struct ImageFile {
  H5FD_t base;  // HDF5 wants its own struct first
  Hdf5Image* image;
};

Hdf5Image& image_of(H5FD_t* file) { return *reinterpret_cast<ImageFile*>(file)->image; }
const Hdf5Image& image_of(const H5FD_t* file) { return *reinterpret_cast<const ImageFile*>(file)->image; }

constexpr haddr_t kMaxAddress = static_cast<haddr_t>(kMaxTensorBytes);

H5FD_t* open_image(const char*, unsigned, hid_t access, haddr_t) {
  const auto* info = static_cast<const ImageInfo*>(H5Pget_driver_info(access));
  if (info == nullptr) return nullptr;
  auto* file = new (std::nothrow) ImageFile{};
  if (file == nullptr) return nullptr;
  file->image = info->image;
  return &file->base;
}

herr_t close_image(H5FD_t* file) {
  delete reinterpret_cast<ImageFile*>(file);
  return 0;
}

herr_t query_image(const H5FD_t*, unsigned long* flags) {
  // No sieve, no accumulator, no packing of small raw data: each write arrives as the library means it.
  if (flags != nullptr) *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  return 0;
}

haddr_t get_eoa(const H5FD_t* file, H5FD_mem_t) { return static_cast<haddr_t>(image_of(file).eoa); }
herr_t set_eoa(H5FD_t* file, H5FD_mem_t, haddr_t address) {
  image_of(file).eoa = static_cast<int64_t>(address);
  return 0;
}
haddr_t get_eof(const H5FD_t* file, H5FD_mem_t) { return static_cast<haddr_t>(image_of(file).eof); }

bool in_range(haddr_t address, size_t bytes) { return address <= kMaxAddress && bytes <= kMaxAddress - address; }

herr_t read_image(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address, size_t bytes, void* buffer) {
  if (!in_range(address, bytes)) return -1;
  Hdf5Image& image = image_of(file);
  try {  // an exception must not pass through C
    Status status = image.get(static_cast<int64_t>(address), std::span(static_cast<std::byte*>(buffer), bytes));
    if (status.ok()) return 0;
    if (!image.error) image.error = std::move(status).error();
  } catch (const std::exception& e) {
    if (!image.error) image.error = Error{ErrorCode::kInternal, e.what()};
  }
  return -1;
}

herr_t write_image(H5FD_t* file, H5FD_mem_t type, hid_t, haddr_t address, size_t bytes, const void* buffer) {
  if (!in_range(address, bytes)) return -1;
  Hdf5Image& image = image_of(file);
  try {
    if (image.divert_payload && type == H5FD_MEM_DRAW) {
      image.diverted_at = static_cast<int64_t>(address);
      image.eof = std::max(image.eof, static_cast<int64_t>(address + bytes));
      return 0;
    }
    image.put(static_cast<int64_t>(address), std::span(static_cast<const std::byte*>(buffer), bytes));
    image.eof = std::max(image.eof, static_cast<int64_t>(address + bytes));
    return 0;
  } catch (const std::exception& e) {
    if (!image.error) image.error = Error{ErrorCode::kInternal, e.what()};
  }
  return -1;
}

herr_t truncate_image(H5FD_t* file, hid_t, hbool_t) {
  image_of(file).eof = image_of(file).eoa;
  return 0;
}

herr_t lock_image(H5FD_t*, hbool_t) { return 0; }
herr_t unlock_image(H5FD_t*) { return 0; }

hid_t image_driver() {
  static const hid_t driver = [] {
    H5FD_class_t c{};
#if H5_VERSION_GE(1, 14, 0)
    c.version = H5FD_CLASS_VERSION;
    c.value = H5_VFD_RESERVED;  // the first number that is not the library's own; drivers of a process differ in it
#endif
    c.name = "cairn_image";
    c.maxaddr = kMaxAddress;
    c.fc_degree = H5F_CLOSE_STRONG;
    c.fapl_size = sizeof(ImageInfo);  // copied as bytes
    c.open = open_image;
    c.close = close_image;
    c.query = query_image;
    c.get_eoa = get_eoa;
    c.set_eoa = set_eoa;
    c.get_eof = get_eof;
    c.read = read_image;
    c.write = write_image;
    c.truncate = truncate_image;
    c.lock = lock_image;
    c.unlock = unlock_image;
    const H5FD_mem_t map[] = H5FD_FLMAP_DICHOTOMY;  // raw data and metadata are allocated apart
    static_assert(sizeof(map) == sizeof(c.fl_map));
    std::memcpy(c.fl_map, map, sizeof(map));
    static const H5FD_class_t kept = c;  // the library keeps a copy of it, but of its name only the pointer
    return H5FDregister(&kept);
  }();
  return driver;
}

}  // namespace

int64_t make_image_access(Hdf5Image& image, int64_t meta_block_bytes) {
  const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  if (access < 0) return -1;
  const ImageInfo info{&image};
  const bool ok = H5Pset_driver(access, image_driver(), &info) >= 0 &&
                  H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110) >= 0 &&
                  H5Pset_alignment(access, kIoAlign, kIoAlign) >= 0 &&
                  H5Pset_meta_block_size(access, static_cast<hsize_t>(meta_block_bytes)) >= 0 &&
                  H5Pset_fclose_degree(access, H5F_CLOSE_STRONG) >= 0;
  if (ok) return access;
  H5Pclose(access);
  return -1;
}

}  // namespace cairn::ckpt
