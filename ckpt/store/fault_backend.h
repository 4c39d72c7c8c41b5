#pragma once
// Wraps a backend and fails on purpose, at call n: replayable, so a sweep over n visits every I/O call of an operation.
// For tests.

#include <optional>

#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {

enum class IoOp {
  kCreate,
  kOpen,
  kReopen,
  kWrite,
  kRead,
  kFinish,
  kTruncate,
  kSize,
  kSync,
  kClose,
  kMakeDir,
  kRename,
  kExchange,
  kSyncDir,
  kRemove,
  kList,
  kStat,
  kFree,
};

struct FaultPlan {
  enum class Action {
    kNone,
    kFail,        // the call does nothing and fails with os_errno
    kShortWrite,  // a write does its first half, then fails with os_errno; other calls fail
    kStop,        // as if the process were killed in this call: a write does a part of it, all later calls do nothing
    kFlipBit,     // a write stores, or a read returns, one wrong bit, and succeeds; other calls are not touched
    kSkip,        // the call does nothing and succeeds
  };
  Action action = Action::kNone;
  int64_t call = 0;           // counted from 0 over the calls that `only` lets through
  bool from_then_on = false;  // not once
  int os_errno = 5;           // EIO
  std::optional<IoOp> only;   // count (and fail) only this kind
  uint64_t seed = 0;

  static FaultPlan stop_at_call(int64_t n, uint64_t seed = 0) { return {Action::kStop, n, true, 5, {}, seed}; }
  static FaultPlan fail_call(int64_t n, int os_errno) { return {Action::kFail, n, false, os_errno, {}, 0}; }
  static FaultPlan fail_from(int64_t n, int os_errno) { return {Action::kFail, n, true, os_errno, {}, 0}; }
  static FaultPlan short_write(int64_t n, int os_errno) { return {Action::kShortWrite, n, false, os_errno, {}, 0}; }
  static FaultPlan skip_all(IoOp op) { return {Action::kSkip, 0, true, 5, op, 0}; }
};

class FaultBackend final : public IoBackend {
 public:
  FaultBackend(IoBackend& inner, FaultPlan plan) : inner_(inner), plan_(plan) {}

  bool fired() const { return fired_; }
  int64_t calls() const { return calls_; }

  std::string_view name() const override { return "fault"; }
  Result<std::unique_ptr<IoFile>> create(const std::filesystem::path& path, int64_t size_bytes) override;
  Result<std::unique_ptr<IoFile>> open(const std::filesystem::path& path) override;
  Result<std::unique_ptr<IoFile>> reopen(const std::filesystem::path& path, int64_t size_bytes) override;
  Status make_dir(const std::filesystem::path& path) override;
  Status rename(const std::filesystem::path& from, const std::filesystem::path& to) override;
  Status exchange(const std::filesystem::path& a, const std::filesystem::path& b) override;
  Status sync_dir(const std::filesystem::path& path) override;
  Status remove_file(const std::filesystem::path& path) override;
  Status remove_dir(const std::filesystem::path& path) override;
  Result<std::vector<DirEntry>> list(const std::filesystem::path& path) override;
  Result<FileStat> stat(const std::filesystem::path& path) override;
  Result<int64_t> free_bytes(const std::filesystem::path& path) override;

 private:
  friend class FaultFile;
  /// Counts the call; the action for it, kNone for most.
  FaultPlan::Action next(IoOp op);
  Error error(const char* operation) const;
  /// For calls where only failing, stopping and skipping make sense: nothing, or what to return instead of calling.
  std::optional<Status> intercept(IoOp op, const char* operation);

  IoBackend& inner_;
  FaultPlan plan_;
  int64_t calls_ = 0;
  bool fired_ = false, stopped_ = false;
};

}  // namespace cairn::ckpt
