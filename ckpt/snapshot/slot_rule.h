#pragma once
// Which bank the next update may write: the rule that keeps the last completed step alive whatever is killed, and when.
// Pure; tests/ckpt/snapshot/slot_rule_test.cc walks every interleaving of three ranks, a persister and kills.
//
// Terms. A *mark* is what one rank's slot says of itself. A slot is *whole* when the marks of all ranks are whole, of
// one incarnation (life of the ranks between two restarts) and one step; only then it can be restored or persisted. A
// slot is *reserved* from the moment the rank that decides asks for it to be persisted, or copied to another host,
// until the agent is done with it. The *current* slot is the one that the last update wrote, or that was restored.
//
// Rule, for each update.
//   (1) When the current slot was published as a snapshot, the update goes into another slot that is not reserved, of
//       these the one that is not whole, else the oldest. When there is none, that rank waits for the agent. If that
//       takes too long it may give up the newest step: the update goes on in the current slot unless that one is
//       reserved.
//   (2) When it was not, the update goes on in the current slot, in place.
//   (3) A collective of all ranks lies between the publishing of a step and the next update (the sum of the gradient
//       norm, with which its choice travels).
//
// Why a step that all ranks have published, once there is one, can be restored until a later one can:
//   - An update that writes another slot than the current one begins, on any rank, after all ranks have published the
//     current one (3); so the slot of the last completed step is whole while the next one is being written, and it is
//     not chosen again before the next one has been published (1) by all ranks (3).
//   - An update in place (2) writes a slot that is not the newest whole one: that one was current once, published, and
//     left by (1); it is chosen again only when the current slot has been published.
//   - A kill stops writers; it makes no mark whole. What a killed rank left half-written is marked as being written, in
//     an older incarnation, and so can never complete another incarnation's slot. The next life begins with the newest
//     whole slot as its current one, published.
//   - The persister reads a reserved slot only when it is whole. Only current slots become reserved, when published;
//     (1) keeps updates out until the agent has finished.
// Copies (checkpoint.snapshot_by = "copy"). The state lies elsewhere, and a slot is written by copying, beside
// training; it may become whole on one rank long after on another. The rank that decides picks the slot at the end of
// the step that is copied and sends its choice with the step's order; a rank begins to copy when it has published its
// copy before.
//   (1c) The copy goes into a slot that is not reserved, nor the newest whole one, nor the one of the copy before,
//        which may not be whole yet. While the copy before is not whole on all ranks of the host that decides, a
//        device's snapshot is left out, except one that is to be persisted or copied to another host, or is the last.
//        Such a one, and each snapshot of host memory, waits for its rank's own copy. When there is no slot, it waits
//        until the copy before is whole on all ranks; then the snapshot is left out, except one that must be: that
//        waits for the agent, and may at last take the newest whole slot while another whole one is reserved.
// The newest whole slot is left alone until a newer one is whole on all ranks, whichever rank lags behind: it can be
// restored at any time. It is at most two copies old: a rank that begins to copy a step has published its copy before.
// With a copy of each step it is at most one step before the last that all ranks have completed; where a device's copy
// takes n steps, at most 2 n.
//
// One slot, only for copies (checkpoint.in_flight = 0): the copy goes into it when it is not reserved and the copy
// before is whole on all ranks, and overwrites that. While it is under way no step can be restored from memory: a rank
// that is killed then resumes from the newest checkpoint. A slot that is read is never written, as with more.
//
// After a kill the agent drops reservations of slots that did not become whole (nobody will complete them).

#include <compare>
#include <cstdint>
#include <optional>
#include <span>

namespace cairn::ckpt {

/// Banks of a run: one that an update reads, one that it writes, and one for each save on its way to the disk. With
/// fewer an update may have to wait for the disk. Without a save in flight, which only copies can be: one.
constexpr int64_t banks_for(int64_t saves_in_flight) { return saves_in_flight == 0 ? 1 : 2 + saves_in_flight; }
/// More, where steps are copied to another host: one that is being copied, and the one of which all have the copy.
inline constexpr int64_t kReplicaBanks = 2;

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
  bool saving = false;       // reserved, to be persisted
  uint64_t incarnation = 0;  // when whole
  int64_t step = 0;
};

/// A slot that is whole.
struct WholeSlot {
  int64_t slot = 0;
  uint64_t incarnation = 0;
  int64_t step = 0;
  auto operator<=>(const WholeSlot&) const = default;
};

SlotView view_of(std::span<const SlotMark> ranks, bool reserved);

/// The slot that the update after a published `current` may write, or none.
std::optional<int64_t> choose_slot(std::span<const SlotView> slots, int64_t current);

/// The slot that a copy may be written to after one into `last` (-1: there was none), or none.
std::optional<int64_t> choose_slot_for_copy(std::span<const SlotView> slots, int64_t last);

/// The whole slot of the latest incarnation, and in it of the highest step.
std::optional<int64_t> newest_whole(std::span<const SlotView> slots);

}  // namespace cairn::ckpt
