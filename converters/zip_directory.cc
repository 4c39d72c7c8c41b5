#include "converters/zip_directory.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <string_view>

namespace cairn::convert {
namespace {

constexpr uint32_t kLocalMagic = 0x04034b50, kCentralMagic = 0x02014b50, kEndMagic = 0x06054b50;
constexpr uint32_t kEnd64Magic = 0x06064b50, kLocator64Magic = 0x07064b50;
constexpr int64_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kLocator64Bytes = 20, kEnd64Bytes = 56;
constexpr int64_t kMaxCommentBytes = 65535;
constexpr int64_t kMaxDirectoryBytes = int64_t{256} << 20;
constexpr int64_t kMaxEntries = 1'100'000;
constexpr uint16_t kEncrypted = 0x0001, kSizesFollow = 0x0008, kStrongEncryption = 0x0040;

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

/// Little-endian numbers out of a text; zero behind its end.
uint64_t number(std::string_view text, int64_t at, int bytes) {
  uint64_t out = 0;
  for (int k = 0; k < bytes; ++k) {
    const auto place = static_cast<size_t>(at + k);
    if (place < text.size()) out |= static_cast<uint64_t>(static_cast<unsigned char>(text[place])) << (8 * k);
  }
  return out;
}

Result<std::string> read_text(const ReadAt& read, int64_t offset, int64_t bytes) {
  std::string out(static_cast<size_t>(bytes), '\0');
  RT_TRY(read(offset, out));
  return out;
}

struct Directory {
  int64_t offset = 0, bytes = 0, entries = 0;
};

Result<Directory> find_directory(int64_t file_bytes, const ReadAt& read) {
  const int64_t tail_bytes = std::min(file_bytes, kEndBytes + kMaxCommentBytes);
  const int64_t tail_offset = file_bytes - tail_bytes;
  RT_TRY_SET(const std::string tail, read_text(read, tail_offset, tail_bytes));
  int64_t at = tail_bytes - kEndBytes;
  while (at >= 0 && (number(tail, at, 4) != kEndMagic ||
                     static_cast<int64_t>(number(tail, at + 20, 2)) != tail_bytes - at - kEndBytes)) {
    --at;
  }
  if (at < 0) return corrupt("the zip archive's end is missing: it is cut short");
  const int64_t end_offset = tail_offset + at;
  Directory out{static_cast<int64_t>(number(tail, at + 16, 4)), static_cast<int64_t>(number(tail, at + 12, 4)),
                static_cast<int64_t>(number(tail, at + 10, 2))};
  if (number(tail, at + 4, 2) != number(tail, at + 6, 2) ||
      (number(tail, at + 4, 2) != 0 && number(tail, at + 4, 2) != 0xffff))
    return unsupported("a zip archive of several parts");
  int64_t directory_end = end_offset;
  if (end_offset >= kLocator64Bytes) {
    RT_TRY_SET(const std::string locator, read_text(read, end_offset - kLocator64Bytes, kLocator64Bytes));
    if (number(locator, 0, 4) == kLocator64Magic) {
      const uint64_t place = number(locator, 8, 8);
      if (place > static_cast<uint64_t>(end_offset - kLocator64Bytes) ||
          end_offset - kLocator64Bytes - static_cast<int64_t>(place) < kEnd64Bytes)
        return corrupt(fmt::format("byte {}: the zip64 end lies outside the file", end_offset - kLocator64Bytes));
      directory_end = static_cast<int64_t>(place);
      RT_TRY_SET(const std::string end, read_text(read, directory_end, kEnd64Bytes));
      if (number(end, 0, 4) != kEnd64Magic) return corrupt(fmt::format("byte {}: no zip64 end", directory_end));
      const uint64_t entries = number(end, 32, 8), bytes = number(end, 40, 8), offset = number(end, 48, 8);
      if (entries > static_cast<uint64_t>(kMaxEntries) || bytes > static_cast<uint64_t>(file_bytes) ||
          offset > static_cast<uint64_t>(file_bytes))
        return corrupt(fmt::format("byte {}: a directory of {} entries in {} bytes at byte {}", directory_end, entries,
                                   bytes, offset));
      out = {static_cast<int64_t>(offset), static_cast<int64_t>(bytes), static_cast<int64_t>(entries)};
    }
  }
  if (out.bytes > kMaxDirectoryBytes || out.entries > kMaxEntries || out.entries > out.bytes / kCentralBytes ||
      out.offset > directory_end - out.bytes) {
    return corrupt(fmt::format("byte {}: a directory of {} entries in {} bytes at byte {} does not fit", end_offset,
                               out.entries, out.bytes, out.offset));
  }
  return out;
}

/// The 64-bit sizes that stand in the extra field where the 32-bit ones are all ones.
struct Sizes {
  uint64_t unpacked, packed, offset;
};
std::optional<Sizes> with_zip64(std::string_view extra, Sizes sizes) {
  constexpr uint64_t kElsewhere = 0xffffffff;
  std::string_view wide;
  while (extra.size() >= 4) {
    const auto id = number(extra, 0, 2), bytes = number(extra, 2, 2);
    if (bytes > extra.size() - 4) break;  // padding need not be well formed
    if (id == 1) {
      wide = extra.substr(4, bytes);
      break;
    }
    extra.remove_prefix(4 + bytes);
  }
  for (uint64_t* size : {&sizes.unpacked, &sizes.packed, &sizes.offset}) {
    if (*size != kElsewhere) continue;
    if (wide.size() < 8) return std::nullopt;
    *size = number(wide, 0, 8);
    wide.remove_prefix(8);
  }
  return sizes;
}

Status check_name(const std::string& name) {
  bool plain = !name.empty() && name.front() != '/' && name.find('\\') == name.npos && name.find('\0') == name.npos;
  for (std::string_view rest = name; plain && !rest.empty();) {
    const std::string_view part = rest.substr(0, rest.find('/'));
    plain = part != ".." && part != "." && !part.empty();
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
  }
  if (plain) return {};
  return corrupt(fmt::format("an entry is called \"{}\": a name must stay inside the archive", name));
}

}  // namespace

Result<std::vector<ZipEntry>> read_zip_directory(int64_t file_bytes, const ReadAt& read) {
  if (file_bytes < kEndBytes) return corrupt(fmt::format("{} bytes are no zip archive", file_bytes));
  RT_TRY_SET(const Directory directory, find_directory(file_bytes, read));
  RT_TRY_SET(const std::string text, read_text(read, directory.offset, directory.bytes));

  struct Extent {
    int64_t begin, end;
    size_t entry;
  };
  std::vector<ZipEntry> entries;
  std::vector<Extent> extents;
  std::set<std::string> names;
  int64_t at = 0;
  for (int64_t k = 0; k < directory.entries; ++k) {
    const auto refuse = [&](std::string_view what) {
      return corrupt(fmt::format("byte {}: entry {} of the directory {}", directory.offset + at, k, what));
    };
    if (directory.bytes - at < kCentralBytes || number(text, at, 4) != kCentralMagic) return refuse("is cut short");
    const auto flags = static_cast<uint16_t>(number(text, at + 8, 2));
    const auto method = number(text, at + 10, 2);
    const auto name_bytes = static_cast<int64_t>(number(text, at + 28, 2));
    const auto extra_bytes = static_cast<int64_t>(number(text, at + 30, 2));
    const auto comment_bytes = static_cast<int64_t>(number(text, at + 32, 2));
    if (directory.bytes - at - kCentralBytes < name_bytes + extra_bytes + comment_bytes) return refuse("is cut short");
    ZipEntry entry{.name = text.substr(static_cast<size_t>(at + kCentralBytes), static_cast<size_t>(name_bytes)),
                   .crc32 = static_cast<uint32_t>(number(text, at + 16, 4))};
    RT_TRY(check_name(entry.name));
    if (!names.insert(entry.name).second) return corrupt(fmt::format("entry \"{}\" is there twice", entry.name));
    const auto named = [&](std::string_view what) { return fmt::format("entry \"{}\": {}", entry.name, what); };
    if ((flags & (kEncrypted | kStrongEncryption)) != 0) return unsupported(named("is encrypted"));
    if (method != 0)
      return unsupported(named(fmt::format("is packed (method {}); torch.save stores entries as they are", method)));
    const std::string_view extra = std::string_view(text).substr(static_cast<size_t>(at + kCentralBytes + name_bytes),
                                                                 static_cast<size_t>(extra_bytes));
    const auto sizes =
        with_zip64(extra, {number(text, at + 24, 4), number(text, at + 20, 4), number(text, at + 42, 4)});
    if (!sizes) return corrupt(named("its 64-bit sizes are missing"));
    if (sizes->unpacked != sizes->packed)
      return corrupt(named(fmt::format("is stored in {} bytes but says to have {}", sizes->packed, sizes->unpacked)));
    if (sizes->offset > static_cast<uint64_t>(directory.offset) ||
        sizes->packed > static_cast<uint64_t>(directory.offset) ||
        directory.offset - static_cast<int64_t>(sizes->offset) < kLocalBytes)
      return corrupt(named(fmt::format("{} bytes at byte {} lie outside the file", sizes->packed, sizes->offset)));

    // The entry's own header, in front of its data.
    const auto header = static_cast<int64_t>(sizes->offset);
    RT_TRY_SET(const std::string local, read_text(read, header, kLocalBytes));
    const auto local_name = static_cast<int64_t>(number(local, 26, 2)),
               local_extra = static_cast<int64_t>(number(local, 28, 2));
    const auto local_flags = static_cast<uint16_t>(number(local, 6, 2));
    if (number(local, 0, 4) != kLocalMagic || number(local, 8, 2) != method || local_name != name_bytes ||
        ((local_flags ^ flags) & (kEncrypted | kStrongEncryption)) != 0 ||
        directory.offset - header - kLocalBytes < local_name + local_extra)
      return corrupt(named(fmt::format("the header at byte {} is not the one that the directory describes", header)));
    RT_TRY_SET(const std::string rest, read_text(read, header + kLocalBytes, local_name + local_extra));
    if (std::string_view(rest).substr(0, static_cast<size_t>(local_name)) != entry.name)
      return corrupt(named(fmt::format("is called otherwise in its header at byte {}", header)));
    const auto own = with_zip64(std::string_view(rest).substr(static_cast<size_t>(local_name)),
                                {number(local, 22, 4), number(local, 18, 4), 0});
    const bool later = (local_flags & kSizesFollow) != 0;  // then they may be zero here
    const auto agrees = [&](uint64_t size) { return size == sizes->packed || (later && size == 0); };
    if (!own || !agrees(own->packed) || !agrees(own->unpacked))
      return corrupt(named(
          fmt::format("its header at byte {} has another size than the directory's {} bytes", header, sizes->packed)));
    entry.offset = header + kLocalBytes + local_name + local_extra;
    entry.bytes = static_cast<int64_t>(sizes->packed);
    if (entry.bytes > directory.offset - entry.offset)
      return corrupt(
          named(fmt::format("{} bytes at byte {} do not fit before the directory", entry.bytes, entry.offset)));
    extents.push_back({header, entry.offset + entry.bytes, entries.size()});
    entries.push_back(std::move(entry));
    at += kCentralBytes + name_bytes + extra_bytes + comment_bytes;
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  std::vector<ZipEntry> out;
  for (size_t k = 0; k < extents.size(); ++k) {
    if (k > 0 && extents[k].begin < extents[k - 1].end)
      return corrupt(fmt::format("entries \"{}\" and \"{}\" overlap at byte {}", out.back().name,
                                 entries[extents[k].entry].name, extents[k].begin));
    out.push_back(std::move(entries[extents[k].entry]));
  }
  return out;
}

}  // namespace cairn::convert
