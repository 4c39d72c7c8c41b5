#pragma once
// AdamW, or LAMB, over a rank's shards of the flat parameter range: state for what this rank updates, in banks what it
// saves, private what other replicas save. Gradients come reduced and weights go out by runtime/data_parallel. Owns no
// memory.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/exact_sum.h"
#include "runtime/core/result.h"
#include "runtime/kernels/adamw.h"
#include "runtime/optim/groups.h"
#include "runtime/optim/qk_clip.h"
#include "runtime/plan/plan.h"

namespace cairn::optim {

/// Where the arrays of a rank lie; memory of others.
struct Arrays {
  void* weights = nullptr;                              // weight_bytes, in the compute dtype: RankPlan::weight_offset()
  float* grads = nullptr;                               // reduced sums: RankPlan::grad_offset()
  kernels::AdamwState private_state;                    // private_elems each
  std::vector<std::vector<kernels::AdamwState>> banks;  // of each bank, where each primary piece's state lies
};

class ShardedOptimizer {
 public:
  /// `replica`: the ranks with the same shards; `expert_replica`: with the same shards of divided experts, null where
  /// there are none.
  ShardedOptimizer(const Plan& plan, const RankPlan& rank, comm::Comm& replica, comm::Comm* expert_replica,
                   Arrays arrays);

  /// This rank's part of the squared global gradient norm: add over the world, then square root. The same bits for
  /// every way of cutting gradients over dp and pp.
  ExactSum squared_norm_part() const;

  /// `update` counts from 1 (bias correction); `grad_scale` is the clip coefficient. The saved state goes from bank
  /// `from` into bank `to`, which may be the same; a kill leaves `from` whole if it is another. The rest is updated in
  /// place. All memory is written when it returns, visible to other processes.
  /// `world`: all ranks; LAMB adds up the norms of each tensor there. `tokens` of the step. `heads`, unless it is null,
  /// scales the rows of the query and key projections when they have been updated; the average of the weights, if one
  /// is kept, comes last.
  Status update(int64_t update, double lr, float grad_scale, int64_t from, int64_t to, int64_t tokens,
                comm::Comm& world, const HeadFactors* heads = nullptr);

  /// In place of an update when the step is skipped: the saved state goes from bank `from` into bank `to` as it is.
  void keep(int64_t from, int64_t to);

  /// word_sums (runtime/core/word_sums.h) of what the last update wrote into a bank: the weights of all primary pieces,
  /// then the first moments, then the second ones, then the averages.
  std::span<const uint64_t> sums() const { return sums_; }

  /// After the pieces were filled (initialised or loaded) in `bank` and the private state: completes what is held for
  /// other replicas and, unless they are `ready`, derives the weights of the shards. Collective, so `ready` is the same
  /// on all ranks. The gradients are used as room.
  Status spread_share(int64_t bank, bool weights_ready);

 private:
  kernels::AdamwState private_at(int64_t offset) const;
  /// The weights that forward and backward read, from the float master.
  void put_weights(const float* master, int64_t flat, int64_t count) const;
  kernels::AdamwArgs args_of(int64_t tensor, int64_t update, double lr, float grad_scale) const;
  void adamw(int64_t update, double lr, float grad_scale, int64_t from, int64_t to);
  Status lamb(int64_t update, double lr, float grad_scale, int64_t from, int64_t to, comm::Comm& world);
  /// Biases that balance experts (TensorSpec::balances): each goes a step of bias_rate towards as many choices as the
  /// others have (Wang et al. 2024; DeepSeek-V3). Their moments stay.
  void balance(int64_t from, int64_t to, int64_t tokens);
  void note_sums(int64_t saved_piece, const kernels::AdamwState& state, int64_t count);
  void find_head_rows();
  void scale_heads(const HeadFactors& heads, int64_t bank);
  void average(int64_t from, int64_t to);
  /// Calls body(part, elements, its state in bank `from`, its state in bank `to`, number of the saved piece or -1) for
  /// all that this rank updates by gradients, pieces and replica runs; private state is both. `balancing`: the rest.
  template <typename Body>
  void for_parts(int64_t from, int64_t to, const Body& body, bool balancing = false) const;
  /// Calls body(piece, its state in `bank` or the private state).
  template <typename Body>
  void for_pieces(int64_t bank, const Body& body) const;

  const Plan& plan_;
  const RankPlan& rank_;
  comm::Comm& replica_;
  comm::Comm* expert_replica_;
  Arrays arrays_;
  bool stream_;  // a bank is larger than the caches
  std::vector<uint64_t> sums_;
  std::vector<TensorRates> rates_;  // of the plan's tensors
  /// The query and key projections that this rank has a part of, weights and biases.
  struct HeadRows {
    int64_t tensor = 0, offset = 0;            // of its first element here, into the flat range
    int64_t head_elems = 0, first_factor = 0;  // of the first head here, into HeadFactors::query or ::key
    bool key = false;
  };
  std::vector<HeadRows> head_rows_;  // with qk_clip
};

}  // namespace cairn::optim
