#pragma once
// A slot of an arena as files to be written.

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/write_parts.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/snapshot.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

/// What a save of a slot is made of, kept from save to save: with many shards, making it anew costs as much as writing.
class SlotSource {
 public:
  explicit SlotSource(const Arena& arena) : arena_(arena) {}

  /// The skeleton for save_checkpoint; give_back() returns it.
  Result<Manifest> take_skeleton() {
    RT_TRY(read_directory());
    return *std::exchange(skeleton_, std::nullopt);
  }
  void give_back(Manifest saved) { skeleton_ = std::move(saved); }

  /// Counted over all ranks of the world, whose files these are a part of; none: they are all.
  const std::optional<ChecksumBytes>& checksum_bytes() const { return checksum_bytes_; }

  /// After take_skeleton(): the files of `slot`, with the word sums that the updates have left, or without.
  std::span<const WriterPart> parts(int64_t slot, std::span<const RankSnapshot> ranks = {});

 private:
  Status read_directory();

  const Arena& arena_;
  std::optional<Manifest> skeleton_;
  std::vector<WriterPart> parts_;
  std::vector<int64_t> ranks_;  // whose slot each part is
  std::optional<ChecksumBytes> checksum_bytes_;
  int64_t slot_ = 0;  // that `parts_` point into
};

}  // namespace cairn::ckpt
