// A directory as a second place. The copy's folder is put together under a work name like a local save's, and becomes
// visible by one rename; what was interrupted is taken up file by file: the part of a file that is there already is
// compared with the source and kept as far as it agrees.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/mirror/place.h"
#include "ckpt/persist/save.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/replace.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/core/file_calls.h"

namespace cairn::ckpt {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPieceBytes = int64_t{1} << 20;
constexpr int64_t kSyncBytes = int64_t{64} << 20;  // written between two syncs, so that memory does not fill with it

struct FreeDeleter {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Piece = std::unique_ptr<std::byte, FreeDeleter>;

Result<Piece> make_piece() {
  Piece piece(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, kPieceBytes)));
  if (!piece) return os_error(ENOMEM, "1 MiB to copy with");
  return piece;
}

/// As many bytes as there are, up to `target`.
Result<int64_t> read_some(int fd, int64_t offset, std::span<std::byte> target, const fs::path& path) {
  size_t done = 0;
  while (done < target.size()) {
    const ssize_t n = ::pread(fd, target.data() + done, target.size() - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, path.string());
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  return static_cast<int64_t>(done);
}

Error stopped(const fs::path& path) {
  return Error{ErrorCode::kStopped, fmt::format("{}: the copy was told to stop", path.string())};
}

class DirectoryPlace final : public Place {
 public:
  explicit DirectoryPlace(fs::path root) : root_(std::move(root)) {}
  std::string describe() const override { return root_.string(); }

  Result<std::vector<PlacedStep>> list() override {
    if (std::error_code unknown; fs::exists(root_, unknown)) seen_ = true;
    RT_TRY_SET(const Names names, list_names(io_, root_));
    RT_TRY(finish_replacements(io_, root_, names));
    RT_TRY_SET(const Catalog catalog, list_unlabelled(io_, root_));
    std::vector<PlacedStep> out;
    for (const CheckpointInfo& info : catalog.checkpoints) {
      if (info.unread && info.os_errno == EAGAIN) continue;  // neither of two saves of it holds
      PlacedStep step{.step = info.step, .complete = info.complete, .bytes = info.size_bytes};
      RT_TRY_SET(const std::vector<DirEntry> entries, io_.list(info.dir));
      for (const DirEntry& entry : entries) {
        if (entry.is_dir || !valid_file_name(entry.name)) continue;
        RT_TRY_SET(const FileStat stat, io_.stat(info.dir / entry.name));
        step.files.push_back({entry.name, stat.size_bytes});
      }
      out.push_back(std::move(step));
    }
    return out;
  }

  Status begin(int64_t step) override {
    std::error_code failed;
    bool gone = seen_ && !fs::exists(root_, failed) && !failed;
    for (const std::string& note : notes_) gone = gone || (!fs::exists(root_ / note, failed) && !failed);
    if (gone) return Error{ErrorCode::kUnavailable, fmt::format("{}: {}", root_.string(), kFolderGone)};
    RT_TRY(make_dirs(io_, root_));
    seen_ = true;
    if (!work_.empty() && work_step_ == step && fs::is_directory(work_, failed)) return {};
    work_ = root_ / work_dir_name(kTmpPrefix, step, this_writer());
    work_step_ = step;
    put_.clear();
    RT_TRY_SET(const std::vector<DirEntry> entries, io_.list(root_));
    for (const DirEntry& entry : entries) {
      const std::optional<WorkDir> left = parse_work_dir_name(kTmpPrefix, entry.name);
      if (left && left->step == step && !may_be_alive(left->writer)) {
        return io_.rename(root_ / entry.name, work_);  // a dead copy's work: ours now
      }
    }
    return io_.make_dir(work_);
  }

  Status reserve(int64_t step, int64_t bytes) override {
    RT_CHECK(step == work_step_ && !work_.empty(), "reserve() without begin()");
    RT_TRY_SET(const std::vector<DirEntry> entries, io_.list(work_));
    for (const DirEntry& entry : entries) {  // taken up from a dead copy
      RT_TRY_SET(const FileStat stat, io_.stat(work_ / entry.name));
      bytes -= stat.size_bytes;
    }
    RT_TRY_SET(const int64_t free_bytes, io_.free_bytes(root_));
    if (free_bytes >= bytes) return {};
    return Error{ErrorCode::kNoSpace,
                 fmt::format("{}: {} bytes free, step {} needs {}", root_.string(), free_bytes, step, bytes)};
  }

  Status abandon(int64_t step) override {
    if (step != work_step_ || work_.empty()) return {};
    RT_TRY(remove_tree(io_, work_));
    work_.clear();
    work_step_ = -1;
    return {};
  }

  Result<PutReport> put(int64_t step, SourceFile& source, const Traffic& traffic) override {
    RT_CHECK(step == work_step_ && !work_.empty(), "put() without begin()");
    const fs::path path = work_ / source.name();
    const Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!fd) return os_error(errno, path.string());
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) return os_error(errno, path.string());
    PutReport report;
    put_.insert(source.name());
    RT_TRY_SET(const Piece here, make_piece());
    RT_TRY_SET(const Piece there, make_piece());
    StreamingHash hash;
    int64_t at = 0;
    bool same = info.st_size > 0 && info.st_size <= source.bytes();
    if (same) {  // not what a dying process left in memory, but what the medium has
      if (sync_to_disk(fd.get()) != 0) return os_error(errno, path.string());
      posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
    Pace pace(traffic.max_bytes_per_s);
    int64_t unsynced = 0;
    while (at < source.bytes()) {
      if (traffic.cancelled()) return stopped(path);
      const int64_t bytes = std::min(kPieceBytes, source.bytes() - at);
      const std::span data(here.get(), static_cast<size_t>(bytes));
      RT_TRY(source.read(at, data));
      if (same) {
        RT_TRY_SET(const int64_t found, read_some(fd.get(), at, {there.get(), static_cast<size_t>(bytes)}, path));
        same = found == bytes && std::memcmp(here.get(), there.get(), static_cast<size_t>(bytes)) == 0;
        if (same) {
          report.reused_bytes += bytes;
        } else if (::ftruncate(fd.get(), at) != 0) {
          return os_error(errno, path.string());
        }
      }
      if (!same) {
        for (int64_t done = 0; done < bytes;) {
          const ssize_t n = ::pwrite(fd.get(), here.get() + done, static_cast<size_t>(bytes - done), at + done);
          if (n < 0 && errno == EINTR) continue;
          if (n < 0) return os_error(errno, path.string());
          done += n;
        }
        report.sent_bytes += bytes;
        unsynced += bytes;
        if (unsynced >= kSyncBytes) {
          if (sync_data_to_disk(fd.get()) != 0) return os_error(errno, path.string());
          unsynced = 0;
        }
        pace.spend(bytes);
      }
      hash.update(data);
      at += bytes;
      if (traffic.on_bytes) traffic.on_bytes(bytes);
    }
    if (::ftruncate(fd.get(), source.bytes()) != 0) return os_error(errno, path.string());
    if (sync_to_disk(fd.get()) != 0) {
      const Error error = os_error(errno, path.string());
      ::unlink(path.c_str());  // its pages may be lost although the kernel calls them clean
      return error;
    }
    posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
    report.hash = hash.digest();
    return report;
  }

  Status discard(int64_t step, const std::string& name) override {
    RT_CHECK(step == work_step_ && !work_.empty(), "discard() without begin()");
    return io_.remove_file(work_ / name);
  }

  Status commit(int64_t step, SourceFile& manifest, const Traffic& traffic) override {
    // What was taken up may be of a checkpoint that was since replaced.
    RT_TRY_SET(const std::vector<DirEntry> entries, io_.list(work_));
    for (const DirEntry& entry : entries) {
      if (!put_.contains(entry.name)) RT_TRY(io_.remove_file(work_ / entry.name));
    }
    RT_TRY_SET(const PutReport put_report, put(step, manifest, traffic));
    StreamingHash back;
    RT_TRY(read(
        Of::kCopy, step, manifest.name(), 0,
        [&](std::span<const std::byte> bytes) -> Status {
          back.update(bytes);
          return {};
        },
        traffic));
    if (back.digest() != put_report.hash) {
      ignore(discard(step, manifest.name()), "the next try writes it anew");
      return Error{ErrorCode::kIo, fmt::format("{}: what was read back differs from what was written",
                                               (work_ / manifest.name()).string())};
    }
    RT_TRY(io_.sync_dir(work_));
    const fs::path dir = root_ / step_dir_name(step);
    std::error_code failed;
    if (fs::exists(dir, failed)) {
      Replacement replacement = replace_step(io_, work_);
      if (replacement.cut_off) work_.clear();  // list() ends it
      RT_TRY(std::move(replacement.status));
      work_ = replacement.old;
      RT_TRY(io_.sync_dir(root_));
      ignore(remove_tree(io_, work_), "tidy() comes back to it");
    } else {
      RT_TRY(io_.rename(work_, dir));
      RT_TRY(io_.sync_dir(root_));
    }
    work_.clear();
    work_step_ = -1;
    return {};
  }

  Status read(Of of, int64_t step, const std::string& name, int64_t offset, const ByteSink& sink,
              const Traffic& traffic) override {
    const fs::path path = (of == Of::kCopy ? work_ : root_ / step_dir_name(step)) / name;
    // O_DIRECT: the question is what the medium has, not what memory remembers. Where it is refused: plainly.
    Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    bool direct = static_cast<bool>(fd);
    if (!fd && errno == EINVAL) fd.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) return os_error(errno, path.string());
    RT_TRY_SET(const Piece piece, make_piece());
    Pace pace(traffic.max_bytes_per_s);
    int64_t at = offset / kIoAlign * kIoAlign;
    for (;;) {
      if (traffic.cancelled()) return stopped(path);
      // One call, as a direct read may not go on from an unaligned end of file.
      const ssize_t n = ::pread(fd.get(), piece.get(), kPieceBytes, at);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EINVAL && direct) {
        direct = false;
        fd.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
        if (!fd) return os_error(errno, path.string());
        continue;
      }
      if (n < 0) return os_error(errno, path.string());
      const int64_t skip = std::max<int64_t>(0, offset - at);
      if (n > skip) {
        RT_TRY(sink({piece.get() + skip, static_cast<size_t>(n - skip)}));
        pace.spend(n - skip);
        if (traffic.on_bytes) traffic.on_bytes(n - skip);
      }
      if (n == 0 || (direct && n % kIoAlign != 0)) return {};
      at += n;
    }
  }

  Status remove(int64_t step) override { return remove_checkpoint(io_, root_, step, this_writer()); }

  Result<std::vector<std::string>> tidy(std::optional<int64_t> keep) override {
    RT_TRY_SET(const Catalog catalog, list_unlabelled(io_, root_));
    RT_TRY_SET(const std::set<int64_t> needed, announced_references(io_, root_));
    std::vector<std::string> said;
    for (const std::string& name : catalog.leftovers) {
      const std::optional<WorkDir> work = parse_work_dir_name(name);
      const bool copy = name.starts_with(kTmpPrefix), trash = name.starts_with(kTrashPrefix);
      if (!work || (copy && work->step == keep)) continue;
      if (may_be_alive(work->writer)) {
        if (work->writer.pid != ::getpid()) {
          said.push_back(fmt::format("{}: left alone, its writer may be at work", (root_ / name).string()));
        }
        continue;
      }
      const fs::path dir = root_ / step_dir_name(work->step);
      if (std::error_code failed; trash && needed.contains(work->step) && !fs::exists(dir, failed) && !failed) {
        RT_TRY(io_.rename(root_ / name, dir));
        RT_TRY(io_.sync_dir(root_));
        said.push_back(fmt::format("put back {}, another checkpoint there refers to its files", dir.string()));
        continue;
      }
      RT_TRY(remove_tree(io_, root_ / name));
      said.push_back(fmt::format("removed {}, left by a copy that died", (root_ / name).string()));
    }
    return said;
  }

  Result<std::optional<std::string>> read_note(const std::string& name) override {
    Result<std::string> text = ckpt::read_file(io_, root_ / name, 64 << 20);
    if (text.ok()) {
      notes_.insert(name);
      return std::optional<std::string>(std::move(text).value());
    }
    if (is_not_found(text.error())) return std::optional<std::string>();
    return std::move(text).error();
  }

  Status write_note(const std::string& name, const std::string& text) override {
    RT_TRY(make_dirs(io_, root_));
    const fs::path temporary = root_ / fmt::format(".tmp-{}.{}", name, ::getpid());
    ignore(io_.remove_file(temporary), "usually there is none");
    RT_TRY(write_file(io_, temporary, text));
    RT_TRY(io_.rename(temporary, root_ / name));
    notes_.insert(name);
    return io_.sync_dir(root_);
  }

 private:
  fs::path root_;
  PosixBackend io_;
  // Made once: a copy below the mount point of a disk that comes back would be found by nobody.
  bool seen_ = false;
  std::set<std::string> notes_;  // that were there: a folder without them is another one
  fs::path work_;                // of the begun step
  int64_t work_step_ = -1;
  std::set<std::string> put_;
};

}  // namespace

Result<std::unique_ptr<Place>> open_directory_place(const PlaceOptions& options) {
  return std::unique_ptr<Place>(std::make_unique<DirectoryPlace>(fs::absolute(options.path).lexically_normal()));
}

}  // namespace cairn::ckpt
