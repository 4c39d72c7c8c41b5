#pragma once
// The optimizer of one rank: over its shards of the flat parameter range, the rule that the recipe chooses (rules/) and
// what follows it (after/). Gradients come reduced and weights go out by runtime/data_parallel. Owns no memory.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/comm/rank_groups.h"
#include "runtime/core/exact_sum.h"
#include "runtime/core/result.h"
#include "runtime/device/host_numbers.h"
#include "runtime/kernels/state_ops.h"
#include "runtime/optim/after/qk_clip.h"
#include "runtime/optim/rules/groups.h"
#include "runtime/optim/rules/update.h"
#include "runtime/optim/walk/state_walk.h"
#include "runtime/plan/plan.h"

namespace cairn::optim {

class ShardedOptimizer {
 public:
  /// All outlive it. What is done is ordered on `stream`.
  ShardedOptimizer(Stream& stream, const Plan& plan, const RankPlan& rank, const comm::RankGroups& groups,
                   Arrays arrays);

  /// Once the gradients are reduced: orders the adding up of their squares, for the host and for the device. `counted`,
  /// before update_unseen(): this rank's tokens that count; then all ranks' squares, ruined() and tokens are added up
  /// in the order of the device's work.
  Status take_squared_norm(std::optional<int64_t> counted = {});
  /// Once the stream is settled behind that: this rank's part of the squared global gradient norm. Add over the world,
  /// then square root. The same bits for every way of cutting gradients over dp and pp. Where the ranks have added it
  /// up, it is the first one's.
  ExactSum squared_norm_part() const;

  /// Saved state goes from bank to bank, the rest is updated in place. The first time that comes from its peer copies
  /// in bank `from`, which must stay until all ranks have called. All memory is written, visible to other
  /// processes, when the stream is settled. `world`: all ranks. QK clip scales heads when they have been updated; the
  /// average of the weights, if one is kept, comes last.
  Status update(Update update, comm::Comm& world);

  /// Whether an update in place may be ordered before the host knows the norm: the devices have all of it, read nothing
  /// of the hosts', and write nothing where the norm or a loss is not finite. So of state that is where it belongs. The
  /// same on all ranks.
  bool may_update_unseen() const { return !walk_.reads_peers(); }
  /// Orders that update. The squared norm and the tokens that count are what take_squared_norm() has ordered:
  /// Update::squared_norm is not read, and `gradients` has the scale of all tokens.
  Status update_unseen(Update update, comm::Comm& world);
  /// [1] on the device: other than 0 where an update that is ordered behind it is to write nothing.
  DevicePtr<double> ruined() const { return numbers().ruined; }
  /// Once the stream is settled behind update_unseen(): whether it has written. `gradients`: Update's, of the tokens
  /// that count.
  bool wrote(const kernels::ClipNumbers& gradients) const;

  /// With QK clip: where the models of this rank note the largest attention scores, [layers, heads] of the model.
  DevicePtr<float> max_scores() const { return head_numbers(walk_).max_scores; }
  /// Before a step's forward: what is noted there is forgotten.
  void clear_max_scores();
  /// Behind its backward: the scores become those of all ranks, for update() and for the host.
  Status take_max_scores();
  /// Once the stream is settled behind that.
  std::span<const float> largest_scores() const { return max_scores_.read(); }

  /// In place of an update when the step is skipped (StateWalk).
  void keep(int64_t from, int64_t to);
  /// Checksums of what the last of both wrote (StateWalk).
  std::vector<uint64_t> sums() const { return walk_.sums(); }
  /// At the start (StateWalk).
  void make_weights(Stream& stream, int64_t bank, const Bucket& bucket) const {
    walk_.make_weights(stream, bank, bucket);
  }

 private:
  /// Numbers of a step that stay on the device, in Arrays::work.
  struct Numbers {
    DevicePtr<kernels::Clip> clip;
    DevicePtr<double> ruined, words,
        counted;  // [1]; those of the squared norm; [1]: kNormNumbers, one behind the other
  };
  Numbers numbers() const;
  ExactSum norm_words() const;
  Status apply(const Update& update, comm::Comm& world);

  StateWalk walk_;
  comm::RankGroups groups_;
  std::vector<TensorRates> rates_;               // of the plan's tensors
  std::vector<kernels::ElemRun> gradient_runs_;  // of Arrays::grads: what this rank's part of the norm is of
  HostNumbers<double> squared_norm_;             // Numbers::ruined, and the words
  HostNumbers<float> max_scores_;                // of all ranks' heads; with QK clip
  std::optional<int64_t> counted_;               // tokens that count, of this rank
  Update given_;                                 // the last one: the device reads its numbers here
};

}  // namespace cairn::optim
