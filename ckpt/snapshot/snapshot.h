#pragma once
// The marks and headers of one rank's banks and weights in the arena, and how they are read.
//
// A bank becomes a snapshot:
//   1. begin(): the sequences of the bank and of the weights become odd: what they held is gone.
//   2. The update writes into them, or a copy into the bank (copy/).
//   3. publish(): step, incarnation, position, the word sums of each shard as whoever wrote it has taken them, the hash
//      over all that; then the bank's sequence becomes even, with release. That of the weights does in weights_whole().
// begin() and publish() cost microseconds at any size. A SIGKILL between any two instructions leaves a bank odd or
// complete. A reader trusts the even number only as a hint: every count is bounded by the static tables, the hash
// covers the header, and the word sums the bytes, for whoever has reason to read them all.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/snapshot/arena.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class SnapshotWriter {
 public:
  SnapshotWriter(const Arena& arena, int64_t rank) : arena_(arena), rank_(rank) {}

  /// The bank and the weights are being written from now on. The caller obeys the slot rule (slot_rule.h).
  void begin(int64_t slot, uint64_t incarnation, int64_t step);

  /// The bank is written, and `sums` are the word_sums of the bank's shards in the order of the rank's SlotLayout.
  /// `pause_ns`: what training lost to this snapshot on this rank so far.
  /// Errors: kInvalidInput when the number of sums is not the layout's, or the position is longer than
  /// kPositionCapacity; the bank stays unpublished then.
  Status publish(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position,
                 std::span<const uint64_t> sums, int64_t pause_ns);

  /// The weights are those of `step`, before the next begin(). Beside publish(), from any thread.
  void weights_whole(uint64_t incarnation, int64_t step);

  /// Publishes a bank whose bytes were read from disk into their place; the weights are not of its step, and say so.
  Status seal(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position);

 private:
  Status fill_header(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position,
                     std::span<const uint64_t> sums, int64_t pause_ns);
  const Arena& arena_;
  int64_t rank_;
};

/// How far a reader goes: headers are enough unless somebody may have written where he should not.
enum class Check { kHeaders, kEveryByte };

struct RankSnapshot {
  uint64_t incarnation = 0;
  int64_t step = 0;
  std::string position;
  std::vector<uint64_t> sums;  // of the shards
  int64_t pause_ns = 0;
};

/// Reads and checks the header of one slot: copies, so that they stay what was checked. kEveryByte also takes the word
/// sums of every shard again, at the speed of memory.
/// Errors: kCorrupt naming rank, slot and what does not hold.
Result<RankSnapshot> read_slot(const Arena& arena, int64_t rank, int64_t slot, Check check);

/// A snapshot that is whole on all ranks of this host.
struct CommonSnapshot {
  int64_t slot = 0;
  uint64_t incarnation = 0;
  int64_t step = 0;
  std::string position;
  std::vector<RankSnapshot> ranks;  // of this host, from Arena::ranks().first on
};

/// The given slot, checked on all ranks, and that all say the same incarnation, step and position.
Result<CommonSnapshot> read_common(const Arena& arena, int64_t slot, Check check);

/// The newest snapshot that is whole and passes the check. One that does not is skipped, why is added to `problems`,
/// and its slot to `damaged`. `among`: those alone are looked at, where other hosts lack the rest.
std::optional<CommonSnapshot> newest_verified(const Arena& arena, Check check,
                                              std::vector<std::string>* problems = nullptr,
                                              std::vector<int64_t>* damaged = nullptr,
                                              const std::vector<WholeSlot>* among = nullptr);

/// All that are whole and pass the check, ascending; `damaged` as above.
std::vector<WholeSlot> all_verified(const Arena& arena, Check check, std::vector<std::string>* problems,
                                    std::vector<int64_t>* damaged);

}  // namespace cairn::ckpt
