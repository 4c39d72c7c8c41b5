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
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::optim {

/// The rank's groups; embedding may be null when it has one member or the rank holds no tied copy.
struct Groups {
  comm::Comm* tp = nullptr;
  comm::Comm* dp = nullptr;
  comm::Comm* embedding = nullptr;
};

struct Arrays {
  void* weights = nullptr;      // flat_elems of the compute dtype
  float* grads = nullptr;       // flat_elems
  float* master = nullptr;      // bf16: state_elems; float: the weights themselves (null)
  float* exp_avg = nullptr;     // state_elems
  float* exp_avg_sq = nullptr;  // state_elems
};

class ShardedOptimizer {
 public:
  ShardedOptimizer(const Plan& plan, const RankPlan& rank, Groups groups, Arrays arrays);

  /// After the last backward of a step.
  Status reduce_gradients();

  /// This rank's part of the squared global gradient norm: add over the world, then square root.
  double squared_norm_part() const;

  /// `update` counts from 1 (bias correction); `grad_scale` is the clip coefficient.
  Status update(int64_t update, double lr, float grad_scale);

  /// After the share of the state was filled (initialised or loaded): completes what other replicas hold, and derives
  /// the compute-dtype weights from the masters.
  Status spread_share();

 private:
  Status for_buckets(const std::function<Status(size_t bucket)>& body) const;
  float* master_of(int64_t flat, int64_t state) const;

  const Plan& plan_;
  const RankPlan& rank_;
  Groups groups_;
  Arrays arrays_;
  bool zero_;
  std::vector<float> partial_;  // gathers the small replicated tensors for one all-reduce over tp
};

}  // namespace cairn::optim
