#pragma once
// Plan -> what is saved, by whom, and where it stands in memory. Pure arithmetic from the plan, so that ranks, agent
// and reshard compute the same answer without talking.
//
// A rank saves the primary pieces of its share, once for each of StateKinds::arrays(), and its primary SumPieces. Its
// shards stand kind by kind in the order of RankPlan::pieces and ::sums, both in a snapshot slot and in its file.

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
inline constexpr std::array<std::string_view, kStateKindCount> kStateKinds = {
    "weight", "exp_avg", "exp_avg_sq", "ema", "exp_avg_sq_row", "exp_avg_sq_col"};
inline constexpr std::string_view kWeightKind = kStateKinds[0];
inline constexpr std::string_view kEmaKind = kStateKinds[3];

/// Training state, not a file that an import kept.
bool is_state_kind(std::string_view kind);
/// First or second moment, also of rows and columns.
bool is_moment_kind(std::string_view kind);
/// Kinds of state that a checkpoint holds.
StateKinds kinds_in(const Manifest& manifest);
/// Whether it holds optimizer state: without, it is nothing that training goes on from.
bool has_moments(const Manifest& manifest);
/// Whether a run that resumes from this checkpoint of its own begins with moments of zero: the stored ones are of
/// another optimizer than the plan's, and the run's past says that they ended on the way.
bool moments_begin(const Plan& plan, const Manifest& manifest);
/// Refuses moments that are factored where the run's are not, and the other way round. Errors: kInvalidInput.
Status check_moments(const StateKinds& saved, const StateKinds& wanted);

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

/// The shards that `rank` saves, in order, without overlap, offsets ascending: of `kinds`, a part of the plan's. With
/// all of them they lie as RankPlan has the arrays in a device's memory.
SlotLayout slot_layout(const Plan& plan, int64_t rank, const StateKinds& kinds);
/// As the plan's recipe has them.
SlotLayout slot_layout(const Plan& plan, int64_t rank);

/// slot_layout of every rank.
std::vector<SlotLayout> slot_layouts(const Plan& plan);

/// The tensors of a checkpoint of this model, f32: kinds outermost, each with every logical tensor that has it.
std::vector<TensorEntry> state_tensors(const std::vector<TensorSpec>& tensors, const StateKinds& kinds);
std::vector<TensorEntry> state_tensors(const Plan& plan);

/// Where they stand there.
class StateIndex {
 public:
  StateIndex(const std::vector<TensorSpec>& tensors, const StateKinds& kinds);
  explicit StateIndex(const Plan& plan) : StateIndex(plan.tensors, plan.state_kinds()) {}

  /// Of a SlotShard's kind and tensor, which has that kind.
  int64_t at(int64_t kind, int64_t tensor) const { return index_[static_cast<size_t>(kind)].at(tensor); }
  /// Index into Plan::tensors.
  int64_t tensor_of(int64_t index) const { return tensor_.at(index); }
  int64_t size() const { return std::ssize(tensor_); }

 private:
  std::array<std::vector<int64_t>, kStateKindCount> index_;
  std::vector<int64_t> tensor_;
};

struct RunText {
  std::string run_name, run_id;
  std::vector<std::string> parents;  // ids of the runs this one continues, oldest first
  std::string recipe_json, recipe_hash;
  std::string lineage;  // hash of the last line of the run's lineage.jsonl; empty: none
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
