#include "converters/torch_archive.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "converters/foreign_file.h"

namespace cairn::convert {
namespace {

constexpr int64_t kMaxTextBytes = 64;
constexpr int64_t kBlockBytes = int64_t{4} << 20;
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

}  // namespace

Result<TorchArchive> TorchArchive::open(const std::filesystem::path& path) {
  RT_TRY_SET(ForeignFile file, open_foreign(path));
  return open_part(std::make_shared<const Fd>(std::move(file.fd)), path, 0, file.bytes);
}

Result<TorchArchive> TorchArchive::open_part(std::shared_ptr<const Fd> fd, const std::filesystem::path& path,
                                             int64_t begin, int64_t bytes) {
  TorchArchive out;
  out.path_ = path;
  out.fd_ = std::move(fd);
  struct stat info {};
  if (::fstat(out.fd_->get(), &info) != 0) return os_error(errno, path.string());
  if (begin < 0 || bytes < 0 || begin > info.st_size || bytes > info.st_size - begin) {
    return corrupt(fmt::format("{}: bytes [{}, +{}) are not in its {}", path.string(), begin, bytes, info.st_size));
  }
  out.begin_ = begin;
  out.bytes_ = bytes;
  RT_TRY(out.load().with(path.string()));
  return out;
}

Status TorchArchive::read_at(int64_t offset, std::span<char> out) const {
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

Result<std::string> TorchArchive::text_of(std::string_view name, int64_t max_bytes) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return corrupt(fmt::format("has no entry \"{}{}\"", top_, name));
  const ZipEntry& entry = entries_[found->second];
  if (entry.bytes > max_bytes)
    return corrupt(
        fmt::format("entry \"{}\" has {} bytes, at most {} are expected", entry.name, entry.bytes, max_bytes));
  std::string out(static_cast<size_t>(entry.bytes), '\0');
  RT_TRY(read_at(entry.offset, out));
  const auto crc = static_cast<uint32_t>(::crc32_z(0, reinterpret_cast<const unsigned char*>(out.data()), out.size()));
  if (entry.crc32 != 0 && crc != entry.crc32)
    return corrupt(fmt::format("entry \"{}\": CRC-32 {:08x}, the archive says {:08x}", entry.name, crc, entry.crc32));
  return out;
}

Status TorchArchive::load() {
  std::string head(static_cast<size_t>(std::min<int64_t>(bytes_, 512)), '\0');
  RT_TRY(read_at(0, head));
  RT_TRY(refuse_other_formats(head));
  RT_TRY_SET(entries_,
             read_zip_directory(bytes_, [this](int64_t offset, std::span<char> out) { return read_at(offset, out); }));
  top_ = entries_.empty() ? "" : entries_[0].name.substr(0, entries_[0].name.find('/') + 1);
  if (top_.empty()) return corrupt("the archive has no top folder, as torch.save makes one");
  for (size_t k = 0; k < entries_.size(); ++k) {
    if (!entries_[k].name.starts_with(top_))
      return corrupt(fmt::format("entry \"{}\" is not in the top folder \"{}\"", entries_[k].name, top_));
    by_name_[entries_[k].name.substr(top_.size())] = k;
  }
  if (by_name_.contains("constants.pkl"))
    return unsupported("is a TorchScript archive, a program; save the model's state dict instead");
  if (by_name_.contains("byteorder")) {
    RT_TRY_SET(const std::string order, text_of("byteorder", kMaxTextBytes));
    if (order != "little") return unsupported(fmt::format("byteorder is \"{}\": only little-endian is read", order));
  }
  if (by_name_.contains("version")) {
    RT_TRY_SET(const std::string version, text_of("version", kMaxTextBytes));
    const int64_t n = std::atoll(version.c_str());
    if (n < 1 || n > 10) return unsupported(fmt::format("its version is \"{}\", known are 1 to 10", version));
  }
  if (!by_name_.contains("data.pkl")) return corrupt(fmt::format("has no entry \"{}\"", pickle_name()));
  return {};
}

const ZipEntry* TorchArchive::storage(std::string_view key) const {
  const auto found = by_name_.find(fmt::format("data/{}", key));
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

Status TorchArchive::verify() const {
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
