#pragma once
// Moves parts of a file mapping between memory and disk, with io_uring, beside the thread that works on them. Reads
// ahead by madvise. For finished parts: a chain of write-back, unmapping and dropping from the page cache. Where the
// kernel gives no ring the same calls are made in place: slower, but as bounded. Areas below kPagedShardBytes, which
// share their pages with others, stay where they are.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/core/result.h"
#include "runtime/device/pager.h"

namespace cairn::ckpt {

class DiskPager final : public Pager {
 public:
  /// `base`: the start of a shared mapping of all of `fd`; both outlive the object. At most `in_flight` areas are on
  /// their way to the disk at a time. One thread uses it.
  DiskPager(int fd, std::byte* base, int64_t in_flight = 32, bool ring = true);
  ~DiskPager() override;  // waits for what is on its way
  DiskPager(const DiskPager&) = delete;
  DiskPager& operator=(const DiskPager&) = delete;

  int64_t block_bytes() const override { return int64_t{4} << 20; }
  void fetch(std::span<const DeviceBytes> areas) override;
  void release(std::span<const DeviceBytes> areas, bool written) override;

  /// Waits until nothing is on its way.
  void settle();
  /// kIo once a write-back has failed: the kernel drops such pages as if they were written, so the mapping may hold old
  /// bytes from then on.
  Status status() const;
  bool uses_ring() const { return ring_ != nullptr; }

 private:
  struct Ring;
  int fd_;
  std::byte* base_;
  int64_t limit_;
  int failed_ = 0;  // errno of the first write-back that failed
  std::unique_ptr<Ring> ring_;
};

}  // namespace cairn::ckpt
