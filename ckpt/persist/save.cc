// The commit protocol. A reader believes a directory named step-N whose manifest's checksum holds; each step below must
// be durable before the next one begins, and each one's result is checked.
//
//   1. Check that skeleton and parts tile every tensor, and that the disk has room. Nothing is written before.
//   2. Make .tmp-step-N.<writer> and in it, for each part, one file:
//      a. libhdf5 lays the file out in memory (vfd.h); the file is created with its space reserved;
//      b. payload goes chunk by chunk, hashed just before it is written, to the offsets HDF5 gave;
//      c. the chunk hashes become attributes, HDF5 closes its image, the image's pages are written, all but the first;
//      d. fsync; then the page with the superblock; the file is cut to its size; fsync.
//   3. Write shards.bin, fsync; write manifest.json, which has its hash, fsync.
//   4. fsync the temporary directory: its entries are durable.
//   5. rename to step-N, or exchange with an existing step-N.
//   6. fsync the parent: until here a crash may bring the old name back.
//   7. Remove what the exchange has left under the temporary name.
//
// After a failed fsync the whole temporary directory is thrown away, never synced again.
#include "ckpt/persist/save.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

#include "ckpt/format/checksum.h"
#include "ckpt/persist/hdf5_file.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

constexpr int64_t kDirectBytes = int64_t{32} << 10;  // smaller shards: a copy costs less than a request of their own

constexpr int64_t round_down(int64_t n) { return n / kIoAlign * kIoAlign; }

// Spreads the payload over time, and notices a wish to stop.
class Pace {
 public:
  explicit Pace(const SaveOptions& options) : options_(options) {}
  Status before(int64_t bytes) {
    while (true) {
      if (options_.cancel != nullptr && options_.cancel->load(std::memory_order_relaxed))
        return Error{ErrorCode::kStopped, "the save was cancelled"};
      if (options_.max_bytes_per_s <= 0) break;
      const double due_s = static_cast<double>(done_) / static_cast<double>(options_.max_bytes_per_s);
      const double wait_s = due_s - seconds_since(start_);
      if (wait_s <= 0) break;
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(wait_s, 0.05)));
    }
    done_ += bytes;
    return {};
  }

 private:
  const SaveOptions& options_;
  Clock::time_point start_ = Clock::now();
  int64_t done_ = 0;
};

// Chunks on their way from `fill` to the disk. Made before the file that writes from it, and so outlives its writes.
class FillPool {
 public:
  FillPool(int64_t pool_bytes, int64_t chunk_bytes)
      : chunk_bytes_(chunk_bytes), buffers_(std::clamp<int64_t>(pool_bytes / chunk_bytes, 2, 64)) {}

  /// The buffer used longest ago, when `file` has finished with it.
  Result<std::span<std::byte>> next(IoFile& file, int64_t bytes) {
    at_ = (at_ + 1) % buffers_.size();
    Buffer& buffer = buffers_[at_];
    if (!buffer.memory) {
      buffer.memory.reset(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, static_cast<size_t>(chunk_bytes_))));
      if (!buffer.memory)
        return Error{ErrorCode::kUnavailable, fmt::format("no memory for a chunk of {} bytes", chunk_bytes_), ENOMEM};
    }
    if (buffer.ticket) {
      const IoTicket ticket = *buffer.ticket;
      buffer.ticket.reset();
      RT_TRY(file.wait(ticket));
    }
    return std::span(buffer.memory.get(), static_cast<size_t>(bytes));
  }
  /// What next() gave last is being written.
  void writing(IoTicket ticket) { buffers_[at_].ticket = ticket; }
  /// The file has finished all.
  void release() {
    for (Buffer& buffer : buffers_) buffer.ticket.reset();
  }

 private:
  struct Freer {
    void operator()(void* p) const { std::free(p); }
  };
  struct Buffer {
    std::unique_ptr<std::byte, Freer> memory;
    std::optional<IoTicket> ticket;
  };
  int64_t chunk_bytes_;
  std::vector<Buffer> buffers_;
  size_t at_ = 0;
};

// Step 1: files and shards of the manifest with their sizes; offsets and hashes come while writing. To check the tiling
// before, shards get made-up offsets one behind the other.
Status plan_shards(Manifest& manifest, std::span<const WriterPart> parts, const SaveOptions& options) {
  if (!manifest.files.empty() || !manifest.shards.empty())
    return invalid("the skeleton of a save has no files and no shards");
  for (const WriterPart& part : parts) {
    FileEntry file{part.file_name};
    const auto file_index = static_cast<int64_t>(manifest.files.size());
    for (const ShardData& data : part.shards) {
      ShardEntry shard;
      shard.tensor = data.tensor;
      shard.file = file_index;
      shard.box = Box{data.lo, data.hi};
      shard.offset = file.size_bytes;
      shard.bytes = data.bytes;
      shard.chunk_bytes = options.chunk_bytes;
      if (data.bytes < 1 || data.bytes > kMaxTensorBytes || options.chunk_bytes < kMinChunkBytes)
        return invalid(fmt::format("{}: shard {} has {} bytes in chunks of {}", part.file_name, manifest.shards.size(),
                                   data.bytes, options.chunk_bytes));
      if (data.data == nullptr && !data.fill)
        return invalid(fmt::format("{}: shard {} has no bytes", part.file_name, manifest.shards.size()));
      const int64_t chunks = (data.bytes + options.chunk_bytes - 1) / options.chunk_bytes;
      if (!data.hashes.empty() && static_cast<int64_t>(data.hashes.size()) != chunks)
        return invalid(fmt::format("{}: shard {} comes with {} hashes, expected {}", part.file_name,
                                   manifest.shards.size(), data.hashes.size(), chunks));
      shard.hashes = data.hashes.empty() ? std::vector<uint64_t>(static_cast<size_t>(chunks)) : data.hashes;
      file.size_bytes += data.bytes;
      manifest.shards.push_back(std::move(shard));
    }
    manifest.files.push_back(std::move(file));
  }
  Status valid = validate_manifest(manifest);
  if (valid.ok()) return {};
  return invalid("state to save: " + valid.error().message);
}

// XXH3_64 over what belongs to no shard, in file order. `shards` sorted by offset.
uint64_t hash_rest(Hdf5Image& image, std::span<const ShardEntry* const> shards) {
  StreamingHash hash;
  std::vector<std::byte> buffer(64 << 10);
  int64_t at = 0;
  const auto add_until = [&](int64_t end) {
    while (at < end) {
      const auto n = static_cast<size_t>(std::min<int64_t>(end - at, static_cast<int64_t>(buffer.size())));
      RT_CHECK(image.get(at, std::span(buffer).first(n)).ok(), "an image being written does not read");
      hash.update(std::span(buffer).first(n));
      at += static_cast<int64_t>(n);
    }
  };
  for (const ShardEntry* shard : shards) {
    add_until(shard->offset);
    at = shard->offset + shard->bytes;
  }
  add_until(image.eoa);
  return hash.digest();
}

// Steps 2c and 2d: the pages that HDF5 and the payload's ragged ends have filled.
Status write_pages(IoFile& file, const Hdf5Image& image, double& sync_seconds) {
  constexpr size_t kRunPages = 256;
  struct Freer {
    void operator()(void* p) const { std::free(p); }
  };
  const std::unique_ptr<std::byte, Freer> run(
      static_cast<std::byte*>(std::aligned_alloc(kIoAlign, kRunPages * kIoAlign)));
  RT_CHECK(run != nullptr, "no memory for {} bytes", kRunPages * kIoAlign);
  const auto& pages = image.pages();
  for (auto it = pages.upper_bound(0); it != pages.end();) {
    const int64_t first = it->first;
    size_t count = 0;
    for (; it != pages.end() && count < kRunPages && it->first == first + static_cast<int64_t>(count); ++it, ++count)
      std::memcpy(run.get() + count * kIoAlign, it->second->data(), kIoAlign);
    RT_TRY(file.write(first * kIoAlign, std::span(run.get(), count * kIoAlign)));
  }
  const auto sync = [&]() -> Status {
    const auto start = Clock::now();
    Status status = file.sync();
    sync_seconds += seconds_since(start);
    return status;
  };
  RT_TRY(sync());  // all but the superblock is durable
  std::memcpy(run.get(), pages.at(0)->data(), kIoAlign);
  RT_TRY(file.write(0, std::span(run.get(), kIoAlign)));
  RT_TRY(file.truncate(image.eoa));
  return sync();
}

// Step 2 for one file. Fills in offsets, hashes and the file entry.
Status write_part(IoBackend& io, const fs::path& dir, const WriterPart& part, Manifest& manifest, int64_t file_index,
                  std::span<ShardEntry> shards, Pace& pace, FillPool& pool, SaveReport& report) {
  const auto layout_start = Clock::now();
  RT_TRY_SET(const std::unique_ptr<Hdf5Writer> h5,
             Hdf5Writer::create(manifest.step, static_cast<int64_t>(shards.size())));
  for (ShardEntry& shard : shards) {
    RT_TRY_SET(shard.offset, h5->place(manifest.tensors[static_cast<size_t>(shard.tensor)], shard.box));
    RT_CHECK(shard.bytes < kIoAlign || shard.offset % kIoAlign == 0, "HDF5 put {} bytes at offset {}", shard.bytes,
             shard.offset);
  }
  report.layout_seconds += seconds_since(layout_start);
  RT_TRY_SET(const std::unique_ptr<IoFile> file, io.create(dir / part.file_name, h5->size_bytes()));

  // In the order given, which is that of the offsets but for shards too small to be aligned: those wait in the image.
  for (size_t i = 0; i < shards.size(); ++i) {
    ShardEntry& shard = shards[i];
    const ShardData& data = part.shards[i];
    for (int64_t at = 0, chunk = 0; at < shard.bytes; at += shard.chunk_bytes, ++chunk) {
      const int64_t bytes = std::min(shard.chunk_bytes, shard.bytes - at);
      RT_TRY(pace.before(bytes));
      std::span<const std::byte> payload;
      if (data.data != nullptr) {
        payload = std::span(data.data + at, static_cast<size_t>(bytes));
      } else {
        RT_TRY_SET(const std::span<std::byte> room, pool.next(*file, bytes));
        RT_TRY(data.fill(at, room));
        payload = room;
      }
      if (data.hashes.empty()) {
        const auto hash_start = Clock::now();
        shard.hashes[static_cast<size_t>(chunk)] = hash_bytes(payload);
        report.hash_seconds += seconds_since(hash_start);
      }
      // Whole pages from where they lie; the ragged end shares its page with others, so it goes through the image, as
      // do small shards, which leave it together.
      const int64_t direct = shard.bytes >= kDirectBytes ? round_down(bytes) : 0;
      if (direct > 0) {
        RT_TRY_SET(const IoTicket ticket, file->submit_write(shard.offset + at, payload.data(), direct));
        if (data.data == nullptr) pool.writing(ticket);  // for the others finish() waits
      }
      h5->image().put(shard.offset + at + direct, payload.subspan(static_cast<size_t>(direct)));
    }
    report.payload_bytes += shard.bytes;
  }
  const auto attributes_start = Clock::now();
  for (size_t i = 0; i < shards.size(); ++i)
    RT_TRY(h5->set_hashes(static_cast<int64_t>(i), shards[i].chunk_bytes, shards[i].hashes));
  RT_TRY(h5->finish());
  report.layout_seconds += seconds_since(attributes_start);
  RT_TRY(file->finish());
  pool.release();
  RT_TRY(write_pages(*file, h5->image(), report.sync_seconds));
  RT_TRY(file->close());

  std::vector<const ShardEntry*> by_offset;
  for (const ShardEntry& shard : shards) by_offset.push_back(&shard);
  std::sort(by_offset.begin(), by_offset.end(),
            [](const ShardEntry* a, const ShardEntry* b) { return a->offset < b->offset; });
  FileEntry& entry = manifest.files[static_cast<size_t>(file_index)];
  entry.size_bytes = h5->image().eoa;
  entry.rest_hash = hash_rest(h5->image(), by_offset);
  report.file_bytes += entry.size_bytes;
  return {};
}

Status write_all(IoBackend& io, const fs::path& dir, std::span<const WriterPart> parts, const SaveOptions& options,
                 SaveReport& report) {
  Manifest& manifest = report.manifest;
  Pace pace(options);
  FillPool pool(options.fill_bytes, options.chunk_bytes);
  size_t first = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const size_t count = parts[p].shards.size();
    RT_TRY(write_part(io, dir, parts[p], manifest, static_cast<int64_t>(p),
                      std::span(manifest.shards).subspan(first, count), pace, pool, report));
    first += count;
  }
  RT_TRY_SET(const ManifestFiles files, encode_manifest_files(manifest));
  RT_TRY(write_file(io, dir / kTableName, files.table));
  RT_TRY(write_file(io, dir / kManifestName, files.json));
  return io.sync_dir(dir);
}

}  // namespace

WriterId this_writer() {
  static std::atomic<int64_t> saves{0};
  WriterId writer;
  char host[256] = {};
  if (::gethostname(host, sizeof(host) - 1) == 0) writer.host = host;
  writer.pid = ::getpid();
  std::ifstream stat("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(stat)), {});
  // Field 22 counts from 1; the second one is the program's name in parentheses and may hold anything.
  if (const size_t name_end = text.rfind(')'); name_end != std::string::npos) {
    size_t at = name_end + 1;
    for (int field = 2; field < 22 && at != std::string::npos; ++field)
      at = text.find_first_not_of(' ', text.find(' ', at));
    if (at != std::string::npos) writer.start = std::strtoll(text.c_str() + at, nullptr, 10);
  }
  writer.sequence = saves++;
  return writer;
}

Result<SaveReport> save_checkpoint(IoBackend& io, const fs::path& checkpoints_dir, Manifest skeleton,
                                   std::span<const WriterPart> parts, const SaveOptions& options) {
  const auto start = Clock::now();
  SaveReport report;
  report.manifest = std::move(skeleton);
  report.dir = checkpoints_dir / step_dir_name(std::max<int64_t>(0, report.manifest.step));
  const WriterId writer = options.writer ? *options.writer : this_writer();
  if (report.manifest.writer.program.empty()) report.manifest.writer.program = "cairn " CAIRN_VERSION;
  if (report.manifest.writer.host.empty()) report.manifest.writer.host = writer.host;
  RT_TRY(plan_shards(report.manifest, parts, options));
  RT_TRY(make_dirs(io, checkpoints_dir));

  Result<FileStat> existing = io.stat(report.dir);
  if (!existing.ok() && !is_not_found(existing.error())) return std::move(existing).error();
  if (existing.ok() && !options.replace_existing)
    return invalid(fmt::format("{}: step {} is there already; remove it first, or save with replacing allowed",
                               report.dir.string(), report.manifest.step));

  constexpr int64_t kSlackBytes = int64_t{1} << 20;  // metadata and rounding, per file
  const int64_t needed = payload_bytes(report.manifest) + kSlackBytes * static_cast<int64_t>(parts.size() + 1);
  RT_TRY_SET(const int64_t free, io.free_bytes(checkpoints_dir));
  if (free < needed)
    return Error{ErrorCode::kNoSpace,
                 fmt::format("{}: {} bytes free, step {} needs {}: {} are missing", checkpoints_dir.string(), free,
                             report.manifest.step, needed, needed - free)};

  const fs::path work = checkpoints_dir / work_dir_name(kTmpPrefix, report.manifest.step, writer);
  const auto abandon = [&](Error error) -> Error {
    if (Status removed = remove_tree(io, work); !removed.ok())
      error.message += fmt::format(" (and {} could not be removed: {})", work.string(), removed.error().message);
    return std::move(error).with(fmt::format("step {} was not saved", report.manifest.step));
  };
  RT_TRY(io.make_dir(work));
  if (Status written = write_all(io, work, parts, options, report); !written.ok())
    return abandon(std::move(written).error());

  report.replaced = existing.ok();
  Status published = report.replaced ? io.exchange(work, report.dir) : io.rename(work, report.dir);
  if (!published.ok()) return abandon(std::move(published).error());
  if (Status synced = io.sync_dir(checkpoints_dir); !synced.ok()) {
    // Whole, but its name may not outlive a power loss; what it replaced stays where it is for the same reason.
    return std::move(synced).error().with(
        fmt::format("step {} is written and visible, but may be gone after a power loss", report.manifest.step));
  }
  if (report.replaced) {
    if (Status removed = remove_tree(io, work); !removed.ok()) report.leftover = work.filename().string();
  }
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace cairn::ckpt
