#pragma once
// Plain buffered system calls: works everywhere, costs CPU for the page cache. The fallback when io_uring is refused,
// and the base of UringBackend, which differs only in how file contents move.

#include "ckpt/store/io_backend.h"
#include "runtime/core/unique_handle.h"

namespace cairn::ckpt {

class PosixBackend : public IoBackend {
 public:
  std::string_view name() const override { return "posix"; }
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

 protected:
  /// A new file descriptor with its space reserved; on failure nothing is left behind.
  static Result<Fd> create_fd(const std::filesystem::path& path, int64_t size_bytes);
  static Result<Fd> open_fd(const std::filesystem::path& path);
  static Result<Fd> reopen_fd(const std::filesystem::path& path, int64_t size_bytes);
};

/// A file moved by pread and pwrite; operations are done when submit returns.
class PosixFile : public IoFile {
 public:
  PosixFile(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  Result<IoTicket> submit_write(int64_t offset, const std::byte* data, int64_t bytes) override;
  Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override;
  Status wait(IoTicket) override { return {}; }
  Status finish() override { return {}; }
  Status truncate(int64_t size_bytes) override;
  Result<int64_t> size() override;
  Status sync() override;
  Status close() override;

 protected:
  Fd fd_;
  std::string path_;
};

}  // namespace cairn::ckpt
