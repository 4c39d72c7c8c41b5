#include "ckpt/persist/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "ckpt/persist/hdf5_file.h"
#include "runtime/core/random.h"

namespace cairn::ckpt {
namespace {

static_assert(std::endian::native == std::endian::little, "hash arrays are patched in memory order");

constexpr int64_t kMaxCachedBytes = int64_t{64} << 20;  // of one file's structure; larger ones are not kept

template <typename T>
T load(std::span<const std::byte> bytes, size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

std::span<const std::byte> as_value(const std::vector<uint64_t>& hashes) { return std::as_bytes(std::span(hashes)); }

// Everything in the structure that does not change from save to save.
std::string layout_key(const Manifest& manifest, std::span<const ShardEntry> shards) {
  std::string key;
  key.reserve(shards.size() * 96);
  const auto number = [&](int64_t n) { key.append(reinterpret_cast<const char*>(&n), sizeof(n)); };
  const auto text = [&](const std::string& t) {
    number(static_cast<int64_t>(t.size()));
    key += t;
  };
  const auto numbers = [&](const std::vector<int64_t>& v) {
    number(static_cast<int64_t>(v.size()));
    for (const int64_t n : v) number(n);
  };
  for (const ShardEntry& shard : shards) {
    const TensorEntry& tensor = manifest.tensors[static_cast<size_t>(shard.tensor)];
    text(tensor.kind);
    text(tensor.name);
    number(static_cast<int64_t>(tensor.dtype));
    numbers(tensor.shape);
    numbers(shard.box.lo);
    numbers(shard.box.hi);
    number(shard.chunk_bytes);
    number(static_cast<int64_t>(shard.hashes.size()));
  }
  return key;
}

constexpr int64_t kHeaderBytes =
    (int64_t{64} << 10) - 128;  // an attribute above this does not fit into an object header

// Blocks of an object header are small; one that claims more is not what we look for.
constexpr int64_t kMaxBlockBytes = int64_t{1} << 20;

}  // namespace

uint32_t lookup3(std::span<const std::byte> bytes) {
  const auto rotate = [](uint32_t x, int k) { return std::rotl(x, k); };
  uint32_t a = 0xdeadbeef + static_cast<uint32_t>(bytes.size()), b = a, c = a;
  size_t at = 0, left = bytes.size();
  while (left > 12) {
    a += load<uint32_t>(bytes, at);
    b += load<uint32_t>(bytes, at + 4);
    c += load<uint32_t>(bytes, at + 8);
    a -= c, a ^= rotate(c, 4), c += b;
    b -= a, b ^= rotate(a, 6), a += c;
    c -= b, c ^= rotate(b, 8), b += a;
    a -= c, a ^= rotate(c, 16), c += b;
    b -= a, b ^= rotate(a, 19), a += c;
    c -= b, c ^= rotate(b, 4), b += a;
    at += 12;
    left -= 12;
  }
  if (left == 0) return c;
  std::byte tail[12] = {};
  std::memcpy(tail, bytes.data() + at, left);
  a += load<uint32_t>(tail, 0);
  b += load<uint32_t>(tail, 4);
  c += load<uint32_t>(tail, 8);
  c ^= b, c -= rotate(b, 14);
  a ^= c, a -= rotate(c, 11);
  b ^= a, b -= rotate(a, 25);
  c ^= b, c -= rotate(b, 16);
  a ^= c, a -= rotate(c, 4);
  b ^= a, b -= rotate(a, 14);
  c ^= b, c -= rotate(b, 24);
  return c;
}

Status FileLayout::build(const Manifest& manifest, std::span<const ShardEntry> shards) {
  RT_TRY_SET(const std::unique_ptr<Hdf5Writer> h5,
             Hdf5Writer::create(manifest.step, static_cast<int64_t>(shards.size())));
  offsets_.clear();
  for (const ShardEntry& shard : shards) {
    RT_TRY_SET(const int64_t offset, h5->place(manifest.tensors[static_cast<size_t>(shard.tensor)], shard.box));
    RT_CHECK(shard.bytes < kIoAlign || offset % kIoAlign == 0, "HDF5 put {} bytes at offset {}", shard.bytes, offset);
    offsets_.push_back(offset);
  }
  RT_TRY_SET(headers_, h5->header_addresses());
  for (size_t i = 0; i < shards.size(); ++i)
    RT_TRY(h5->set_hashes(static_cast<int64_t>(i), shards[i].chunk_bytes, shards[i].hashes));
  RT_TRY(h5->finish());
  image_ = h5->take_image();
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].bytes < kIoAlign) image_->touch(offsets_[i], shards[i].bytes);
  }
  return {};
}

Result<std::unique_ptr<FileLayout>> FileLayout::make(const Manifest& manifest, std::span<const ShardEntry> shards) {
  std::vector<ShardEntry> made_up(shards.begin(), shards.end());
  uint64_t next = 1;  // every hash another one: what is found below is then surely what was put there
  for (ShardEntry& shard : made_up) {
    for (uint64_t& hash : shard.hashes) hash = mix64(next++);
  }
  std::unique_ptr<FileLayout> out(new FileLayout);
  out->key_ = layout_key(manifest, shards);
  RT_TRY(out->build(manifest, made_up));
  for (size_t i = 0; i < made_up.size(); ++i) {
    const std::span<const std::byte> value = as_value(made_up[i].hashes);
    std::optional<Patch> patch = out->find_attribute(out->headers_[i], "chunk_xxh3_64", value);
    if (!patch && std::ssize(value) > kHeaderBytes) patch = out->find_outside_headers(value);
    if (!patch) return out;
    out->patches_.push_back(*patch);
  }
  const std::optional<Patch> step =
      out->find_attribute(out->headers_.back(), "step", std::as_bytes(std::span(&manifest.step, 1)));
  if (!step) return out;
  out->patches_.push_back(*step);
  out->patchable_ = true;
  return out;
}

// Object header, version 2 (HDF5 file format specification 3.0, IV.A.1.b): "OHDR", version, flags, optional times and
// attribute limits, size of the messages of this block, messages, checksum; continuation blocks are "OCHK", messages,
// checksum. An attribute message, version 3 (IV.A.2.m): version, flags, sizes of name, type and space, character set,
// then these three and the value.
std::optional<FileLayout::Patch> FileLayout::find_attribute(int64_t header, std::string_view name,
                                                            std::span<const std::byte> value) {
  std::vector<Block> blocks;
  std::vector<std::byte> bytes(40);
  if (!image_->get(header, bytes).ok() || std::memcmp(bytes.data(), "OHDR\x02", 5) != 0) return std::nullopt;
  const auto flags = static_cast<unsigned>(bytes[5]);
  size_t messages = 6;
  if (flags & 0x20) messages += 16;
  if (flags & 0x10) messages += 4;
  const size_t width = size_t{1} << (flags & 3);
  int64_t size = 0;
  std::memcpy(&size, bytes.data() + messages, width);
  messages += width;
  const size_t message_header = flags & 0x04 ? 6 : 4;
  if (size < 0 || size > kMaxBlockBytes) return std::nullopt;
  blocks.push_back({header, header + static_cast<int64_t>(messages) + size + 4});

  for (size_t k = 0; k < blocks.size() && k < 64; ++k) {
    const Block block = blocks[k];
    const int64_t length = block.end - block.begin;
    if (length < 8 || length > kMaxBlockBytes || block.begin < 0) return std::nullopt;
    bytes.resize(static_cast<size_t>(length));
    if (!image_->get(block.begin, bytes).ok()) return std::nullopt;
    const size_t end = bytes.size() - 4;
    if (lookup3(std::span(bytes).first(end)) != load<uint32_t>(bytes, end)) return std::nullopt;
    if (k > 0 && std::memcmp(bytes.data(), "OCHK", 4) != 0) return std::nullopt;
    size_t at = k == 0 ? messages : 4;
    while (at + message_header <= end) {  // what is left below the size of a message is a gap
      const auto type = static_cast<unsigned>(bytes[at]);
      const size_t data = at + message_header, data_bytes = load<uint16_t>(bytes, at + 1);
      if (data + data_bytes > end) return std::nullopt;
      if (type == 0x10 && data_bytes >= 16) {
        const auto where = load<int64_t>(bytes, data), count = load<int64_t>(bytes, data + 8);
        if (where < 0 || count < 8 || count > kMaxBlockBytes) return std::nullopt;
        blocks.push_back({where, where + count});
      }
      if (type == 0x0c && data_bytes >= 9 && bytes[data] == std::byte{3}) {
        const size_t name_bytes = load<uint16_t>(bytes, data + 2), type_bytes = load<uint16_t>(bytes, data + 4);
        const size_t before = 9 + name_bytes + type_bytes + load<uint16_t>(bytes, data + 6);
        const bool fits = name_bytes == name.size() + 1 && before + value.size() == data_bytes;
        if (fits && std::memcmp(bytes.data() + data + 9, name.data(), name.size()) == 0 &&
            std::memcmp(bytes.data() + data + before, value.data(), value.size()) == 0) {
          return Patch{block.begin + static_cast<int64_t>(data + before), static_cast<int64_t>(value.size()), block};
        }
      }
      at = data + data_bytes;
    }
  }
  return std::nullopt;
}

// An attribute that is too large for an object header is a huge object of the fractal heap (III.G): one piece of the
// file that holds the message and nothing else, and no checksum covers it. So its value is found by its bytes.
std::optional<FileLayout::Patch> FileLayout::find_outside_headers(std::span<const std::byte> value) {
  std::vector<std::byte> room(8 + kIoAlign), found(value.size());  // the end of the page before, and a page
  int64_t before = -2;
  for (const auto& [number, page] : image_->pages()) {
    std::memcpy(room.data(), room.data() + kIoAlign, 8);
    std::memcpy(room.data() + 8, page->data(), kIoAlign);
    auto at = number == before + 1 ? room.begin() : room.begin() + 8;
    before = number;
    while ((at = std::search(at, room.end(), value.begin(), value.begin() + 8)) != room.end()) {
      const int64_t offset = number * kIoAlign + (at - room.begin()) - 8;
      if (!image_->get(offset, found).ok()) return std::nullopt;
      if (std::equal(value.begin(), value.end(), found.begin()))
        return Patch{offset, static_cast<int64_t>(value.size()), {}};
      ++at;
    }
  }
  return std::nullopt;
}

void FileLayout::put_value(const Patch& patch, std::span<const std::byte> value) {
  RT_CHECK(static_cast<int64_t>(value.size()) == patch.bytes, "{} bytes for an attribute of {}", value.size(),
           patch.bytes);
  image_->put(patch.offset, value);
  if (patch.block.end == 0) return;
  std::vector<std::byte> block(static_cast<size_t>(patch.block.end - patch.block.begin - 4));
  RT_CHECK(image_->get(patch.block.begin, block).ok(), "an image in memory does not read");
  const uint32_t checksum = lookup3(block);
  image_->put(patch.block.end - 4, std::as_bytes(std::span(&checksum, 1)));
}

Status FileLayout::fill_in(const Manifest& manifest, std::span<const ShardEntry> shards) {
  if (patchable_) {
    for (size_t i = 0; i < shards.size(); ++i) put_value(patches_[i], as_value(shards[i].hashes));
    put_value(patches_.back(), std::as_bytes(std::span(&manifest.step, 1)));
    return {};
  }
  const std::vector<int64_t> before = offsets_;
  const int64_t size_before = size_bytes();
  RT_TRY(build(manifest, shards));
  RT_CHECK(offsets_ == before && size_bytes() == size_before, "HDF5 laid the same datasets out in another way");
  return {};
}

int64_t FileLayout::memory_bytes() const {
  return static_cast<int64_t>(key_.size() + image_->pages().size() * sizeof(Hdf5Image::Page) + offsets_.size() * 64);
}

Result<std::unique_ptr<FileLayout>> SaveCache::take(const Manifest& manifest, const std::string& file_name,
                                                    std::span<const ShardEntry> shards) {
  {
    const std::lock_guard lock(mutex_);
    const auto it = kept_.find(file_name);
    if (it != kept_.end() && it->second && it->second->key() == layout_key(manifest, shards)) {
      ++hits_;
      return std::move(it->second);
    }
  }
  return FileLayout::make(manifest, shards);
}

void SaveCache::put_back(const std::string& file_name, std::unique_ptr<FileLayout> layout) {
  const bool worth_it = layout->patchable() && layout->memory_bytes() <= kMaxCachedBytes;
  const std::lock_guard lock(mutex_);
  if (worth_it) {
    kept_[file_name] = std::move(layout);
  } else {
    kept_.erase(file_name);
  }
}

int64_t SaveCache::buffer_bytes(int64_t bytes) const {
  return std::max(bytes / 2, bytes - bytes / 16 - layout_bytes());
}

int64_t SaveCache::hits() const {
  const std::lock_guard lock(mutex_);
  return hits_;
}

int64_t SaveCache::layout_bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [name, layout] : kept_) bytes += layout ? layout->memory_bytes() : 0;
  return bytes;
}

int64_t SaveCache::memory_bytes() const { return layout_bytes() + buffers_->memory_bytes(); }

}  // namespace cairn::ckpt
