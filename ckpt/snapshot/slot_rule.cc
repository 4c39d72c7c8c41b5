#include "ckpt/snapshot/slot_rule.h"

#include <tuple>
#include <vector>

namespace cairn::ckpt {

SlotView view_of(std::span<const SlotMark> ranks, bool reserved) {
  SlotView view{.whole = !ranks.empty(), .reserved = reserved};
  for (const SlotMark& mark : ranks) view.whole = view.whole && mark.phase == SlotPhase::kWhole && mark == ranks[0];
  if (view.whole) {
    view.incarnation = ranks[0].incarnation;
    view.step = ranks[0].step;
  }
  return view;
}

std::optional<int64_t> choose_slot(std::span<const SlotView> slots, int64_t current) {
  const auto worth = [](const SlotView& slot) { return std::tuple(slot.whole, slot.incarnation, slot.step); };
  std::optional<int64_t> best;
  for (int64_t k = 0; k < static_cast<int64_t>(slots.size()); ++k) {
    if (k == current || slots[k].reserved) continue;
    if (!best || worth(slots[k]) < worth(slots[*best])) best = k;
  }
  return best;
}

std::optional<int64_t> choose_slot_for_copy(std::span<const SlotView> slots, int64_t last) {
  if (slots.size() == 1) {
    const bool free = !slots[0].reserved && (last < 0 || slots[0].whole);
    return free ? std::optional<int64_t>(0) : std::nullopt;
  }
  std::vector<SlotView> others(slots.begin(), slots.end());
  if (const std::optional<int64_t> newest = newest_whole(slots)) others[static_cast<size_t>(*newest)].reserved = true;
  return choose_slot(others, last);
}

std::optional<int64_t> newest_whole(std::span<const SlotView> slots) {
  std::optional<int64_t> best;
  for (int64_t k = 0; k < static_cast<int64_t>(slots.size()); ++k) {
    if (!slots[k].whole) continue;
    if (!best ||
        std::tuple(slots[*best].incarnation, slots[*best].step) < std::tuple(slots[k].incarnation, slots[k].step)) {
      best = k;
    }
  }
  return best;
}

}  // namespace cairn::ckpt
