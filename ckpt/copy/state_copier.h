#pragma once
// Copies a rank's state into a slot that outlives the process, out of memory that no other process can read or that
// dies with it. Copies beside training, in the order in which the next update overwrites, and takes checksums in the
// same pass.
//
// Life of a copy: 1. start(): the copier's thread takes part after part. 2. An update about to overwrite a part waits
// for it (CopyGate). If nobody has begun it and the link copies at once, the update copies it itself: the part is then
// in its caches, and a copier without a core delays nobody. 3. The thread that reads the last part calls `done`. With a
// link to a device some parts are on their way at a time; their sums are taken from the host's copy, for which the
// device does not wait.
//
// Threads: start(), finish() and order_after_copy() are the owner's; `done` is called on the owner's thread or the
// copier's own.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/device/copy_gate.h"
#include "runtime/device/device_link.h"

namespace cairn::ckpt {

/// Of what is copied: so much at once.
inline constexpr int64_t kCopyBlockBytes = int64_t{1} << 20;

/// Of the copier's thread, which gives way to training.
inline constexpr int kCopyNice = 10;

/// A run of state and its place in the slot. `shard`: which checksum it belongs to, as words from `word` on.
struct CopyPart {
  DevicePtr<std::byte> from;
  int64_t offset = 0, bytes = 0;
  int64_t shard = 0, word = 0;
};

/// Arrays that are overwritten together, block by block, each a shard of the slot.
struct CopyArray {
  DevicePtr<std::byte> from;
  int64_t offset = 0, bytes = 0;
  int64_t shard = 0;
};
/// The parts of such groups in the order in which they are overwritten.
std::vector<CopyPart> parts_of(std::span<const std::vector<CopyArray>> groups, int64_t block_bytes = kCopyBlockBytes);

class StateCopier final : public CopyGate {
 public:
  /// With the word_sums of all shards, once every part is in the slot.
  using Done = std::function<Status(std::span<const uint64_t> sums)>;

  /// `nice` of the thread.
  explicit StateCopier(std::unique_ptr<DeviceLink> link, int nice);
  ~StateCopier() override;  // gives up a copy under way
  StateCopier(const StateCopier&) = delete;
  StateCopier& operator=(const StateCopier&) = delete;

  /// What is copied from now on; no copy is under way. Parts do not overlap and are copied in this order.
  void cover(std::vector<CopyPart> parts, int64_t shards);

  /// Begins to copy all parts to `slot`. finish() has been called for the copy before.
  Status start(std::byte* slot, Done done);

  /// Returns when the copy under way, if there is one, is complete and done() was called: the first error of any copy.
  Status finish();

  /// The first error, without waiting.
  Status status() const;

  DeviceLink& link() { return *link_; }

  int64_t block_bytes() const override;
  void order_after_copy(Stream& stream, std::span<const DeviceBytes> areas) override;
  int64_t waited_ns() const override { return waited_ns_.load(); }

 private:
  enum State : uint32_t { kOpen, kTaken, kRead };
  void run(int nice);
  void copy_all();
  bool take(size_t part);
  /// Fetches a part that is taken; false while it is on its way.
  Result<bool> fetch(size_t part);
  void note(size_t part, uint64_t sums);
  void let_overwrite(size_t part);
  void fail(const Error& error);
  void wait_for(size_t part);

  std::unique_ptr<DeviceLink> link_;
  std::vector<CopyPart> parts_;
  std::vector<size_t> by_address_;  // into parts_, by CopyPart::from
  std::vector<uint64_t> sums_;      // of the parts
  int64_t shards_ = 0;
  int64_t bytes_ = 0;  // of all parts
  std::unique_ptr<std::atomic<uint32_t>[]> states_;  // of the parts
  std::byte* slot_ = nullptr;
  Done done_;
  std::atomic<int64_t> left_ = 0;  // parts without sums
  std::atomic<bool> under_way_ = false, stopping_ = false, failing_ = false;
  std::atomic<int64_t> waited_ns_ = 0;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool ordered_ = false;  // a copy that the thread has not looked at
  Status failed_;
  std::thread thread_;  // last: it uses all above
};

}  // namespace cairn::ckpt
