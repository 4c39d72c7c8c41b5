#include "ckpt/snapshot/disk_pager.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "ckpt/plan/save_plan.h"
#include "runtime/core/check.h"

namespace cairn::ckpt {
namespace {

constexpr unsigned kSyncAll = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
constexpr int64_t kLongest = int64_t{1} << 30;  // lengths of advice are 32 bits in a ring
// Read-ahead takes no more of a request than the disk's largest transfer, and drops the rest.
constexpr int64_t kReadAhead = int64_t{256} << 10;
// The page cache keeps a file in pieces of up to so much, and drops those alone that lie in the range wholly. What a
// release had to leave at its end, the release of what follows takes with it.
constexpr int64_t kLargestFolio = int64_t{2} << 20;

/// Whole pages around an area, as offsets of the file.
struct Pages {
  int64_t offset = 0, bytes = 0;
};

Pages pages_around(const std::byte* base, DeviceBytes area, int64_t unit) {
  const int64_t at = area.first.address() - base;
  const int64_t begin = at / unit * unit;
  const int64_t end = (at + area.size + kPageBytes - 1) / kPageBytes * kPageBytes;
  RT_CHECK(end - begin < kLongest, "an area of {} bytes", area.size);
  return {begin, end - begin};
}

}  // namespace

struct DiskPager::Ring {
  static constexpr uint64_t kOther = 0, kEnd = 1, kWritten = 2;  // what a request is, in its user data
  io_uring ring;
  int64_t in_flight = 0;  // areas being released; their chain's last request tells its end
  int failed = 0;

  explicit Ring(const io_uring& made) : ring(made) {}
  ~Ring() { io_uring_queue_exit(&ring); }

  /// Room for `n` linked requests.
  void reserve(unsigned n) {
    if (io_uring_sq_space_left(&ring) < n) io_uring_submit(&ring);
  }
  void reap(bool wait) {
    io_uring_cqe* cqe = nullptr;
    while ((wait ? io_uring_wait_cqe(&ring, &cqe) : io_uring_peek_cqe(&ring, &cqe)) == 0) {
      if (io_uring_cqe_get_data64(cqe) == kEnd) --in_flight;
      if (io_uring_cqe_get_data64(cqe) == kWritten && cqe->res < 0 && failed == 0) failed = -cqe->res;
      io_uring_cqe_seen(&ring, cqe);
      wait = false;
    }
  }
};

DiskPager::DiskPager(int fd, std::byte* base, int64_t in_flight, bool ring)
    : fd_(fd), base_(base), limit_(std::max<int64_t>(1, in_flight)) {
  if (!ring) return;
  io_uring made{};
  if (io_uring_queue_init(256, &made, IORING_SETUP_CLAMP) == 0) ring_ = std::make_unique<Ring>(made);
}

DiskPager::~DiskPager() { settle(); }

void DiskPager::fetch(std::span<const DeviceBytes> areas) {
  for (const DeviceBytes& area : areas) {
    if (area.size < kPagedShardBytes) continue;
    const Pages pages = pages_around(base_, area, kPageBytes);
    for (int64_t at = 0; at < pages.bytes; at += kReadAhead) {
      std::byte* const from = base_ + pages.offset + at;
      const int64_t bytes = std::min(kReadAhead, pages.bytes - at);
      if (ring_ == nullptr) {
        ::madvise(from, static_cast<size_t>(bytes), MADV_WILLNEED);
        continue;
      }
      ring_->reserve(1);
      io_uring_sqe* const sqe = io_uring_get_sqe(&ring_->ring);
      io_uring_prep_madvise(sqe, from, static_cast<off_t>(bytes), MADV_WILLNEED);
      io_uring_sqe_set_data64(sqe, Ring::kOther);
    }
  }
  if (ring_ != nullptr) {
    io_uring_submit(&ring_->ring);
    ring_->reap(false);
  }
}

void DiskPager::release(std::span<const DeviceBytes> areas, bool written) {
  for (const DeviceBytes& area : areas) {
    if (area.size < kPagedShardBytes) continue;
    const Pages pages = pages_around(base_, area, kLargestFolio);
    const auto bytes = static_cast<off_t>(pages.bytes);
    if (ring_ == nullptr) {
      ::madvise(base_ + pages.offset, static_cast<size_t>(pages.bytes), MADV_DONTNEED);
      if (written && ::sync_file_range(fd_, pages.offset, pages.bytes, kSyncAll) != 0) {
        if (failed_ == 0) failed_ = errno;
        continue;
      }
      ::posix_fadvise(fd_, pages.offset, pages.bytes, POSIX_FADV_DONTNEED);
      continue;
    }
    while (ring_->in_flight >= limit_) ring_->reap(true);
    ring_->reserve(3);
    // Unmapped first: the page table's dirty bits go to the pages, and write-back finds them.
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_->ring);
    io_uring_prep_madvise(sqe, base_ + pages.offset, bytes, MADV_DONTNEED);
    io_uring_sqe_set_data64(sqe, Ring::kOther);
    sqe->flags |= IOSQE_IO_HARDLINK;
    if (written) {
      sqe = io_uring_get_sqe(&ring_->ring);
      io_uring_prep_sync_file_range(sqe, fd_, static_cast<unsigned>(pages.bytes), static_cast<uint64_t>(pages.offset),
                                    static_cast<int>(kSyncAll));
      io_uring_sqe_set_data64(sqe, Ring::kWritten);
      sqe->flags |= IOSQE_IO_LINK;  // what was not written stays in the cache
    }
    sqe = io_uring_get_sqe(&ring_->ring);
    io_uring_prep_fadvise(sqe, fd_, static_cast<uint64_t>(pages.offset), bytes, POSIX_FADV_DONTNEED);
    io_uring_sqe_set_data64(sqe, Ring::kEnd);
    ++ring_->in_flight;
    io_uring_submit(&ring_->ring);
  }
  if (ring_ != nullptr) ring_->reap(false);
}

Status DiskPager::status() const {
  const int failed = ring_ != nullptr && ring_->failed != 0 ? ring_->failed : failed_;
  if (failed == 0) return {};
  return os_error(failed, "optimizer.offload: writing the optimizer's state back to its file");
}

void DiskPager::settle() {
  while (ring_ != nullptr && ring_->in_flight > 0) ring_->reap(true);
}

}  // namespace cairn::ckpt
