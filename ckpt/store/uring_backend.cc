#include "ckpt/store/uring_backend.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <liburing.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>

#include "runtime/core/file_calls.h"
#include "runtime/core/log.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMemoryAlign = 512;                    // O_DIRECT's rule for addresses
constexpr int64_t kMostRequestBytes = int64_t{1} << 30;  // a request's length is an int to the kernel
constexpr int64_t round_down(int64_t n) { return n / kIoAlign * kIoAlign; }

struct UringTraits {
  using Handle = io_uring*;
  static constexpr io_uring* kInvalid = nullptr;
  static void close(io_uring* ring) {
    io_uring_queue_exit(ring);
    delete ring;
  }
};
using Uring = UniqueHandle<UringTraits>;

// Never given twice, as std::thread::id is when a thread has ended: the kernel knows the difference.
uint64_t this_thread_number() {
  static std::atomic<uint64_t> next{1};
  thread_local const uint64_t mine = next++;
  return mine;
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

class UringFile;

// The ring, its slots (one per request in flight) and the tickets of all files of the backend.
struct UringBackend::Ring {
  struct Slot {
    bool busy = false, writing = false, direct = false, syncing = false;
    UringFile* file = nullptr;
    IoTicket ticket = 0;
    int64_t offset = 0, bytes = 0;  // what is left of the request
    std::byte* memory = nullptr;    // where it is moved from or to; inside `bounce` or the caller's
    std::byte* copy_to = nullptr;   // a bounced read: where the caller wants it
    std::byte* copy_from = nullptr;
    int64_t copy_bytes = 0;
    int64_t all_bytes = 0;                           // of the request as it began
    std::unique_ptr<std::byte, FreeDeleter> bounce;  // request_bytes, made when first needed
  };
  struct Ticket {
    int64_t pending = 0;
    std::optional<Error> error;
  };

  explicit Ring(const UringOptions& options) : options(options), slots(static_cast<size_t>(options.depth)) {}

  UringOptions options;
  std::vector<Slot> slots;
  int64_t in_flight = 0, in_flight_bytes = 0;  // of the callers
  std::deque<size_t> waiting;                  // slots the disk has not been told of, in order
  int64_t started_bytes = 0;                   // that it has been told of
  IoTicket next_ticket = 1;
  Uring ring;
  uint64_t owner = 0;  // number of the thread that made the ring

  Status ensure();
  Result<size_t> free_slot(int64_t bytes);
  Status pump();            // waits for at least one completion
  void reap();              // what is complete, without waiting; and what waited for that
  void start_waiting();     // as far as the disk may hold more
  void start(size_t slot);  // puts a slot's request into the ring
  void complete(size_t slot, int result);
  void end(Slot& slot, std::optional<Error> error);
};

class UringFile final : public PosixFile {
 public:
  UringFile(UringBackend::Ring& ring, Fd fd, Fd direct_fd, std::string path)
      : PosixFile(std::move(fd), std::move(path)), ring_(ring), direct_fd_(std::move(direct_fd)) {}
  ~UringFile() override { ignore(UringFile::finish(), "the owner did not ask; the memory must be free of requests"); }

  Result<IoTicket> submit_write(int64_t offset, const std::byte* data, int64_t bytes) override {
    return submit(true, offset, const_cast<std::byte*>(data), bytes);  // a write only reads it
  }
  Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override {
    return submit(false, offset, data, bytes);
  }

  Status wait(IoTicket ticket) override {
    const auto it = tickets_.find(ticket);
    if (it == tickets_.end()) return {};
    while (it->second.pending > 0) RT_TRY(ring_.pump());
    std::optional<Error> error = std::move(it->second.error);
    tickets_.erase(it);
    if (error) return std::move(*error);
    return {};
  }

  Status finish() override {
    std::optional<Error> first;
    while (!tickets_.empty()) {
      Status status = wait(tickets_.begin()->first);
      if (status.ok()) continue;
      if (!first) first = std::move(status).error();
      if (ring_.in_flight == 0) tickets_.clear();
    }
    if (first) return std::move(*first);
    return {};
  }

  Status truncate(int64_t size_bytes) override {
    RT_TRY(finish());
    return PosixFile::truncate(size_bytes);
  }
  Status sync() override {
    RT_TRY(finish());
    return PosixFile::sync();
  }
  Result<IoTicket> submit_sync() override {
    RT_TRY(ring_.ensure());
    RT_TRY_SET(const size_t index, ring_.free_slot(0));
    const IoTicket ticket = ring_.next_ticket++;
    UringBackend::Ring::Slot& slot = ring_.slots[index];
    slot.busy = slot.syncing = true;
    slot.writing = slot.direct = false;
    slot.file = this;
    slot.ticket = ticket;
    slot.bytes = slot.all_bytes = 0;
    ++tickets_[ticket].pending;
    ++ring_.in_flight;
    ring_.waiting.push_back(index);
    ring_.start_waiting();
    return ticket;
  }
  Status close() override {
    RT_TRY(finish());
    direct_fd_.reset();
    return PosixFile::close();
  }

  int fd(bool direct) const { return direct ? direct_fd_.get() : fd_.get(); }
  bool has_direct() const { return static_cast<bool>(direct_fd_); }
  void stop_direct() { direct_refused_ = true; }  // the descriptor stays: requests may be using it
  const std::string& path() const { return path_; }
  std::map<IoTicket, UringBackend::Ring::Ticket> tickets_;

 private:
  Result<IoTicket> submit(bool writing, int64_t offset, std::byte* data, int64_t bytes);
  Status submit_part(bool writing, IoTicket ticket, int64_t offset, std::byte* data, int64_t bytes, bool direct);

  UringBackend::Ring& ring_;
  Fd direct_fd_;
  bool direct_refused_ = false;
};

Result<IoTicket> UringFile::submit(bool writing, int64_t offset, std::byte* data, int64_t bytes) {
  RT_TRY(ring_.ensure());
  const IoTicket ticket = ring_.next_ticket++;
  tickets_[ticket];  // an operation of no bytes is done already
  Status failure;
  while (bytes > 0 && failure.ok()) {
    const bool direct = has_direct() && !direct_refused_ && offset % kIoAlign == 0 && bytes >= kIoAlign;
    int64_t part = std::min(bytes, ring_.options.request_bytes);
    if (direct) {
      part = round_down(part);
    } else if (has_direct() && !direct_refused_ && offset % kIoAlign != 0) {
      part = std::min(part, kIoAlign - offset % kIoAlign);  // the head only; the rest can go direct
    }
    failure = submit_part(writing, ticket, offset, data, part, direct);
    offset += part;
    data += part;
    bytes -= part;
  }
  if (failure.ok()) return ticket;
  ignore(wait(ticket), "the submission's own error is the one to tell");
  return std::move(failure).error();
}

Status UringFile::submit_part(bool writing, IoTicket ticket, int64_t offset, std::byte* data, int64_t bytes,
                              bool direct) {
  RT_TRY_SET(const size_t index, ring_.free_slot(bytes));
  UringBackend::Ring::Slot& slot = ring_.slots[index];
  slot.busy = true;
  slot.syncing = false;
  slot.writing = writing;
  slot.direct = direct;
  slot.file = this;
  slot.ticket = ticket;
  slot.offset = offset;
  slot.bytes = bytes;
  slot.memory = data;
  slot.copy_to = nullptr;
  if (direct && reinterpret_cast<uintptr_t>(data) % kMemoryAlign != 0) {
    if (!slot.bounce) {
      slot.bounce.reset(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, ring_.options.request_bytes)));
      if (!slot.bounce) {
        slot.busy = false;
        return Error{ErrorCode::kIo, fmt::format("{}: no memory for a bounce buffer", path_), ENOMEM};
      }
    }
    slot.memory = slot.bounce.get();
    if (writing) {
      std::memcpy(slot.memory, data, static_cast<size_t>(bytes));
    } else {
      slot.copy_to = data;
      slot.copy_from = slot.memory;
      slot.copy_bytes = bytes;
    }
  }
  ++tickets_[ticket].pending;
  slot.all_bytes = bytes;
  ++ring_.in_flight;
  ring_.in_flight_bytes += bytes;
  ring_.waiting.push_back(index);
  ring_.start_waiting();
  ring_.reap();
  return {};
}

Status UringBackend::Ring::ensure() {
  if (!ring || owner != this_thread_number()) {
    RT_CHECK(in_flight == 0, "an io_uring backend is used by two threads at once");
    ring.reset();
    int error = 0;
    // Older kernels do not know the second pair of flags; the plain ring works everywhere.
    for (const unsigned flags : {unsigned{IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN}, 0u}) {
      auto made = std::make_unique<io_uring>();
      error = io_uring_queue_init(static_cast<unsigned>(options.depth), made.get(), flags);
      if (error == 0) {
        ring.reset(made.release());
        break;
      }
      if (error != -EINVAL) break;
    }
    if (!ring) {
      Error failure = os_error(-error, "io_uring");
      failure.code = ErrorCode::kUnsupported;
      return failure;
    }
    owner = this_thread_number();
  }
  return {};
}

Result<size_t> UringBackend::Ring::free_slot(int64_t bytes) {
  while (true) {
    if (in_flight > 0 && in_flight_bytes + bytes > options.in_flight_bytes) {
      RT_TRY(pump());
      continue;
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      if (!slots[i].busy) return i;
    }
    RT_TRY(pump());
  }
}

// A virtual disk may tell of what is done only when it has done all it was told of, and would be idle until the first
// buffer is filled again. So some wait here, ready; and it is not told of much, so that buffers come back before all
// are used up.
void UringBackend::Ring::start_waiting() {
  while (!waiting.empty()) {
    const int64_t bytes = slots[waiting.front()].all_bytes;
    if (started_bytes > 0 && started_bytes + bytes > options.told_bytes) return;
    started_bytes += bytes;
    const size_t index = waiting.front();
    waiting.pop_front();
    start(index);
  }
}

void UringBackend::Ring::start(size_t index) {
  Slot& slot = slots[index];
  io_uring_sqe* sqe = io_uring_get_sqe(ring.get());  // there are as many entries as slots
  RT_CHECK(sqe != nullptr, "submission queue full with {} in flight", in_flight);
  const int fd = slot.file->fd(slot.direct);
  const auto bytes = static_cast<unsigned>(slot.bytes);
  const auto offset = static_cast<uint64_t>(slot.offset);
  if (slot.syncing) {
    io_uring_prep_fsync(sqe, fd, 0);
  } else if (slot.writing) {
    io_uring_prep_write(sqe, fd, slot.memory, bytes, offset);
  } else {
    io_uring_prep_read(sqe, fd, slot.memory, bytes, offset);
  }
  io_uring_sqe_set_data64(sqe, index);
  int result = 0;
  do {
    result = io_uring_submit(ring.get());
  } while (result == -EINTR);
  // EAGAIN and EBUSY leave the entry in the queue; pump() submits it again.
  if (result < 0 && result != -EAGAIN && result != -EBUSY)
    spdlog::warn("io_uring_submit: {}; will try again", std::strerror(-result));
}

Status UringBackend::Ring::pump() {
  RT_CHECK(in_flight > 0, "waiting with nothing in flight");
  RT_CHECK(owner == this_thread_number(), "an io_uring backend is used by two threads at once");
  int result = 0;
  do {
    result = io_uring_submit_and_wait(ring.get(), 1);
  } while (result == -EINTR || result == -EAGAIN || result == -EBUSY);
  // The kernel may still be moving the caller's memory and there is no way left to ask: going on would corrupt it.
  RT_CHECK(result >= 0, "io_uring wait: {}", std::strerror(-result));
  reap();
  return {};
}

void UringBackend::Ring::reap() {
  io_uring_get_events(ring.get());  // the kernel notes completions only when asked; an error shows when pump() waits
  io_uring_cqe* cqe = nullptr;
  while (io_uring_peek_cqe(ring.get(), &cqe) == 0) {
    const auto index = static_cast<size_t>(io_uring_cqe_get_data64(cqe));
    const int moved = cqe->res;
    io_uring_cqe_seen(ring.get(), cqe);
    complete(index, moved);
    start_waiting();
  }
}

void UringBackend::Ring::complete(size_t index, int result) {
  Slot& slot = slots[index];
  const char* operation = slot.syncing ? "fsync" : slot.writing ? "write" : "read";
  if (result == -EINTR || result == -EAGAIN) return start(index);
  if (slot.syncing) {
    if (result < 0 && is_missing_call(-result) && sync_to_disk(slot.file->fd(slot.direct)) == 0) result = 0;
    if (result == 0) return end(slot, std::nullopt);
    return end(slot, os_error(-result, fmt::format("{}: {}", slot.file->path(), operation)));
  }
  if (result == -EINVAL && slot.direct) {  // O_DIRECT was granted at open but is refused here: overlay, fuse ...
    slot.direct = false;
    slot.file->stop_direct();
    return start(index);
  }
  if (result < 0) return end(slot, os_error(-result, fmt::format("{}: {}", slot.file->path(), operation)));
  if (result == 0 && slot.bytes > 0) {
    if (slot.writing) return end(slot, os_error(EIO, fmt::format("{}: {}", slot.file->path(), operation)));
    return end(slot,
               Error{ErrorCode::kCorrupt, fmt::format("{}: ends at byte {}, {} more bytes expected (file cut short?)",
                                                      slot.file->path(), slot.offset, slot.bytes)});
  }
  slot.offset += result;
  slot.memory += result;
  slot.bytes -= result;
  if (slot.bytes > 0) {  // short: the rest again, buffered where it is no longer aligned
    if (slot.direct && (slot.offset % kIoAlign != 0 || slot.bytes % kIoAlign != 0)) slot.direct = false;
    return start(index);
  }
  if (slot.copy_to != nullptr) std::memcpy(slot.copy_to, slot.copy_from, static_cast<size_t>(slot.copy_bytes));
  end(slot, std::nullopt);
}

void UringBackend::Ring::end(Slot& slot, std::optional<Error> error) {
  Ticket& ticket = slot.file->tickets_[slot.ticket];
  --ticket.pending;
  if (error && !ticket.error) ticket.error = std::move(error);
  slot.busy = false;
  slot.file = nullptr;
  --in_flight;
  in_flight_bytes -= slot.all_bytes;
  started_bytes -= slot.all_bytes;
}

UringBackend::UringBackend(const UringOptions& options) : ring_(std::make_unique<Ring>(options)) {}
UringBackend::~UringBackend() = default;

std::unique_ptr<IoFile> UringBackend::file_of(Fd fd, const fs::path& path, int access) {
  Fd direct;
  if (ring_->options.direct)
    direct = Fd(::open(path.c_str(), access | O_DIRECT | (access == O_RDONLY ? 0 : O_NOFOLLOW) | O_CLOEXEC));
  return std::make_unique<UringFile>(*ring_, std::move(fd), std::move(direct), path.string());
}

Result<std::unique_ptr<IoFile>> UringBackend::create(const fs::path& path, int64_t size_bytes) {
  RT_TRY_SET(Fd fd, create_fd(path, size_bytes));
  return file_of(std::move(fd), path, O_RDWR);
}

Result<std::unique_ptr<IoFile>> UringBackend::open(const fs::path& path) {
  RT_TRY_SET(Fd fd, open_fd(path));
  return file_of(std::move(fd), path, O_RDONLY);
}

Result<std::unique_ptr<IoFile>> UringBackend::reopen(const fs::path& path, int64_t size_bytes) {
  RT_TRY_SET(Fd fd, reopen_fd(path, size_bytes));
  return file_of(std::move(fd), path, O_RDWR);
}

Result<std::unique_ptr<IoBackend>> make_uring_backend(const UringOptions& options) {
  if (options.depth < 1 || options.depth > 4096 || options.request_bytes < kIoAlign ||
      options.request_bytes % kIoAlign != 0 || options.request_bytes > kMostRequestBytes) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("io_uring: depth {} and request {} bytes; expected 1 to 4096 and a multiple of {} up to {}",
                    options.depth, options.request_bytes, kIoAlign, kMostRequestBytes)};
  }
  auto backend = std::make_unique<UringBackend>(options);
  RT_TRY(backend->ring_->ensure());
  return std::unique_ptr<IoBackend>(std::move(backend));
}

std::unique_ptr<IoBackend> make_best_backend(const UringOptions& options) {
  Result<std::unique_ptr<IoBackend>> uring = make_uring_backend(options);
  if (uring.ok()) return std::move(uring).value();
  spdlog::info("checkpoints are written with plain system calls: {}", uring.error().message);
  return std::make_unique<PosixBackend>();
}

}  // namespace cairn::ckpt
