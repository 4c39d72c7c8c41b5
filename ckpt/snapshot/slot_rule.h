#pragma once
// Which snapshot slot may be overwritten: the rule that keeps a whole snapshot alive whatever is killed, and when.
// Pure; tests/ckpt/snapshot/slot_rule_test.cc walks every interleaving of three ranks, a persister and kills.
//
// Terms. A *mark* is what one rank's slot says of itself. A slot is *whole* when the marks of all ranks are whole, of
// one incarnation (life of the ranks between two restarts) and one step; only then it can be restored or persisted.
// A slot is *reserved* from the moment world rank 0 asks for it to be persisted until the agent is done with it.
//
// Rule. World rank 0, before it orders a snapshot, reads all marks and takes slot t only if
//   (1) t is not reserved, and
//   (2) some other slot is whole, or no slot at all is.
// Among those it prefers a slot that is not whole, then the older one. With no such slot there is no snapshot at this
// step; the next step asks again.
//
// Why a whole snapshot, once there is one, never goes away:
//   - Only an order makes a rank write, and an order names t. So the slot o that was whole under (2) is not written for
//     this order. Nor for an earlier one: rank 0 marks each slot it has ordered, in order and before it decides again,
//     so had a later order named o, rank 0's own mark would differ from the others' and o would not be whole. Thus all
//     ranks, also those that lag behind, have finished with o.
//   - Before the next decision that could name o, (2) asks again for another whole slot.
//   - A kill stops writers; it makes no mark whole. What a killed rank left half-written is marked as being written, in
//     an older incarnation, and so can never complete another incarnation's slot.
//   - The persister reads a reserved slot only when it is whole, and (1) keeps writers out until it has finished.
// The promise begins with the first decision that sees a whole slot. Before it, ranks that lag behind could make a slot
// whole which rank 0 has already ordered again; in training a collective of all ranks lies between two orders, nobody
// lags, and the promise begins with the first whole slot.
// After a kill the agent drops reservations of slots that did not become whole (nobody will complete them).

#include <cstdint>
#include <optional>
#include <span>

namespace cairn::ckpt {

enum class SlotPhase : uint8_t { kEmpty, kWriting, kWhole };

/// One rank's slot, as its header says.
struct SlotMark {
  SlotPhase phase = SlotPhase::kEmpty;
  uint64_t incarnation = 0;
  int64_t step = 0;
  bool operator==(const SlotMark&) const = default;
};

/// One slot over all ranks.
struct SlotView {
  bool whole = false;
  bool reserved = false;
  uint64_t incarnation = 0;  // when whole
  int64_t step = 0;
};

SlotView view_of(std::span<const SlotMark> ranks, bool reserved);

/// The slot to write next, or none.
std::optional<int64_t> choose_slot(std::span<const SlotView> slots);

/// The whole slot of the latest incarnation, and in it of the highest step.
std::optional<int64_t> newest_whole(std::span<const SlotView> slots);

}  // namespace cairn::ckpt
