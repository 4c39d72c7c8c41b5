#pragma once
// The state of all ranks of a run from a checkpoint, as a start takes it: the agent reads it once into a bank, where
// each rank finds what it saves, and what it keeps for others with the rank that saves that.

#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <vector>

#include "ckpt/restore.h"
#include "ckpt/restore_slot.h"
#include "ckpt/run_memory.h"
#include "tests/support/ok.h"

namespace cairn::ckpt::testing {

class RunLoad {
 public:
  explicit RunLoad(const Plan& plan) : plan_(plan), arena_(make_arena(plan)) {}

  Result<trainer::TrainPosition> read(IoBackend& io, const std::filesystem::path& dir, const InitConfig& how = {}) {
    arena_.invalidate_slot(kSlot);
    RT_TRY_SET(SlotLoad loaded, load_slot(plan_, arena_, kSlot, ++incarnation_, io, dir, how));
    return std::move(loaded.position);
  }

  /// What was read last, of all that `rank` holds.
  void fill(int64_t rank, std::span<const trainer::StateTensor> state) {
    auto [found, added] = peer_copies_.try_emplace(rank);
    if (added) {
      auto peer_copies = peer_copies_in(plan_, arena_, state);
      REQUIRE_OK(peer_copies);
      found->second = std::move(peer_copies).value();
    }
    for (const PeerCopy& part : found->second)
      std::memcpy(address_of(state[static_cast<size_t>(part.copy)].data) + part.offset, part.banks[kSlot],
                  static_cast<size_t>(part.bytes));
  }

 private:
  static constexpr int64_t kSlot = 0;
  static Arena make_arena(const Plan& plan) {
    auto spec = arena_spec(plan, {.run_name = "load", .run_id = "load", .recipe_json = "{}", .recipe_hash = "r"});
    REQUIRE_OK(spec);
    spec.value().backing = ArenaBacking::kMemfd;
    spec.value().slots = 2;
    spec.value().weight_bytes.clear();
    auto arena = Arena::create(spec.value());
    REQUIRE_OK(arena);
    return std::move(arena).value();
  }

  const Plan& plan_;
  Arena arena_;
  uint64_t incarnation_ = 0;
  std::map<int64_t, std::vector<PeerCopy>> peer_copies_;  // by rank; where, whatever was read
};

}  // namespace cairn::ckpt::testing
