#pragma once
// Copies a rank's state into a slot that outlives the process, out of memory that no other process can read or that
// dies with it. Copies beside training, in the order in which the next update overwrites, with checksums.
//
// Life of a copy whose link copies at once (host memory): 1. start(): the copier's thread takes part after part, with
// its sums in the same pass. 2. An update about to overwrite a part waits for it (CopyGate). A part that the thread has
// not begun is copied by the update: it is then in its caches, and a copier without a core delays nobody. 3. The thread
// that reads the last part calls `done`.
//
// Life of a copy from a device: 1. start(): the copier's thread orders the sums and then all parts on the link's
// stream, as far as the link's depth allows, with a mark behind each piece of some parts. 2. An update that is about to
// overwrite a part is ordered behind the mark of its piece: the device waits, not the host. 3. The copier's thread
// waits for the marks, each with the link's deadline, and calls `done`. An update that comes before the thread has
// ordered its piece waits for that, and not for ever. Where the link takes no sums, the thread takes them from the
// host's copy.
//
// Threads: start(), finish(), block_bytes() and order_after_copy() are the owner's; `done` is called on the owner's
// thread or the copier's own.

#include <atomic>
#include <condition_variable>
#include <cstdint>
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

/// Copied at once of host memory.
inline constexpr int64_t kCopyBlockBytes = int64_t{1} << 20;
/// How much of a copy a device copies at once: copies of training come in between, and large state is some 512 such
/// fetches.
int64_t fetch_bytes(int64_t copy_bytes);

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
std::vector<CopyPart> parts_of(std::span<const std::vector<CopyArray>> groups, int64_t block_bytes);

class StateCopier final : public CopyGate {
 public:
  /// With the word_sums of all shards, once every part is in the slot.
  using Done = std::function<Status(std::span<const uint64_t> sums)>;

  /// `nice` of the thread.
  explicit StateCopier(std::unique_ptr<DeviceLink> link, int nice);
  ~StateCopier() override;  // gives up a copy under way
  StateCopier(const StateCopier&) = delete;
  StateCopier& operator=(const StateCopier&) = delete;

  /// What is copied from now on; no copy is under way. Arrays do not overlap and are copied in this order. A device
  /// copies neighbours together, with the gap between them: arrays less than a page apart, here as in the slot, which
  /// are of one allocation. Errors: those of the link.
  Status cover(std::span<const std::vector<CopyArray>> groups, int64_t shards);

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
  /// How far a piece is; at_once() each part is one. kOrdered: its mark can be followed.
  enum State : uint32_t { kOpen, kTaken, kOrdered, kRead };
  struct Piece {
    size_t end = 0;  // behind its last fetch; at_once(): part
    std::atomic<uint32_t> state = kRead;
    std::shared_ptr<const Event> mark;
  };
  /// A run that a device copies at once.
  struct Fetch {
    DevicePtr<std::byte> from;
    int64_t offset = 0, bytes = 0;
  };
  void join_parts(int64_t most_bytes);
  void run(int nice);
  Status copy_parts();
  Status copy_pieces();
  Status arrive(size_t piece);
  bool take(size_t part);
  Status fetch(size_t part);
  void note(size_t part, uint64_t sums);
  void complete(std::span<const uint64_t> sums);
  void reach(size_t piece, State state);
  void fail(const Error& error);
  /// Until the piece has come so far, or the copier has stood still for twice the link's deadline and the copy has
  /// failed; at_once() the caller may copy it itself.
  void wait_for(size_t piece, State state);

  std::unique_ptr<DeviceLink> link_;
  std::vector<CopyPart> parts_;
  std::vector<size_t> by_address_;  // into parts_, by CopyPart::from
  std::vector<size_t> piece_of_;    // of the parts
  std::vector<Fetch> fetches_;      // of the pieces; at_once(): none
  std::vector<uint64_t> sums_;      // of the parts
  std::vector<size_t> array_shards_;
  int64_t shards_ = 0;
  size_t pieces_count_ = 0;
  std::unique_ptr<Piece[]> pieces_;
  int64_t block_bytes_ = kCopyBlockBytes;  // while a copy is under way
  bool device_sums_ = false;
  std::byte* slot_ = nullptr;
  Done done_;
  std::atomic<int64_t> left_ = 0;     // parts without sums
  std::atomic<int64_t> reached_ = 0;  // how often any piece has come further
  std::atomic<bool> under_way_ = false, stopping_ = false;
  std::atomic<int64_t> waited_ns_ = 0;
  const Stream* follower_ =
      nullptr;  // of the piece before followed_: the next one of a copy comes behind all before it
  size_t followed_ = 0;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool ordered_ = false;  // a copy that the thread has not looked at
  Status failed_;
  std::thread thread_;  // last: it uses all above
};

}  // namespace cairn::ckpt
