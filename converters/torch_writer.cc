#include "converters/torch_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "runtime/core/file_calls.h"

namespace cairn::convert {
namespace {

constexpr int64_t kMaxStorageBytes = int64_t{2} << 30;  // lengths of a zip archive have 32 bits
constexpr int64_t kAlignment = 64;                      // of each entry's data, as torch has it
constexpr int64_t kLocalHeader = 30, kExtraHeader = 4;

std::string little(uint64_t value, int bytes) {
  std::string out;
  for (int k = 0; k < bytes; ++k, value >>= 8) out += static_cast<char>(value);
  return out;
}

uint32_t crc_of(std::span<const std::byte> bytes) {
  uLong crc = ::crc32(0, nullptr, 0);
  while (!bytes.empty()) {
    const size_t n = std::min<size_t>(bytes.size(), size_t{1} << 30);
    crc = ::crc32(crc, reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<uInt>(n));
    bytes = bytes.subspan(n);
  }
  return static_cast<uint32_t>(crc);
}

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace

namespace pickles {

std::string text(std::string_view value) { return "X" + little(value.size(), 4) + std::string(value); }

std::string integer(int64_t value) {
  const auto word = static_cast<uint64_t>(value);
  if (value >= 0 && value < 256) return "K" + little(word, 1);
  if (value >= 0 && value < 65536) return "M" + little(word, 2);
  if (value >= INT32_MIN && value <= INT32_MAX) return "J" + little(word, 4);
  return std::string("\x8a\x08") + little(word, 8);
}

std::string real(double value) {
  std::string bytes = little(std::bit_cast<uint64_t>(value), 8);
  std::ranges::reverse(bytes);
  return "G" + bytes;
}

std::string boolean(bool value) { return value ? "\x88" : "\x89"; }
std::string name(std::string_view module, std::string_view of) { return fmt::format("c{}\n{}\n", module, of); }
std::string tuple(std::string_view items) { return fmt::format("({}t", items); }
std::string list(std::string_view items) { return fmt::format("]({}e", items); }
std::string dict(std::string_view items) { return fmt::format("}}({}u", items); }

std::string size(const Shape& shape) {
  std::string items;
  for (const int64_t extent : shape) items += integer(extent);
  return name("torch", "Size") + tuple(tuple(items)) + "R";
}

std::string object(std::string_view module, std::string_view of, std::string_view state) {
  return name(module, of) + ")\x81" + (state.empty() ? std::string() : std::string(state) + "b");
}

std::string tensor(std::string_view storage_class, const Shape& shape) {
  std::string sizes, strides;
  Shape stride(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  for (size_t d = 0; d < shape.size(); ++d) {
    sizes += integer(shape[d]);
    strides += integer(stride[d]);
  }
  const std::string storage =
      tuple(text("storage") + name("torch", storage_class) + text("0") + text("cpu") + integer(count_elems(shape))) +
      "Q";
  return name("torch._utils", "_rebuild_tensor_v2") +
         tuple(storage + integer(0) + tuple(sizes) + tuple(strides) + boolean(false) +
               name("collections", "OrderedDict") + ")R") +
         "R";
}

std::string whole(std::string_view value) { return std::string("\x80\x02") + std::string(value) + "."; }

}  // namespace pickles

Result<TorchWriter> TorchWriter::create(const std::filesystem::path& path) {
  TorchWriter out;
  out.path_ = path;
  out.fd_ = Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!out.fd_) return os_error(errno, path.string());
  return out;
}

Status TorchWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_.get(), bytes.data(), std::min<size_t>(bytes.size(), size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, path_.string());
    bytes = bytes.subspan(static_cast<size_t>(n));
    at_ += n;
  }
  return {};
}

Result<TorchWriter::Place> TorchWriter::add(std::string_view pickle, std::span<const std::byte> storage) {
  if (std::ssize(storage) > kMaxStorageBytes) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: an archive of {} bytes", path_.string(), storage.size())};
  }
  struct Entry {
    std::string_view name;
    std::span<const std::byte> data;
  };
  std::vector<Entry> entries = {{"archive/data.pkl", bytes_of(pickle)}, {"archive/byteorder", bytes_of("little")}};
  if (!storage.empty()) entries.push_back({"archive/data/0", storage});
  entries.push_back({"archive/version", bytes_of("3\n")});
  const int64_t begin = at_;
  std::string directory;
  for (const Entry& entry : entries) {
    const int64_t offset = at_ - begin, front = kLocalHeader + std::ssize(entry.name) + kExtraHeader;
    const int64_t padding = (kAlignment - (offset + front) % kAlignment) % kAlignment;
    const std::string stamp = little(0, 4) + little(crc_of(entry.data), 4) + little(entry.data.size(), 4) +
                              little(entry.data.size(), 4) + little(entry.name.size(), 2);
    std::string head = std::string("PK\x03\x04") + little(0, 6) + stamp +
                       little(static_cast<uint64_t>(kExtraHeader + padding), 2) + std::string(entry.name) + "FB" +
                       little(static_cast<uint64_t>(padding), 2) + std::string(static_cast<size_t>(padding), 'Z');
    directory += std::string("PK\x01\x02") + little(0, 8) + stamp + little(0, 12) +
                 little(static_cast<uint64_t>(offset), 4) + std::string(entry.name);
    RT_TRY(write(bytes_of(head)));
    RT_TRY(write(entry.data));
  }
  const int64_t directory_at = at_ - begin;
  const auto count = static_cast<uint64_t>(entries.size());
  RT_TRY(write(bytes_of(directory + "PK\x05\x06" + little(0, 4) + little(count, 2) + little(count, 2) +
                        little(directory.size(), 4) + little(static_cast<uint64_t>(directory_at), 4) + little(0, 2))));
  return Place{begin, at_ - begin};
}

Status TorchWriter::finish() {
  if (sync_to_disk(fd_.get()) != 0) return os_error(errno, path_.string());
  fd_ = Fd();
  return {};
}

}  // namespace cairn::convert
