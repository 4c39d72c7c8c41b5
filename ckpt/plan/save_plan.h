#pragma once
// Plan -> what is saved, by whom, and where it stands in memory. Pure arithmetic from the plan, so that ranks, agent,
// reshard and verify compute the same answer without talking.
//
// A rank saves the primary pieces of its share, saved_arrays() times over: float weight, first and second moment, and
// the average of the weights if the recipe keeps one. Its shards stand kind by kind in the order of RankPlan::pieces,
// both in a snapshot slot and in its file.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/manifest.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/plan/plan.h"

namespace cairn::ckpt {

/// Kinds of state as manifests spell them; the index is the value of trainer::StateKind.
inline constexpr std::array<std::string_view, 4> kStateKinds = {"weight", "exp_avg", "exp_avg_sq", "ema"};
inline constexpr std::string_view kWeightKind = kStateKinds[0];
inline constexpr std::string_view kEmaKind = kStateKinds[3];

/// Training state, not a file that an import kept.
bool is_state_kind(std::string_view kind);
/// First or second moment.
bool is_moment_kind(std::string_view kind);

inline constexpr int64_t kPageBytes = 4096;            // alignment of large shards: O_DIRECT from where they lie
inline constexpr int64_t kPagedShardBytes = 64 << 10;  // smaller ones are packed: alignment would waste up to 6 %
inline constexpr int64_t kPackedAlign = 64;            // a cache line

/// One box of one kind of one tensor, at [offset, offset + bytes) of the rank's slot.
struct SlotShard {
  int64_t kind = 0;    // index into kStateKinds
  int64_t tensor = 0;  // index into Plan::tensors
  Box box;
  int64_t offset = 0, bytes = 0;
  bool operator==(const SlotShard&) const = default;
};

struct SlotLayout {
  std::vector<SlotShard> shards;
  int64_t bytes = 0;  // of the slot, a multiple of kPageBytes; 0 for a rank that saves nothing
};

/// The shards that `rank` saves, in order, without overlap, offsets ascending: of the first `kinds` kinds of state.
SlotLayout slot_layout(const Plan& plan, int64_t rank, int64_t kinds);
/// As the plan's recipe has them.
SlotLayout slot_layout(const Plan& plan, int64_t rank);

/// slot_layout of every rank.
std::vector<SlotLayout> slot_layouts(const Plan& plan);

/// Index into the tensors of manifest_skeleton: kinds outermost, each with all of Plan::tensors in order.
inline int64_t manifest_tensor(const Plan& plan, int64_t kind, int64_t tensor) {
  return kind * static_cast<int64_t>(plan.tensors.size()) + tensor;
}

/// The tensors of a checkpoint of this model: the first `kinds` kinds x every logical tensor, f32.
std::vector<TensorEntry> state_tensors(const std::vector<TensorSpec>& tensors, int64_t kinds);
std::vector<TensorEntry> state_tensors(const Plan& plan);

struct RunText {
  std::string run_name, run_id;
  std::vector<std::string> parents;  // ids of the runs this one continues, oldest first
  std::string recipe_json, recipe_hash;
};

/// A manifest without step, state, files and shards.
Manifest manifest_skeleton(const Plan& plan, const RunText& run);

/// A manifest that describes one slot of all ranks as if each rank's slot were a file (in rank order; a rank that saves
/// nothing has none), offset = offset in the slot. It makes snapshot memory readable by the same load plan as a
/// checkpoint on disk. Hashes are zero.
Manifest slot_manifest(const Plan& plan, const std::vector<SlotLayout>& layouts, const RunText& run,
                       int64_t chunk_bytes);

/// Equal exactly when every rank saves the same boxes of the same tensors at the same offsets: XXH3_64 over names,
/// shapes and layouts. Snapshot memory of one layout is never taken for that of another.
uint64_t layout_hash(const Plan& plan, const std::vector<SlotLayout>& layouts);

}  // namespace cairn::ckpt
