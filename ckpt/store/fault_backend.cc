#include "ckpt/store/fault_backend.h"

#include <fmt/format.h>

#include <cerrno>

#include "runtime/core/random.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;
using Action = FaultPlan::Action;

FaultPlan::Action FaultBackend::next(IoOp op) {
  if (stopped_) return Action::kStop;
  if (plan_.only && *plan_.only != op) return Action::kNone;
  const int64_t call = calls_++;
  const bool now = plan_.from_then_on ? call >= plan_.call : call == plan_.call;
  if (!now || plan_.action == Action::kNone) return Action::kNone;
  fired_ = true;
  if (plan_.action == Action::kStop) stopped_ = true;
  return plan_.action;
}

Error FaultBackend::error(const char* operation) const {
  if (stopped_) return Error{ErrorCode::kStopped, fmt::format("{}: the process is dead", operation)};
  return os_error(plan_.os_errno, fmt::format("{} (fault injected)", operation));
}

std::optional<Status> FaultBackend::intercept(IoOp op, const char* operation) {
  switch (next(op)) {
    case Action::kNone:
    case Action::kFlipBit:
      return std::nullopt;
    case Action::kSkip:
      return Status();
    default:
      return Status(error(operation));
  }
}

class FaultFile final : public IoFile {
 public:
  FaultFile(FaultBackend& owner, std::unique_ptr<IoFile> inner) : owner_(owner), inner_(std::move(inner)) {}

  Result<IoTicket> submit_write(int64_t offset, const std::byte* data, int64_t bytes) override {
    const bool was_stopped = owner_.stopped_;
    const Action action = owner_.next(IoOp::kWrite);
    switch (action) {
      case Action::kNone:
        return inner_->submit_write(offset, data, bytes);
      case Action::kSkip:
        return done();
      case Action::kFail:
        return owner_.error("write");
      case Action::kShortWrite:
      case Action::kStop: {
        if (was_stopped) return owner_.error("write");
        const int64_t part = action == Action::kShortWrite
                                 ? bytes / 2
                                 : static_cast<int64_t>(mix64(owner_.plan_.seed) % static_cast<uint64_t>(bytes + 1));
        ignore(inner_->write(offset, std::span(data, static_cast<size_t>(part))), "the call fails anyway");
        return owner_.error("write");
      }
      case Action::kFlipBit: {
        std::vector<std::byte> wrong(data, data + bytes);
        flip(wrong.data(), bytes);
        RT_TRY(inner_->write(offset, wrong));
        return done();
      }
    }
    return owner_.error("write");
  }

  Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override {
    const Action action = owner_.next(IoOp::kRead);
    if (action == Action::kNone) return inner_->submit_read(offset, data, bytes);
    if (action == Action::kSkip) return done();
    if (action != Action::kFlipBit) return owner_.error("read");
    RT_TRY(inner_->read(offset, std::span(data, static_cast<size_t>(bytes))));
    flip(data, bytes);
    return done();
  }

  Status wait(IoTicket ticket) override { return ticket == kDone ? Status() : inner_->wait(ticket); }
  Status finish() override {
    const Status finished = inner_->finish();  // memory must be free afterwards, whatever we claim
    if (auto instead = owner_.intercept(IoOp::kFinish, "finish")) return *instead;
    return finished;
  }
  Status truncate(int64_t size_bytes) override {
    if (auto instead = owner_.intercept(IoOp::kTruncate, "truncate")) return *instead;
    return inner_->truncate(size_bytes);
  }
  Result<int64_t> size() override {
    if (auto instead = owner_.intercept(IoOp::kSize, "size"); instead && !instead->ok()) return instead->error();
    return inner_->size();
  }
  Status sync() override {
    if (auto instead = owner_.intercept(IoOp::kSync, "fsync")) return *instead;
    return inner_->sync();
  }
  Result<IoTicket> submit_sync() override {
    if (auto instead = owner_.intercept(IoOp::kSync, "fsync")) {
      if (instead->ok()) return done();
      return instead->error();
    }
    return inner_->submit_sync();
  }
  Status close() override {
    if (auto instead = owner_.intercept(IoOp::kClose, "close")) return *instead;
    return inner_->close();
  }

 private:
  static constexpr IoTicket kDone = -2;
  static IoTicket done() { return kDone; }
  void flip(std::byte* data, int64_t bytes) {
    if (bytes == 0) return;
    const uint64_t bit = mix64(owner_.plan_.seed + 1) % (static_cast<uint64_t>(bytes) * 8);
    data[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }

  FaultBackend& owner_;
  std::unique_ptr<IoFile> inner_;
};

Result<std::unique_ptr<IoFile>> FaultBackend::create(const fs::path& path, int64_t size_bytes) {
  if (auto instead = intercept(IoOp::kCreate, "create"); instead && !instead->ok()) return instead->error();
  RT_TRY_SET(std::unique_ptr<IoFile> file, inner_.create(path, size_bytes));
  return std::unique_ptr<IoFile>(std::make_unique<FaultFile>(*this, std::move(file)));
}

Result<std::unique_ptr<IoFile>> FaultBackend::open(const fs::path& path) {
  if (auto instead = intercept(IoOp::kOpen, "open"); instead && !instead->ok()) return instead->error();
  RT_TRY_SET(std::unique_ptr<IoFile> file, inner_.open(path));
  return std::unique_ptr<IoFile>(std::make_unique<FaultFile>(*this, std::move(file)));
}

Result<std::unique_ptr<IoFile>> FaultBackend::reopen(const fs::path& path, int64_t size_bytes) {
  if (auto instead = intercept(IoOp::kReopen, "open for writing"); instead && !instead->ok()) return instead->error();
  RT_TRY_SET(std::unique_ptr<IoFile> file, inner_.reopen(path, size_bytes));
  return std::unique_ptr<IoFile>(std::make_unique<FaultFile>(*this, std::move(file)));
}

Status FaultBackend::make_dir(const fs::path& path) {
  if (auto instead = intercept(IoOp::kMakeDir, "make directory")) return *instead;
  return inner_.make_dir(path);
}

Status FaultBackend::rename(const fs::path& from, const fs::path& to) {
  if (auto instead = intercept(IoOp::kRename, "rename")) return *instead;
  return inner_.rename(from, to);
}

Status FaultBackend::exchange(const fs::path& a, const fs::path& b) {
  if (auto instead = intercept(IoOp::kExchange, "exchange")) {
    if (instead->ok() || instead->error().os_errno != EINVAL) return *instead;
    return Error{ErrorCode::kUnsupported, instead->error().message, EINVAL};  // a file system that cannot
  }
  return inner_.exchange(a, b);
}

Status FaultBackend::sync_dir(const fs::path& path) {
  if (auto instead = intercept(IoOp::kSyncDir, "fsync directory")) return *instead;
  return inner_.sync_dir(path);
}

Status FaultBackend::remove_file(const fs::path& path) {
  if (auto instead = intercept(IoOp::kRemove, "remove")) return *instead;
  return inner_.remove_file(path);
}

Status FaultBackend::remove_dir(const fs::path& path) {
  if (auto instead = intercept(IoOp::kRemove, "remove directory")) return *instead;
  return inner_.remove_dir(path);
}

Result<std::vector<DirEntry>> FaultBackend::list(const fs::path& path) {
  if (auto instead = intercept(IoOp::kList, "list"); instead && !instead->ok()) return instead->error();
  return inner_.list(path);
}

Result<FileStat> FaultBackend::stat(const fs::path& path) {
  if (auto instead = intercept(IoOp::kStat, "stat"); instead && !instead->ok()) return instead->error();
  return inner_.stat(path);
}

Result<int64_t> FaultBackend::free_bytes(const fs::path& path) {
  if (auto instead = intercept(IoOp::kFree, "free space"); instead && !instead->ok()) return instead->error();
  return inner_.free_bytes(path);
}

}  // namespace cairn::ckpt
