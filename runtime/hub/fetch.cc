#include "runtime/hub/fetch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/core/file_calls.h"
#include "runtime/core/make_folder.h"
#include "runtime/core/new_file.h"
#include "runtime/hub/digest.h"

namespace cairn::hub {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr size_t kBufferBytes = 256 << 10;
constexpr int kTriesWithoutByte = 5;
constexpr double kLockLookS = 0.1;

/// State that the workers share.
struct Work {
  const Settings& settings;
  const Revision& revision;
  const std::vector<RemoteFile>& files;
  const FetchOptions& options;
  ModelCache cache;
  std::atomic<size_t> next = 0;
  std::atomic<bool> failed = false;
  std::mutex mutex;  // of all below
  Status first_failure;
  int64_t total = 0, there = 0;

  bool stops() const { return failed || (options.cancelled && options.cancelled()); }

  /// `more` bytes have come.
  void count(int64_t more) {
    const std::lock_guard lock(mutex);
    there += more;
    if (options.progress) options.progress(there, total);
  }
  void fail(Error error) {
    const std::lock_guard lock(mutex);
    // A fetch that another's failure stops is no failure of its own.
    if (first_failure.ok()) first_failure = std::move(error);
    failed = true;
  }
  void notice(const std::string& text) {
    const std::lock_guard lock(mutex);
    if (options.notice) options.notice(text);
  }
};

/// One file on its way to its blob.
class Download {
 public:
  Download(Work& work, Hub& hub, const RemoteFile& file) : work_(work), hub_(hub), file_(file) {}

  Status run() {
    if (work_.cache.has(work_.revision.commit, file_.path, file_.size)) {
      work_.count(file_.size);
      return {};
    }
    RT_TRY_SET(const FileHead head, hub_.head_of(work_.revision.id, work_.revision.commit, file_));
    etag_ = head.etag;
    blob_ = work_.cache.blob(etag_);
    RT_TRY(make_folder_of(blob_));
    RT_TRY_SET(const Fd lock, lock_blob());
    std::error_code error;
    if (const auto size = fs::file_size(blob_, error); !error && std::cmp_equal(size, file_.size)) {
      work_.count(file_.size);
    } else {
      RT_TRY(receive());
    }
    return work_.cache.link(work_.revision.commit, file_.path, etag_);
  }

 private:
  std::string what() const {
    return fmt::format("{} of {}@{}", file_.path, work_.revision.id, work_.revision.commit.substr(0, 12));
  }

  Result<Fd> lock_blob() {
    int64_t seen = -1;
    Clock::time_point grown = Clock::now();
    for (bool told = false;; told = true) {
      RT_TRY_SET(std::optional<Fd> lock, work_.cache.try_lock(etag_));
      if (lock) return std::move(*lock);
      if (!told) work_.notice(fmt::format("{}: waiting for another download of it", what()));
      const int64_t bytes = work_.cache.bytes_of(etag_);
      if (std::exchange(seen, bytes) != bytes) grown = Clock::now();
      const double still_s = std::chrono::duration<double>(Clock::now() - grown).count();
      if (still_s > work_.settings.busy_s()) {
        return Error{ErrorCode::kTimeout,
                     fmt::format("{}: another process holds {} and has written nothing for {:.0f} s\n"
                                 "  end that process, and start this again",
                                 what(), work_.cache.lock_file(etag_).string(), still_s)};
      }
      RT_TRY(hub_.pause(kLockLookS));
    }
  }

  Digest fresh_digest() const { return file_.sha256.empty() ? Digest::git_blob(file_.size) : Digest::sha256(); }

  /// Opens ETAG.incomplete and hashes what an earlier try has left in it.
  Status open_partial() {
    partial_ = blob_;
    partial_ += ".incomplete";
    RT_TRY_SET(fd_, open_own(partial_, O_RDWR));
    struct stat found {};
    if (::fstat(fd_.get(), &found) != 0) return os_error(errno, partial_.string());
    offset_ = found.st_size;
    if (offset_ > file_.size) {  // of no use, and not counted
      if (::ftruncate(fd_.get(), 0) != 0) return os_error(errno, partial_.string());
      offset_ = 0;
    }
    std::vector<std::byte> buffer(kBufferBytes);
    for (int64_t at = 0; at < offset_;) {
      const ssize_t got = ::pread(fd_.get(), buffer.data(), buffer.size(), at);
      if (got <= 0) return os_error(got < 0 ? errno : EIO, partial_.string());
      digest_.add(std::span(buffer).first(static_cast<size_t>(got)));
      at += got;
    }
    resumed_ = offset_ > 0;
    if (::lseek(fd_.get(), offset_, SEEK_SET) < 0) return os_error(errno, partial_.string());
    work_.count(offset_);
    return {};
  }

  /// From the first byte again.
  Status restart() {
    if (::ftruncate(fd_.get(), 0) != 0 || ::lseek(fd_.get(), 0, SEEK_SET) < 0)
      return os_error(errno, partial_.string());
    work_.count(-offset_);
    offset_ = 0;
    resumed_ = false;
    digest_ = fresh_digest();
    return {};
  }

  Status take(std::span<const std::byte> bytes) {
    const auto count = static_cast<int64_t>(bytes.size());
    if (offset_ + count > file_.size) {
      return Error{ErrorCode::kCorrupt, fmt::format("{}: expected {} bytes, more came", what(), file_.size)};
    }
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (write_fully(fd_.get(), text) != count) return os_error(errno, partial_.string());
    digest_.add(bytes);
    offset_ += count;
    came_ += count;
    work_.count(count);
    return {};
  }

  /// Tries until all bytes have come: each try begins behind the last byte that came.
  Status receive_all() {
    const http::Sink sink = [this](std::span<const std::byte> bytes) { return take(bytes); };
    const auto begin = [this](int64_t from) { return from == offset_ ? Status() : restart(); };
    int64_t farthest = offset_;
    for (int tries = 0; offset_ < file_.size;) {
      const int64_t before = came_;
      const Status read = hub_.read_from(work_.revision.id, work_.revision.commit, file_, offset_, begin, sink);
      const bool cut = read.ok()
                           ? offset_ < file_.size
                           : read.error().code == ErrorCode::kUnavailable || read.error().code == ErrorCode::kTimeout;
      if (!cut && !read.ok()) return read;
      if (!cut) break;
      tries = offset_ > farthest ? 0 : tries + 1;
      farthest = std::max(farthest, offset_);
      // Without any byte, read_from() has waited as long as it may.
      if (tries >= kTriesWithoutByte || (!read.ok() && came_ == before)) {
        return read.ok() ? Status(Error{ErrorCode::kUnavailable, fmt::format("{}: the answers end after {} of {} bytes",
                                                                             what(), offset_, file_.size)})
                         : read;
      }
      resumed_ = offset_ > 0;
      RT_TRY(hub_.pause(kLockLookS));
    }
    return {};
  }

  Status check_hash() {
    const std::string wanted = file_.sha256.empty() ? file_.git : file_.sha256;
    if (wanted.empty()) return {};
    const std::string found = digest_.hex();
    if (found == wanted) return {};
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: expected {} {}, as the list of files says, found {} in {} bytes\n"
                             "  the bytes are removed: start again; if it comes back, the Hub or a proxy damages them",
                             what(), file_.sha256.empty() ? "git's SHA-1" : "SHA-256", wanted, found, file_.size)};
  }

  Status receive() {
    digest_ = fresh_digest();
    RT_TRY(open_partial());
    for (;;) {
      RT_TRY(receive_all());
      const Status checked = check_hash();
      if (checked.ok()) break;
      if (!resumed_) {
        ::unlink(partial_.c_str());
        return checked;
      }
      RT_TRY(restart());
    }
    if (sync_to_disk(fd_.get()) != 0 || ::rename(partial_.c_str(), blob_.c_str()) != 0)
      return os_error(errno, partial_.string());
    const Fd folder(::open(blob_.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder || sync_to_disk(folder.get()) != 0) return os_error(errno, blob_.parent_path().string());
    return {};
  }

  Work& work_;
  Hub& hub_;
  const RemoteFile& file_;
  std::string etag_;
  fs::path blob_, partial_;
  Fd fd_;
  Digest digest_ = Digest::sha256();
  int64_t offset_ = 0;  // bytes in partial_
  int64_t came_ = 0;    // over the wire
  bool resumed_ = false;
};

void work_on(Work& work) {
  try {
    Result<std::unique_ptr<Hub>> hub = Hub::make(work.settings, [&work] { return work.stops(); });
    if (!hub.ok()) return work.fail(std::move(hub).error());
    while (!work.stops()) {
      const size_t k = work.next++;
      if (k >= work.files.size()) return;
      if (const Status done = Download(work, *hub.value(), work.files[k]).run(); !done.ok())
        return work.fail(done.error());
    }
  } catch (const std::exception& error) {
    work.fail(Error{ErrorCode::kInternal, error.what()});
  }
}

}  // namespace

Status fetch(const Settings& settings, const Revision& revision, const std::vector<RemoteFile>& files,
             const FetchOptions& options) {
  Work work{.settings = settings,
            .revision = revision,
            .files = files,
            .options = options,
            .cache = ModelCache(settings.cache, revision.id),
            .first_failure = {}};
  for (const RemoteFile& file : files) work.total += file.size;
  std::vector<std::thread> workers;
  const auto count = std::min<size_t>(static_cast<size_t>(std::max<int64_t>(options.at_once, 1)), files.size());
  for (size_t k = 0; k < count; ++k) workers.emplace_back([&work] { work_on(work); });
  for (std::thread& worker : workers) worker.join();
  RT_TRY(work.first_failure);
  if (options.cancelled && options.cancelled()) return Error{ErrorCode::kStopped, "reading the Hub: stopped"};
  return {};
}

}  // namespace cairn::hub
