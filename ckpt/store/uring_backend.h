#pragma once
// File contents through io_uring with O_DIRECT: the disk's speed at 1 % of a core (docs/benchmarks.md). Measured
// choices: 4 MiB requests, 64 MiB of them in flight (smaller requests: up to 64), SINGLE_ISSUER|DEFER_TASKRUN; SQPOLL
// and IOPOLL burn a core for nothing.
//
// - Parts of an operation that are 4096-aligned in file and length go direct; memory that is not aligned is copied
//   through bounce buffers; unaligned heads and tails go through a buffered descriptor of the same file.
// - A file system that refuses O_DIRECT gets buffered requests through the same ring, the same bytes.
// - A kernel that refuses the ring (EPERM, ENOSYS, seccomp) makes make_uring_backend return kUnsupported;
//   make_best_backend then gives a PosixBackend.
// - The ring belongs to the thread that uses it; when another thread comes while nothing is in flight, it moves.

#include <memory>
#include <vector>

#include "ckpt/store/posix_backend.h"

namespace cairn::ckpt {

struct UringOptions {
  int64_t request_bytes = int64_t{4} << 20;
  int64_t depth = 64;                           // requests in flight, and
  int64_t in_flight_bytes = int64_t{64} << 20;  // of how many bytes at most; one request always goes
  int64_t told_bytes = int64_t{32} << 20;       // of these the disk knows; the rest waits, filled, for a place
  bool direct = true;                           // false: buffered requests, as on a file system without O_DIRECT
};

class UringBackend final : public PosixBackend {
 public:
  explicit UringBackend(const UringOptions& options);
  ~UringBackend() override;

  std::string_view name() const override { return "uring"; }
  Result<std::unique_ptr<IoFile>> create(const std::filesystem::path& path, int64_t size_bytes) override;
  Result<std::unique_ptr<IoFile>> open(const std::filesystem::path& path) override;
  Result<std::unique_ptr<IoFile>> reopen(const std::filesystem::path& path, int64_t size_bytes) override;

  struct Ring;

 private:
  /// `access`: O_RDWR or O_RDONLY, as `fd` was opened.
  std::unique_ptr<IoFile> file_of(Fd fd, const std::filesystem::path& path, int access);
  friend Result<std::unique_ptr<IoBackend>> make_uring_backend(const UringOptions& options);
  std::unique_ptr<Ring> ring_;
};

/// Errors: kUnsupported when the kernel gives no ring.
Result<std::unique_ptr<IoBackend>> make_uring_backend(const UringOptions& options = {});

/// io_uring where the kernel allows it, else plain system calls; logs once which and why.
std::unique_ptr<IoBackend> make_best_backend(const UringOptions& options = {});

}  // namespace cairn::ckpt
