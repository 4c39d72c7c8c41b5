#include "ckpt/persist/read.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <optional>

#include "ckpt/codec/codec.h"
#include "ckpt/codec/work_pool.h"
#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/read_pipeline.h"
#include "ckpt/persist/stream_copy.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxExtentBytes = (int64_t{4} << 20) - 2 * kIoAlign;  // of merged reads: whole pages fit a request
constexpr int64_t kGapBytes = int64_t{16} << 10;                        // reads that are closer become one
constexpr int64_t kPassBytes = int64_t{128} << 10;      // hashed and copied while the cache of a core holds them
constexpr int64_t kUnverifiedBytes = int64_t{4} << 20;  // of one read where no chunk says how much
constexpr int64_t kInPlaceBytes = int64_t{64} << 10;    // below this a copy is cheaper than a request of its own

// A part of a range, from one task.
struct Piece {
  // Of a coded shard: file bytes to be read are the stored chunk, those that are wanted count as the shard's addresses.
  int64_t task_offset = 0, task_bytes = 0;  // file bytes that must be read for it (the chunk, with verify)
  int64_t file = 0, shard = 0, chunk = -1;
  int64_t offset = 0, bytes = 0;     // file bytes that are wanted; of several rows, with what lies between them
  std::byte* dst = nullptr;          // null where there are several rows
  const ReadRange* range = nullptr;  // whose rows
  bool coded = false;
};

bool same_task(const Piece& a, const Piece& b) {
  return a.file == b.file && a.task_offset == b.task_offset && a.task_bytes == b.task_bytes;
}

// Whether what is read for it is, as it was read, what is wanted, in one place.
bool is_whole_task(const Piece& piece) {
  return !piece.coded && piece.dst != nullptr && piece.bytes == piece.task_bytes;
}

// Row `row` of the range, as far as it lies within [begin, end) of the file, goes to dst.
struct RowPart {
  int64_t offset = 0, bytes = 0;
  std::byte* dst = nullptr;
};

RowPart clip_row(const ReadRange& range, int64_t row, int64_t begin, int64_t end) {
  const int64_t at = range.offset + row * range.source_stride;
  const int64_t from = std::max(at, begin);
  return {from, std::min(at + range.bytes, end) - from, range.dst + row * range.target_stride + (from - at)};
}

// The first row that reaches behind `offset`.
int64_t row_behind(const ReadRange& range, int64_t offset) {
  const int64_t over = offset - (range.offset + range.bytes);
  return over < 0 || range.rows == 1 ? 0 : over / range.source_stride + 1;
}

// copy(to, from) for all that a piece wants of `bytes`, which begin at `offset` of the file.
template <typename Copy>
void scatter(const Piece& piece, int64_t offset, std::span<const std::byte> bytes, const Copy& copy) {
  const auto part = [&](std::byte* to, int64_t at, int64_t n) {
    copy(to, bytes.subspan(static_cast<size_t>(at - offset), static_cast<size_t>(n)));
  };
  if (piece.dst != nullptr) return part(piece.dst, piece.offset, piece.bytes);
  const ReadRange& range = *piece.range;
  const int64_t end = piece.offset + piece.bytes;
  for (int64_t row = row_behind(range, piece.offset); range.offset + row * range.source_stride < end; ++row) {
    const RowPart clipped = clip_row(range, row, piece.offset, end);
    part(clipped.dst, clipped.offset, clipped.bytes);
  }
}

uint64_t hash_and_copy(std::span<const std::byte> from, std::byte* to) {
  StreamingHash hash;
  for (int64_t at = 0; at < std::ssize(from); at += kPassBytes) {
    const std::span<const std::byte> pass = from.subspan(at, std::min(kPassBytes, std::ssize(from) - at));
    hash.update(pass);
    stream_copy(to + at, pass);
  }
  return hash.digest();
}

// Chunks that are being undone while others are read.
class Decoding {
 public:
  explicit Decoding(int64_t threads) : pool_(threads) { decoders_.resize(static_cast<size_t>(pool_.threads())); }

  /// `pieces`: of one chunk; they stay until the end. What was wrong is told by a later call or by finish().
  Status add(const fs::path& dir, const Manifest& m, std::span<const Piece> pieces, std::span<const std::byte> stored) {
    while (!results_.empty() && results_.front().wait_for(std::chrono::seconds(0)) == std::future_status::ready)
      RT_TRY(first_result());
    auto bytes = std::make_shared<std::vector<std::byte>>(stored.begin(), stored.end());  // read buffers are reused
    results_.push_back(pool_.submit([this, &dir, &m, pieces, bytes](int64_t thread) -> Status {
      const Piece& head = pieces.front();
      const ShardEntry& shard = m.shards[static_cast<size_t>(head.shard)];
      const StoredChunk& chunk = shard.stored[static_cast<size_t>(head.chunk)];
      const int64_t elem = dtype_size_bytes(m.tensors[static_cast<size_t>(shard.tensor)].dtype);
      ChunkDecoder& decoder = decoders_[static_cast<size_t>(thread)];
      const auto undo = [&](std::span<std::byte> to) {
        return decoder.decode(*bytes, chunk.filter_mask, elem, to)
            .with((dir / describe_chunk(m, shard, head.chunk)).string());
      };
      if (pieces.size() == 1 && head.dst != nullptr && head.bytes == shard.chunk_bytes)
        return undo(std::span(head.dst, static_cast<size_t>(head.bytes)));
      std::vector<std::byte> whole(static_cast<size_t>(shard.chunk_bytes));
      RT_TRY(undo(whole));
      const int64_t begin = shard.offset + head.chunk * shard.chunk_bytes;
      for (const Piece& piece : pieces) {
        scatter(piece, begin, whole,
                [](std::byte* to, std::span<const std::byte> from) { std::memcpy(to, from.data(), from.size()); });
      }
      return {};
    }));
    return {};
  }
  Status finish() {
    while (!results_.empty()) RT_TRY(first_result());
    return {};
  }

 private:
  Status first_result() {
    std::future<Status> result = std::move(results_.front());
    results_.pop_front();
    return result.get();
  }

  std::vector<ChunkDecoder> decoders_;  // one a thread
  std::deque<std::future<Status>> results_;
  WorkPool pool_;  // goes first, and finishes its jobs
};

}  // namespace

std::string describe_chunk(const Manifest& m, const ShardEntry& shard, int64_t chunk) {
  int64_t begin = shard.offset + chunk * shard.chunk_bytes;
  int64_t end = std::min(begin + shard.chunk_bytes, shard.offset + shard.bytes);
  if (shard.codec != Codec::kRaw) {
    begin = shard.stored[static_cast<size_t>(chunk)].offset;
    end = begin + shard.stored[static_cast<size_t>(chunk)].bytes;
  }
  const FileEntry& file = m.files[static_cast<size_t>(shard.file)];
  return fmt::format("{}{}: {}: chunk {} of {} (file bytes {}:{})",
                     file.step < 0 ? "" : "../" + step_dir_name(file.step) + "/", file.name, describe_shard(m, shard),
                     chunk, shard.hashes.size(), begin, end);
}

struct CheckpointReader::Impl {
  IoBackend& io;
  fs::path dir;
  Manifest manifest;
  ReadOptions options;
  std::vector<std::unique_ptr<IoFile>> files;  // as the manifest's; null: not open
  struct Extent {
    int64_t file = 0, offset = 0, shard = 0;
    bool operator<(const Extent& o) const { return file != o.file ? file < o.file : offset < o.offset; }
  };
  std::vector<Extent> extents;  // of all shards, sorted
  std::vector<int64_t> recent;  // files that are open, the last used one last
  ReadStats stats = {};
  BufferStore own_buffers{options.window_bytes};
  BufferStore* buffers = options.buffers != nullptr ? options.buffers : &own_buffers;

  /// `reads`: that may be under way in the file that is closed for it.
  Result<IoFile*> file(int64_t index, ReadPipeline& reads) {
    std::unique_ptr<IoFile>& slot = files[static_cast<size_t>(index)];
    if (slot) {
      const auto at = std::find(recent.rbegin(), recent.rend(), index).base();
      std::rotate(at - 1, at, recent.end());
      return slot.get();
    }
    if (!recent.empty() && std::ssize(recent) >= options.open_files) {
      std::unique_ptr<IoFile>& oldest = files[static_cast<size_t>(recent.front())];
      RT_TRY(reads.finish(*oldest));
      oldest.reset();
      recent.erase(recent.begin());
    }
    const FileEntry& entry = manifest.files[static_cast<size_t>(index)];
    RT_TRY_SET(slot, io.open(checkpoint_file_path(dir, entry.step, entry.name)));
    recent.push_back(index);
    return slot.get();
  }

  Result<int64_t> shard_of(const ReadRange& range) const {
    const auto it = std::upper_bound(extents.begin(), extents.end(), Extent{range.file, range.offset});
    if (it != extents.begin() && range.bytes >= 0 && range.rows >= 1) {
      const int64_t index = std::prev(it)->shard;
      const ShardEntry& shard = manifest.shards[static_cast<size_t>(index)];
      const int64_t within = range.offset - shard.offset;
      if (shard.file == range.file && within <= shard.bytes && range.bytes <= shard.bytes - within) {
        if (range.rows == 1) return index;
        const int64_t behind = shard.bytes - within - range.bytes;  // the first row
        if (range.source_stride > 0 && range.source_stride >= range.bytes && range.target_stride >= range.bytes &&
            range.rows - 1 <= behind / range.source_stride)
          return index;
      }
    }
    const std::string rows = range.rows == 1 ? ""
                                             : fmt::format("{} rows, {} apart (to {} apart), of ", range.rows,
                                                           range.source_stride, range.target_stride);
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}{} bytes at offset {} of file {} lie in no shard",
                                                       dir.string(), rows, range.bytes, range.offset, range.file)};
  }

  /// Adds the pieces of a range of shard `s`: one a chunk, however many rows touch it.
  void cut_at_chunks(const ReadRange& range, int64_t s, std::vector<Piece>& pieces) const {
    const ShardEntry& shard = manifest.shards[static_cast<size_t>(s)];
    const bool coded = shard.codec != Codec::kRaw;
    const int64_t range_end = range.offset + range.span_bytes();
    for (int64_t at = range.offset; at < range_end;) {  // always a wanted byte
      const int64_t chunk = (at - shard.offset) / shard.chunk_bytes;
      const int64_t chunk_begin = shard.offset + chunk * shard.chunk_bytes;
      const int64_t chunk_bytes = std::min(shard.chunk_bytes, shard.offset + shard.bytes - chunk_begin);
      const int64_t chunk_end = chunk_begin + chunk_bytes;
      Piece piece{chunk_begin, chunk_bytes, range.file, s, chunk, at, std::min(range_end, chunk_end) - at};
      const int64_t row = row_behind(range, at);
      if (row + 1 < range.rows && range.offset + (row + 1) * range.source_stride < chunk_end) {
        piece.range = &range;
      } else {
        const RowPart only = clip_row(range, row, at, chunk_end);
        piece.bytes = only.bytes;
        piece.dst = only.dst;
      }
      if (coded) {
        piece.task_offset = shard.stored[static_cast<size_t>(chunk)].offset;
        piece.task_bytes = shard.stored[static_cast<size_t>(chunk)].bytes;
        piece.coded = true;
      }
      pieces.push_back(piece);
      at = std::max(chunk_end, range.offset + row_behind(range, chunk_end) * range.source_stride);
    }
  }

  /// Adds the pieces of a range whose chunks do not matter.
  static void cut_at_rows(const ReadRange& range, int64_t s, std::vector<Piece>& pieces) {
    for (int64_t row = 0; row < range.rows; ++row) {
      for (int64_t at = 0; at < range.bytes; at += kUnverifiedBytes) {
        const int64_t offset = range.offset + row * range.source_stride + at;
        const int64_t bytes = std::min(kUnverifiedBytes, range.bytes - at);
        pieces.push_back({offset, bytes, range.file, s, -1, offset, bytes, range.dst + row * range.target_stride + at});
      }
    }
  }

  Status check_and_scatter(std::span<const Piece> pieces, int64_t extent_offset, std::span<const std::byte> bytes,
                           bool in_place, Decoding* decoding) const {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      const bool first_of_task = i == 0 || !same_task(pieces[i - 1], piece);
      const auto task = [&] {
        return bytes.subspan(static_cast<size_t>(piece.task_offset - extent_offset),
                             static_cast<size_t>(piece.task_bytes));
      };
      bool copied = in_place;
      if (options.verify && first_of_task) {
        const ShardEntry& shard = manifest.shards[static_cast<size_t>(piece.shard)];
        const uint64_t expected = shard.hashes[static_cast<size_t>(piece.chunk)];
        copied = copied || (is_whole_task(piece) && piece.bytes > kPassBytes);
        const uint64_t found = copied && !in_place ? hash_and_copy(task(), piece.dst) : hash_bytes(task());
        if (found != expected)
          return Error{ErrorCode::kCorrupt, fmt::format("{}: checksum {}, the manifest has {}",
                                                        (dir / describe_chunk(manifest, shard, piece.chunk)).string(),
                                                        hash_to_hex(found), hash_to_hex(expected))};
      }
      if (piece.coded) {
        size_t end = i + 1;
        while (end < pieces.size() && same_task(piece, pieces[end])) ++end;
        if (first_of_task) RT_TRY(decoding->add(dir, manifest, pieces.subspan(i, end - i), task()));
        continue;
      }
      if (!copied) {
        scatter(piece, extent_offset, bytes,
                [](std::byte* to, std::span<const std::byte> from) { stream_copy(to, from); });
      }
    }
    stream_fence();
    return {};
  }
};

Result<Manifest> read_manifest(IoBackend& io, const fs::path& dir) {
  RT_TRY_SET(const std::string json, read_file(io, dir / kManifestName, kMaxManifestBytes + 4096));
  RT_TRY_SET(const std::string table, read_file(io, dir / kTableName, kMaxTableBytes));
  return decode_manifest(json, table, dir.string());
}

Status check_codecs(const Manifest& manifest) {
  for (const ShardEntry& shard : manifest.shards) {
    if (shard.codec == Codec::kRaw || shard.codec == Codec::kShuffleZstd) continue;
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{} is stored as {}, which this build does not decode; read it with a newer build",
                             describe_shard(manifest, shard), codec_name(shard.codec))};
  }
  return {};
}

CheckpointReader::CheckpointReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;
CheckpointReader& CheckpointReader::operator=(CheckpointReader&&) noexcept = default;
CheckpointReader::~CheckpointReader() = default;
const Manifest& CheckpointReader::manifest() const { return impl_->manifest; }
const ReadStats& CheckpointReader::stats() const { return impl_->stats; }

Result<CheckpointReader> CheckpointReader::open(IoBackend& io, const fs::path& dir, const ReadOptions& options) {
  RT_TRY_SET(Manifest manifest, read_manifest(io, dir));
  RT_TRY(check_codecs(manifest).with(dir.string()));
  for (const FileEntry& file : manifest.files) {
    const fs::path path = checkpoint_file_path(dir, file.step, file.name);
    Result<FileStat> stat = io.stat(path);
    if (!stat.ok()) {
      Error error = std::move(stat).error();
      if (is_not_found(error)) error.code = ErrorCode::kCorrupt;
      return error;
    }
    if (stat.value().size_bytes != file.size_bytes)
      return Error{ErrorCode::kCorrupt, fmt::format("{}: {} bytes, the manifest has {}", path.string(),
                                                    stat.value().size_bytes, file.size_bytes)};
  }
  auto impl = std::unique_ptr<Impl>(new Impl{io, dir, std::move(manifest), options, {}, {}, {}});
  impl->files.resize(impl->manifest.files.size());
  impl->extents.reserve(impl->manifest.shards.size());
  for (const ShardEntry& shard : impl->manifest.shards)
    impl->extents.push_back({shard.file, shard.offset, std::ssize(impl->extents)});
  std::sort(impl->extents.begin(), impl->extents.end());
  return CheckpointReader(std::move(impl));
}

Status CheckpointReader::read_ranges(std::span<const ReadRange> ranges) {
  const Manifest& m = impl_->manifest;
  std::vector<Piece> pieces;
  pieces.reserve(ranges.size());
  bool any_coded = false;
  for (const ReadRange& range : ranges) {
    RT_TRY_SET(const int64_t s, impl_->shard_of(range));
    if (range.bytes == 0) continue;
    impl_->stats.wanted_bytes += range.rows * range.bytes;
    const bool coded = m.shards[static_cast<size_t>(s)].codec != Codec::kRaw;
    any_coded = any_coded || coded;
    if (impl_->options.verify || coded) {
      impl_->cut_at_chunks(range, s, pieces);
    } else {
      Impl::cut_at_rows(range, s, pieces);
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    if (a.file != b.file) return a.file < b.file;
    if (a.task_offset != b.task_offset) return a.task_offset < b.task_offset;
    return a.task_bytes != b.task_bytes ? a.task_bytes < b.task_bytes : a.offset < b.offset;
  });

  // Whole chunks that lie side by side in the file and are wanted side by side are read to where they belong, in one
  // request. Returns where such a run from piece i on ends; i when there is none that is worth a request of its own.
  const auto in_place_run = [&](size_t i) {
    const auto whole = [&](size_t k) {
      return is_whole_task(pieces[k]) && (k == 0 || !same_task(pieces[k - 1], pieces[k])) &&
             (k + 1 == pieces.size() || !same_task(pieces[k], pieces[k + 1]));
    };
    if (!impl_->options.huge_pages || !whole(i)) return i;
    int64_t bytes = pieces[i].bytes;
    size_t end = i + 1;
    for (; end < pieces.size() && whole(end); ++end) {
      const Piece& piece = pieces[end];
      if (piece.file != pieces[i].file || piece.offset != pieces[i].offset + bytes ||
          piece.dst != pieces[i].dst + bytes || bytes + piece.bytes > kMaxExtentBytes)
        break;
      bytes += piece.bytes;
    }
    return bytes >= kInPlaceBytes ? end : i;
  };
  std::optional<Decoding> decoding;  // after the pieces that its jobs look at
  if (any_coded) decoding.emplace(impl_->options.codec_threads);
  Decoding* const undo = decoding ? &*decoding : nullptr;
  int64_t bounced = 0;
  for (size_t i = 0; i < pieces.size();) {
    const size_t end = in_place_run(i);
    if (end == i && (i == 0 || !same_task(pieces[i - 1], pieces[i]))) bounced += pieces[i].task_bytes;
    i = std::max(i + 1, end);
  }
  ReadPipeline pipeline(impl_->options.window_bytes, impl_->buffers, bounced);
  for (size_t first = 0; first < pieces.size();) {
    const Piece& head = pieces[first];
    size_t next = in_place_run(first);
    const bool in_place = next > first;
    if (!in_place) next = first + 1;
    int64_t end = pieces[next - 1].task_offset + pieces[next - 1].task_bytes;
    // Several small reads that lie close together are one request.
    while (!in_place && next < pieces.size() && pieces[next].file == head.file) {
      const Piece& piece = pieces[next];
      const int64_t new_end = std::max(end, piece.task_offset + piece.task_bytes);
      const bool same = same_task(pieces[next - 1], piece);
      if (!same && (piece.task_offset > end + kGapBytes || new_end - head.task_offset > kMaxExtentBytes ||
                    in_place_run(next) > next))
        break;
      impl_->stats.gap_bytes += std::max<int64_t>(0, piece.task_offset - end);
      end = new_end;
      ++next;
    }
    RT_TRY_SET(IoFile * file, impl_->file(head.file, pipeline));
    const std::span<const Piece> group = std::span(pieces).subspan(first, next - first);
    const int64_t offset = head.task_offset;
    impl_->stats.read_bytes += end - offset;
    ++impl_->stats.requests;
    const auto done = [this, group, offset, in_place, undo](Status read, std::span<const std::byte> bytes) -> Status {
      RT_TRY(std::move(read));
      return impl_->check_and_scatter(group, offset, bytes, in_place, undo);
    };
    RT_TRY(pipeline.submit(*file, m.files[static_cast<size_t>(head.file)].size_bytes, offset, end - offset,
                           in_place ? head.dst : nullptr, done));
    first = next;
  }
  RT_TRY(pipeline.drain());
  return decoding ? decoding->finish() : Status();
}

Status CheckpointReader::read_shard(int64_t shard, std::span<std::byte> dst) {
  if (shard < 0 || shard >= static_cast<int64_t>(manifest().shards.size()))
    return Error{ErrorCode::kInvalidInput, fmt::format("shard {} of {}", shard, manifest().shards.size())};
  const ShardEntry& entry = manifest().shards[static_cast<size_t>(shard)];
  if (static_cast<int64_t>(dst.size()) != entry.bytes)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("shard {}: room for {} bytes, it has {}", shard, dst.size(), entry.bytes)};
  const ReadRange range{entry.file, entry.offset, entry.bytes, dst.data()};
  return read_ranges(std::span(&range, 1));
}

}  // namespace cairn::ckpt
