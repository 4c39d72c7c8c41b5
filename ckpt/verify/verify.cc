#include "ckpt/verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <ranges>
#include <system_error>
#include <thread>
#include <utility>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/buffer.h"
#include "ckpt/persist/hdf5_file.h"
#include "ckpt/persist/read.h"
#include "runtime/core/cgroup.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kWindowBytes = int64_t{64} << 20;  // asked of the disk at a time: fio is at its best with no more
constexpr int64_t kReadBytes = int64_t{4} << 20;     // neighbours are read together up to this, a chunk always whole
constexpr int64_t kLateBytes = int64_t{256} << 20;   // of payload, read while libhdf5 looks at the structure
constexpr int64_t kKeptBytes = int64_t{256} << 20;   // of structure; beyond it libhdf5 reads the file once more

constexpr int64_t round_down(int64_t n) { return n / kIoAlign * kIoAlign; }
constexpr int64_t round_up(int64_t n) { return round_down(n + kIoAlign - 1); }

// Part of a file with a meaning of its own: a chunk of a shard, or bytes between shards.
struct Segment {
  int64_t offset = 0, bytes = 0;
  int64_t shard = -1, chunk = -1;
};

// What belongs to no shard, kept so that libhdf5 can look at it on any thread without the disk. Payload reads as zero.
class KeptStructure final : public IoFile {
 public:
  explicit KeptStructure(int64_t size_bytes) : size_bytes_(size_bytes) {}
  void keep(int64_t offset, std::span<const std::byte> bytes) {
    if (!extents_.empty()) {
      auto last = std::prev(extents_.end());
      if (last->first + static_cast<int64_t>(last->second.size()) == offset) {
        last->second.insert(last->second.end(), bytes.begin(), bytes.end());
        return;
      }
    }
    extents_[offset].assign(bytes.begin(), bytes.end());
  }
  Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override {
    std::memset(data, 0, static_cast<size_t>(bytes));
    auto it = extents_.upper_bound(offset);
    if (it != extents_.begin()) --it;
    for (; it != extents_.end() && it->first < offset + bytes; ++it) {
      const int64_t begin = std::max(offset, it->first);
      const int64_t end = std::min(offset + bytes, it->first + static_cast<int64_t>(it->second.size()));
      if (begin < end)
        std::memcpy(data + (begin - offset), it->second.data() + (begin - it->first), static_cast<size_t>(end - begin));
    }
    return 0;
  }
  Result<int64_t> size() override { return size_bytes_; }
  Status wait(IoTicket) override { return {}; }
  Status finish() override { return {}; }
  Status close() override { return {}; }
  Result<IoTicket> submit_write(int64_t, const std::byte*, int64_t) override { return read_only(); }
  Result<IoTicket> submit_sync() override { return read_only(); }
  Status truncate(int64_t) override { return read_only(); }
  Status sync() override { return read_only(); }

 private:
  static Error read_only() { return {ErrorCode::kInternal, "structure kept for reading"}; }
  int64_t size_bytes_;
  std::map<int64_t, std::vector<std::byte>> extents_;  // ascending, disjoint
};

// One read on its way: from the disk (main thread), then to a worker, which hashes it.
struct Read {
  Buffer buffer;
  size_t file = 0;
  int64_t from = 0, bytes = 0;  // of the file, whole pages where it has them
  std::vector<Segment> segments;
  bool rest = false;  // some of it is of no shard
  IoTicket ticket = 0;
  std::optional<Error> refused;  // by submit
  const std::byte* at(int64_t offset) const { return buffer.bytes().data() + (offset - from); }
};

bool has_rest(std::span<const Segment> segments) {
  return std::any_of(segments.begin(), segments.end(), [](const Segment& segment) { return segment.shard < 0; });
}

int64_t total_bytes(const Manifest& manifest) {
  int64_t bytes = 0;
  for (const FileEntry& file : manifest.files) bytes += file.size_bytes;
  return bytes;
}

/// That there is memory for: kReadBytes, or more where a chunk is larger; whole huge pages.
int64_t largest_read(const Manifest& manifest) {
  constexpr int64_t kHugePage = int64_t{2} << 20;
  int64_t bytes = kReadBytes;
  for (const ShardEntry& shard : manifest.shards) {
    const int64_t chunk = std::min(shard.chunk_bytes, shard.bytes);
    if (chunk > kReadBytes) bytes = std::max(bytes, chunk + (shard.offset % kIoAlign == 0 ? 0 : 2 * kIoAlign));
  }
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

// The thread that called does all I/O, in the order of the files; workers hash chunks and look at HDF5 structure.
class Verifier {
 public:
  Verifier(IoBackend& io, const fs::path& dir, const Manifest& manifest, const VerifyOptions& options,
           VerifyReport& report)
      : io_(io),
        dir_(dir),
        manifest_(manifest),
        options_(options),
        report_(report),
        total_bytes_(total_bytes(manifest)),
        buffer_bytes_(largest_read(manifest)),
        warmer_(buffer_bytes_, std::min(total_bytes_, kWindowBytes + 2 * buffer_bytes_) / buffer_bytes_ + 1),
        files_(manifest.files.size()) {
    for (size_t s = 0; s < manifest.shards.size(); ++s)
      files_[static_cast<size_t>(manifest.shards[s].file)].shards.push_back(static_cast<int64_t>(s));
    const int64_t threads = options.threads > 0 ? options.threads : std::min<int64_t>(usable_cpus(), 4);
    for (int64_t i = 0; i < threads; ++i) {
      try {
        workers_.emplace_back([this] { work(); });
      } catch (const std::system_error&) {  // a limit of threads: fewer will do
        break;
      }
    }
  }
  ~Verifier() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    for (const std::unique_ptr<Read>& read : reading_) {  // left early: the requests own memory that goes away now
      if (!read->refused) ignore(files_[read->file].file->wait(read->ticket), "enough damage is known");
    }
  }

  /// All files. The damage is in the report afterwards, in the order of the files. Errors: the system refuses one.
  Status run() {
    if (workers_.empty())
      return Error{ErrorCode::kUnavailable, fmt::format("{}: no thread can be started to verify it", dir_.string()),
                   EAGAIN};
    for (size_t f = 0; f < files_.size() && !enough(); ++f) start_file(f);
    while (!reading_.empty() && !enough()) finish_oldest();
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return jobs_.empty() && busy_ == 0; });
    std::stable_sort(found_.begin(), found_.end(), [](const Found& a, const Found& b) {
      return std::pair(a.file, a.damage.offset) < std::pair(b.file, b.damage.offset);
    });
    for (Found& found : found_) {
      if (static_cast<int64_t>(report_.damages.size()) < options_.max_damages)
        report_.damages.push_back(std::move(found.damage));
    }
    return refused_ && report_.damages.empty() ? Status(*std::move(refused_)) : Status();
  }

 private:
  struct FileState {
    std::vector<int64_t> shards;  // by offset once the file has begun
    std::unique_ptr<IoFile> file;
    int64_t size_bytes = 0;
    bool rest_good = true, rest_submitted = false, rest_done = false, all_submitted = false;
    int64_t reads = 0, rest_reads = 0;  // not back yet: all, and those with something of the rest
    StreamingHash rest;
    std::unique_ptr<KeptStructure> kept;
    int64_t kept_bytes = 0;
  };
  struct Found {
    size_t file;
    Damage damage;
  };
  using Job = std::function<void()>;

  bool enough() {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(found_.size() + report_.damages.size()) >= options_.max_damages;
  }
  void add(size_t file, Damage damage) {
    if (damage.shard >= 0) {
      const int64_t t = manifest_.shards[static_cast<size_t>(damage.shard)].tensor;
      damage.kind = manifest_.tensors[static_cast<size_t>(t)].kind;
      damage.tensor = manifest_.tensors[static_cast<size_t>(t)].name;
    }
    const std::lock_guard lock(mutex_);
    found_.push_back({file, std::move(damage)});
  }

  void start_file(size_t index) {
    const FileEntry& entry = manifest_.files[index];
    FileState& state = files_[index];
    Result<std::unique_ptr<IoFile>> file = io_.open(checkpoint_file_path(dir_, entry.step, entry.name));
    if (!file.ok() && file.error().code == ErrorCode::kStopped) {
      refused_ = file.error();
      return;
    }
    if (!file.ok() && is_refused(file.error())) {
      refused_ = Error{ErrorCode::kIo, file.error().message, file.error().os_errno};
      return;
    }
    if (!file.ok()) return add(index, {.file = entry.name, .message = file.error().message});
    const Result<int64_t> size = file.value()->size();
    if (!size.ok()) return add(index, {.file = entry.name, .message = size.error().message});
    if (size.value() != entry.size_bytes) {
      add(index,
          {.file = entry.name,
           .offset = std::min(size.value(), entry.size_bytes),
           .message = fmt::format("{}: {} bytes, the manifest has {}", entry.name, size.value(), entry.size_bytes)});
    }
    state.file = std::move(file).value();
    state.size_bytes = size.value();
    if (options_.structure && entry.step < 0) state.kept = std::make_unique<KeptStructure>(size.value());

    std::vector<Segment> segments;
    for (const int64_t s : state.shards) {
      const ShardEntry& shard = manifest_.shards[static_cast<size_t>(s)];
      for (size_t chunk = 0; chunk < shard.hashes.size(); ++chunk) {
        const auto c = static_cast<int64_t>(chunk);
        const int64_t begin = c * shard.chunk_bytes;
        segments.push_back(shard.stored.empty()
                               ? Segment{shard.offset + begin, std::min(shard.chunk_bytes, shard.bytes - begin), s, c}
                               : Segment{shard.stored[chunk].offset, shard.stored[chunk].bytes, s, c});
      }
    }
    const auto by_offset = [](const Segment& a, const Segment& b) { return a.offset < b.offset; };
    std::sort(segments.begin(), segments.end(), by_offset);
    std::sort(state.shards.begin(), state.shards.end(), [&](int64_t a, int64_t b) {
      return manifest_.shards[static_cast<size_t>(a)].offset < manifest_.shards[static_cast<size_t>(b)].offset;
    });
    report_.shards += static_cast<int64_t>(state.shards.size());

    // Payload and rest in one pass in file order, but for payload at the file's end, which is read when all of the rest
    // has been: libhdf5 then has something to be looked at beside. What lies between the payload of a file of another
    // step is in that step's shards as well: its own manifest covers it, this one covers the payload that it names.
    int64_t late_from = entry.size_bytes;
    for (int64_t late = 0; const Segment& segment : std::views::reverse(segments)) {
      late += segment.bytes;
      if (late > kLateBytes || !state.kept) break;
      late_from = segment.offset;
    }
    std::vector<Segment> group;
    std::vector<std::vector<Segment>> late_groups;
    int64_t at = 0;
    const auto flush = [&] {
      if (group.empty()) return;
      if (group.front().offset >= late_from && !has_rest(group)) {
        late_groups.push_back(std::exchange(group, {}));
      } else {
        submit(index, std::exchange(group, {}));
      }
    };
    const auto put = [&](const Segment& segment) {
      const bool joins = !group.empty() && group.back().offset + group.back().bytes == segment.offset;
      if (!joins || round_up(segment.offset + segment.bytes) - round_down(group.front().offset) > kReadBytes) flush();
      group.push_back(segment);
    };
    const auto rest_until = [&](int64_t end) {
      for (; at < end && entry.step < 0; at += std::min(kReadBytes, end - at))
        put({at, std::min(kReadBytes, end - at), -1, -1});
    };
    for (const Segment& segment : segments) {
      if (enough()) return;
      rest_until(segment.offset);
      put(segment);
      at = segment.offset + segment.bytes;
    }
    rest_until(entry.size_bytes);
    flush();
    state.rest_submitted = true;
    look_whether_done(index);
    for (std::vector<Segment>& late : late_groups) {
      if (enough()) return;
      submit(index, std::move(late));
    }
    state.all_submitted = true;
    look_whether_done(index);
  }

  void submit(size_t index, std::vector<Segment> segments) {
    FileState& state = files_[index];
    const int64_t begin = segments.front().offset, end = segments.back().offset + segments.back().bytes;
    const int64_t from = round_down(begin), to = std::max(end, std::min(state.size_bytes, round_up(end)));
    while (!reading_.empty() && reading_bytes_ + (to - from) > kWindowBytes) finish_oldest();
    std::unique_ptr<Read> read = take(to - from);
    read->file = index;
    read->from = from;
    read->bytes = to - from;
    read->rest = has_rest(segments);
    read->segments = std::move(segments);
    read->refused.reset();
    Result<IoTicket> ticket = state.file->submit_read(from, read->buffer.bytes().data(), to - from);
    if (ticket.ok()) {
      read->ticket = ticket.value();
    } else {
      read->refused = std::move(ticket).error();
    }
    ++state.reads;
    if (read->rest) ++state.rest_reads;
    reading_bytes_ += read->bytes;
    reading_.push_back(std::move(read));
  }

  /// A read whose memory is free. Memory comes touched from the warmer, a fixed amount; what a worker or a read under
  /// way gives back is there sooner than more of it.
  std::unique_ptr<Read> take(int64_t bytes) {
    const auto with = [](Buffer buffer) {
      auto read = std::make_unique<Read>();
      read->buffer = std::move(buffer);
      return read;
    };
    while (bytes <= buffer_bytes_) {
      {
        const std::lock_guard lock(mutex_);
        if (!free_.empty()) {
          std::unique_ptr<Read> read = std::move(free_.back());
          free_.pop_back();
          return read;
        }
      }
      if (std::optional<Buffer> buffer = warmer_.poll()) return with(std::move(*buffer));
      {
        std::unique_lock lock(mutex_);
        if (hashing_bytes_ > 0) {
          idle_.wait(lock, [&] { return !free_.empty() || hashing_bytes_ == 0; });
          continue;
        }
        if (!free_.empty()) continue;
      }
      if (!reading_.empty()) {
        finish_oldest();
      } else if (std::optional<Buffer> buffer = warmer_.wait()) {
        return with(std::move(*buffer));
      } else {
        break;  // none could be made
      }
    }
    Result<Buffer> own = Buffer::allocate(round_up(bytes));
    RT_CHECK(own.ok(), "{}", own.error().message);
    return with(std::move(own).value());
  }
  /// Under mutex_.
  void give_back(std::unique_ptr<Read> read) {
    if (std::ssize(read->buffer.bytes()) == buffer_bytes_) free_.push_back(std::move(read));
  }

  void finish_oldest() {
    std::unique_ptr<Read> read = std::move(reading_.front());
    reading_.pop_front();
    reading_bytes_ -= read->bytes;
    const size_t index = read->file;
    FileState& state = files_[index];
    const FileEntry& entry = manifest_.files[index];
    --state.reads;
    if (read->rest) --state.rest_reads;
    Status status = read->refused ? Status(std::move(*read->refused)) : state.file->wait(read->ticket);
    if (!status.ok()) {
      // Which of them is it? A bad sector must not hide the good chunks beside it.
      std::vector<Segment> good;
      for (const Segment& segment : read->segments) {
        Status one = state.file->read(segment.offset,
                                      read->buffer.bytes().subspan(static_cast<size_t>(segment.offset - read->from),
                                                                   static_cast<size_t>(segment.bytes)));
        if (one.ok()) {
          good.push_back(segment);
          continue;
        }
        count(segment);
        if (segment.shard < 0) state.rest_good = false;
        if (one.error().code == ErrorCode::kStopped) {
          refused_ = one.error();
          continue;
        }
        const std::string place =
            segment.shard < 0
                ? std::string()
                : describe_chunk(manifest_, manifest_.shards[static_cast<size_t>(segment.shard)], segment.chunk) + ": ";
        add(index, {.file = entry.name,
                    .shard = segment.shard,
                    .chunk = segment.chunk,
                    .offset = segment.offset,
                    .bytes = segment.bytes,
                    .message = place + one.error().message});
      }
      if (good.size() == read->segments.size()) {
        add(index, {.file = entry.name,
                    .offset = read->from,
                    .bytes = read->bytes,
                    .message = fmt::format("{}: {} (a second try could read it)", entry.name, status.error().message)});
      }
      read->segments = std::move(good);
    }
    bool payload = false;
    for (const Segment& segment : read->segments) {
      count(segment);
      payload = payload || segment.shard >= 0;
      if (segment.shard >= 0) continue;
      const std::span<const std::byte> bytes(read->at(segment.offset), static_cast<size_t>(segment.bytes));
      state.rest.update(bytes);
      if (state.kept && kept_bytes_ + segment.bytes > kKeptBytes) drop_kept(state);
      if (state.kept) {
        state.kept->keep(segment.offset, bytes);
        state.kept_bytes += segment.bytes;
        kept_bytes_ += segment.bytes;
      }
    }
    if (options_.progress) options_.progress(report_.bytes, total_bytes_);
    if (payload) {
      const std::lock_guard lock(mutex_);
      hashing_bytes_ += read->bytes;
      Read* raw = read.release();  // a std::function must be copyable
      jobs_.push_back([this, raw] {
        check_chunks(*raw);
        const std::lock_guard done(mutex_);
        hashing_bytes_ -= raw->bytes;
        give_back(std::unique_ptr<Read>(raw));
      });
    } else {
      const std::lock_guard lock(mutex_);
      give_back(std::move(read));
    }
    changed_.notify_one();
    look_whether_done(index);
  }

  void count(const Segment& segment) {
    report_.bytes += segment.bytes;
    if (segment.shard >= 0) ++report_.chunks;
  }

  // On a worker.
  void check_chunks(const Read& read) {
    for (const Segment& segment : read.segments) {
      if (segment.shard < 0) continue;
      const ShardEntry& shard = manifest_.shards[static_cast<size_t>(segment.shard)];
      const uint64_t found = hash_bytes(std::span(read.at(segment.offset), static_cast<size_t>(segment.bytes)));
      const uint64_t expected = shard.hashes[static_cast<size_t>(segment.chunk)];
      if (found == expected) continue;
      add(read.file, {.file = manifest_.files[read.file].name,
                      .shard = segment.shard,
                      .chunk = segment.chunk,
                      .offset = segment.offset,
                      .bytes = segment.bytes,
                      .message = fmt::format("{}: checksum {}, the manifest has {}",
                                             describe_chunk(manifest_, shard, segment.chunk), hash_to_hex(found),
                                             hash_to_hex(expected))});
    }
  }

  void look_whether_done(size_t index) {
    FileState& state = files_[index];
    if (state.rest_submitted && state.rest_reads == 0 && !std::exchange(state.rest_done, true)) finish_rest(index);
    if (state.all_submitted && state.reads == 0) {
      ++report_.files;
      state.file.reset();
    }
  }

  /// All that is of no shard has been seen.
  void finish_rest(size_t index) {
    const FileEntry& entry = manifest_.files[index];
    FileState& state = files_[index];
    const bool covered = entry.step < 0;
    if (covered && state.rest_good && state.rest.digest() != entry.rest_hash) {
      state.rest_good = false;
      add(index, {.file = entry.name,
                  .message = fmt::format("{}: HDF5 structure: checksum {}, the manifest has {}", entry.name,
                                         hash_to_hex(state.rest.digest()), hash_to_hex(entry.rest_hash))});
    }
    if (covered && state.rest_good && state.size_bytes >= entry.size_bytes && options_.structure) {
      if (state.kept) {
        const std::lock_guard lock(mutex_);
        jobs_.push_back([this, index] {
          check_structure(index, *files_[index].kept);
          drop_kept(files_[index]);
        });
        changed_.notify_one();
      } else {
        check_structure(index, *state.file);
      }
    } else {
      drop_kept(state);
    }
  }

  void drop_kept(FileState& state) {
    state.kept.reset();
    kept_bytes_ -= std::exchange(state.kept_bytes, 0);
  }

  void check_structure(size_t index, IoFile& file) {
    const FileEntry& entry = manifest_.files[index];
    const std::vector<int64_t>& shards = files_[index].shards;
    std::vector<std::string> paths;
    for (const int64_t s : shards) {
      const ShardEntry& shard = manifest_.shards[static_cast<size_t>(s)];
      paths.push_back(dataset_path(manifest_.tensors[static_cast<size_t>(shard.tensor)], shard.box));
    }
    const Result<std::vector<Hdf5Dataset>> found = find_datasets(file, paths);
    if (!found.ok())
      return add(index, {.file = entry.name, .message = fmt::format("{}: {}", entry.name, found.error().message)});
    for (size_t i = 0; i < shards.size(); ++i) {
      const ShardEntry& shard = manifest_.shards[static_cast<size_t>(shards[i])];
      const Hdf5Dataset& dataset = found.value()[i];
      if (dataset.fits(shard)) continue;
      add(index,
          {.file = entry.name,
           .shard = shards[i],
           .offset = shard.offset,
           .bytes = shard.bytes,
           .message = fmt::format("{}: HDF5 has dataset {} at {} with {} bytes, the manifest has {} at {} with {}",
                                  entry.name, paths[i], dataset.offset, dataset.bytes, describe_shard(manifest_, shard),
                                  shard.offset, shard.bytes)});
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return closing_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      ++busy_;
      lock.unlock();
      job();
      lock.lock();
      --busy_;
      idle_.notify_all();
    }
  }

  IoBackend& io_;
  const fs::path& dir_;
  const Manifest& manifest_;
  const VerifyOptions& options_;
  VerifyReport& report_;
  int64_t total_bytes_ = 0, reading_bytes_ = 0;
  const int64_t buffer_bytes_;  // of all reads but odd ones
  BufferWarmer warmer_;
  std::atomic<int64_t> kept_bytes_{0};
  std::vector<FileState> files_;
  std::deque<std::unique_ptr<Read>> reading_;
  std::optional<Error> refused_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_, idle_;
  std::deque<Job> jobs_;
  std::vector<std::unique_ptr<Read>> free_;
  std::vector<Found> found_;
  int64_t hashing_bytes_ = 0, busy_ = 0;
  bool closing_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace

Result<VerifyReport> verify_checkpoint(IoBackend& io, const fs::path& dir, const VerifyOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  RT_TRY_SET(const FileStat stat, io.stat(dir));
  if (!stat.is_dir) return Error{ErrorCode::kInvalidInput, fmt::format("{}: is no directory", dir.string())};
  VerifyReport report;
  const auto finish = [&] {
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(report);
  };
  const Result<Manifest> manifest = read_manifest(io, dir);
  if (!manifest.ok()) {
    if (is_refused(manifest.error())) return Error{ErrorCode::kIo, manifest.error().message, manifest.error().os_errno};
    if (manifest.error().code == ErrorCode::kUnsupported || manifest.error().code == ErrorCode::kStopped)
      return manifest.error();
    const bool of_table = manifest.error().message.find((dir / kTableName).string()) != std::string::npos;
    report.damages.push_back(
        {.file = std::string(of_table ? kTableName : kManifestName), .message = manifest.error().message});
    return finish();
  }
  RT_TRY(check_codecs(manifest.value()).with(dir.string()));
  // A directory renamed by hand would be loaded as another step.
  if (const auto step = parse_step_dir_name(dir.filename().string()); step && *step != manifest.value().step)
    report.damages.push_back(
        {.file = std::string(kManifestName),
         .message = fmt::format("{}: the manifest is of step {}", dir.string(), manifest.value().step)});
  RT_TRY(Verifier(io, dir, manifest.value(), options, report).run());
  return finish();
}

}  // namespace cairn::ckpt
