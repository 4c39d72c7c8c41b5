#pragma once
// Writing and reading one rank's snapshot in its slot of the arena.
//
// Writing: 1. sequence becomes odd (the slot is being written, the old snapshot is gone). 2. Step, incarnation,
// position. 3. Shards are copied, hashed chunk by chunk while the bytes are in cache. 4. The hash over header, position
// and chunk hashes. 5. sequence becomes even, with release. A SIGKILL between any two instructions leaves it odd or
// complete. A reader trusts the even number only as a hint: every count is bounded by the static tables, and the hashes
// decide.

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

  /// Copies `sources`, the memory of each shard in the order of the rank's SlotLayout, into the slot and publishes it.
  /// Returns the nanoseconds it took. The caller obeys the slot rule (slot_rule.h).
  /// Errors: kInvalidInput when number or sizes of the sources are not the layout's, or the position is longer than
  /// kPositionCapacity; the slot is untouched then.
  Result<int64_t> write(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position,
                        std::span<const std::span<const std::byte>> sources);

  /// The same for a slot whose bytes are in place already: load_slot has read them there.
  Status seal(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position);

 private:
  const Arena& arena_;
  int64_t rank_;
};

struct RankSnapshot {
  uint64_t incarnation = 0;
  int64_t step = 0;
  std::string position;
  std::vector<uint64_t> hashes;  // of the chunks, shard after shard
  int64_t copy_ns = 0;
};

/// Reads and checks the header of one slot: copies, so that they stay what was checked. `payload_too` also recomputes
/// every chunk's hash.
/// Errors: kCorrupt naming rank, slot and what does not hold.
Result<RankSnapshot> read_slot(const Arena& arena, int64_t rank, int64_t slot, bool payload_too);

/// A snapshot that is whole on all ranks.
struct CommonSnapshot {
  int64_t slot = 0;
  uint64_t incarnation = 0;
  int64_t step = 0;
  std::string position;
  std::vector<RankSnapshot> ranks;
};

/// The given slot, checked on all ranks: headers, hashes, and that all say the same incarnation, step and position.
Result<CommonSnapshot> read_common(const Arena& arena, int64_t slot, bool payload_too);

/// The newest snapshot that is whole and whose every byte verifies. One that does not verify is skipped, and why is
/// added to `problems`.
std::optional<CommonSnapshot> newest_verified(const Arena& arena, std::vector<std::string>* problems = nullptr);

}  // namespace cairn::ckpt
