#pragma once
// AdamW over a rank's flat parameter range, with data-parallel reduction by bucket and, with ZeRO-1, state for this
// rank's share only. Owns no memory.
//
// Life of an update: sum partial gradients over tp (replicated tensors under sequence parallel) -> sum the two copies
// of a tied embedding -> reduce by bucket over dp -> norm over the whole mesh, each logical element once -> clip ->
// AdamW on the share (ZeRO-1) or on everything -> gather weights by bucket over dp (ZeRO-1).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/core/exact_sum.h"
#include "runtime/core/result.h"
#include "runtime/kernels/adamw.h"
#include "runtime/optim/groups.h"
#include "runtime/plan/plan.h"

namespace cairn::optim {

/// The rank's groups; embedding may be null when it has one member or the rank holds no tied copy.
struct Groups {
  comm::Comm* tp = nullptr;
  comm::Comm* dp = nullptr;
  comm::Comm* embedding = nullptr;
};

/// Where the arrays of a rank lie; memory of others.
struct Arrays {
  void* weights = nullptr;            // flat_elems of the compute dtype: what forward and backward read
  float* grads = nullptr;             // flat_elems
  kernels::AdamwState private_state;  // private_elems each
  std::vector<std::vector<kernels::AdamwState>> banks;  // of each bank, where each primary piece's state lies
};

class ShardedOptimizer {
 public:
  ShardedOptimizer(const Plan& plan, const RankPlan& rank, Groups groups, Arrays arrays);

  /// After the last backward of a step.
  Status reduce_gradients();

  /// This rank's part of the squared global gradient norm: add over the world, then square root. The same bits for
  /// every way of cutting gradients over dp and pp.
  ExactSum squared_norm_part() const;

  /// `update` counts from 1 (bias correction); `grad_scale` is the clip coefficient. The saved state goes from bank
  /// `from` into bank `to`, which may be the same; a kill leaves `from` whole if it is another. The rest is updated in
  /// place. All memory is written when it returns, visible to other processes.
  Status update(int64_t update, double lr, float grad_scale, int64_t from, int64_t to);

  /// In place of an update when the step is skipped: the saved state goes from bank `from` into bank `to` as it is.
  void keep(int64_t from, int64_t to);

  /// word_sums (runtime/core/word_sums.h) of what the last update wrote into a bank: the weights of all primary pieces,
  /// then the first moments, then the second ones.
  std::span<const uint64_t> sums() const { return sums_; }

  /// After the pieces were filled (initialised or loaded) in `bank` and the private state: completes what is held for
  /// other replicas and, unless they are `ready`, derives the weights. Collective, so `ready` is the same on all ranks.
  /// The gradients are used as room.
  Status spread_share(int64_t bank, bool weights_ready);

 private:
  Status for_buckets(const std::function<Status(size_t bucket)>& body) const;
  kernels::AdamwState private_at(int64_t offset) const;
  /// The weights that forward and backward read, from the float master.
  void put_weights(const float* master, int64_t flat, int64_t count) const;
  /// Calls body(piece, its state in `bank` or the private state).
  template <typename Body>
  void for_pieces(int64_t bank, const Body& body) const;

  const Plan& plan_;
  const RankPlan& rank_;
  Groups groups_;
  Arrays arrays_;
  bool zero_;
  bool stream_;  // a bank is larger than the caches
  std::vector<uint64_t> sums_;
  std::vector<TensorRates> rates_;  // of the plan's tensors
  std::vector<float> partial_;  // gathers the small replicated tensors for one all-reduce over tp
};

}  // namespace cairn::optim
