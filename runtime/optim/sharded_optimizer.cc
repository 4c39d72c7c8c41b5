#include "runtime/optim/sharded_optimizer.h"

#include <algorithm>
#include <cstring>

#include "runtime/kernels/adamw.h"
#include "runtime/kernels/elementwise.h"

namespace cairn::optim {
namespace {

/// Calls body(tensor, begin, end) for the parts of `range` that belong to a tensor (alignment gaps are skipped).
template <typename Body>
void for_tensors_in(const RankPlan& rank, const FlatRange& range, const Body& body) {
  for (const LocalTensor& local : rank.tensors) {
    const int64_t begin = std::max(range.begin, local.offset);
    const int64_t end = std::min(range.end, local.offset + count_elems(local.shape));
    if (begin < end) body(local, begin, end);
  }
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(const Plan& plan, const RankPlan& rank, Groups groups, Arrays arrays)
    : plan_(plan), rank_(rank), groups_(groups), arrays_(arrays), zero_(plan.recipe.optimizer.zero >= 1) {
  int64_t partial = 0;
  for (const LocalTensor& local : rank.tensors) {
    if (local.sum_over_tp) partial += count_elems(local.shape);
  }
  partial_.resize(partial);
}

Status ShardedOptimizer::for_buckets(const std::function<Status(size_t)>& body) const {
  for (size_t b = 0; b < rank_.buckets.size(); ++b) RT_TRY(body(b));
  return {};
}

float* ShardedOptimizer::master_of(int64_t flat, int64_t state) const {
  return arrays_.master != nullptr ? arrays_.master + state : static_cast<float*>(arrays_.weights) + flat;
}

Status ShardedOptimizer::reduce_gradients() {
  if (!partial_.empty()) {
    float* at = partial_.data();
    for (const LocalTensor& local : rank_.tensors) {
      if (!local.sum_over_tp) continue;
      at = std::copy_n(arrays_.grads + local.offset, count_elems(local.shape), at);
    }
    RT_TRY(groups_.tp->all_reduce(partial_.data(), static_cast<int64_t>(partial_.size()), DType::kF32,
                                  comm::ReduceOp::kSum, "gradients of replicated tensors"));
    const float* from = partial_.data();
    for (const LocalTensor& local : rank_.tensors) {
      if (!local.sum_over_tp) continue;
      std::copy_n(from, count_elems(local.shape), arrays_.grads + local.offset);
      from += count_elems(local.shape);
    }
  }
  if (groups_.embedding != nullptr) {
    for (const LocalTensor& local : rank_.tensors) {
      if (plan_.tensors[local.tensor].name != "embed.tokens") continue;
      RT_TRY(groups_.embedding->all_reduce(arrays_.grads + local.offset, count_elems(local.shape), DType::kF32,
                                           comm::ReduceOp::kSum, "gradient of the tied embedding"));
    }
  }
  if (groups_.dp->size() == 1) return {};
  return for_buckets([&](size_t b) -> Status {
    const FlatRange& bucket = rank_.buckets[b];
    if (!zero_) {
      return groups_.dp->all_reduce(arrays_.grads + bucket.begin, bucket.size(), DType::kF32, comm::ReduceOp::kSum,
                                    "gradient bucket");
    }
    return groups_.dp->reduce_scatter(arrays_.grads + bucket.begin, arrays_.grads + rank_.share[b].begin,
                                      rank_.share[b].size(), DType::kF32, comm::ReduceOp::kSum, "gradient bucket");
  });
}

double ShardedOptimizer::squared_norm_part() const {
  double sum = 0;
  for (const FlatRange& range : rank_.share) {
    for_tensors_in(rank_, range, [&](const LocalTensor& local, int64_t begin, int64_t end) {
      if (local.primary) sum += kernels::sum_of_squares(arrays_.grads + begin, end - begin);
    });
  }
  return sum;
}

Status ShardedOptimizer::update(int64_t update, double lr, float grad_scale) {
  const OptimizerConfig& config = plan_.recipe.optimizer;
  kernels::AdamwArgs args{.lr = static_cast<float>(lr),
                          .beta1 = static_cast<float>(config.beta1),
                          .beta2 = static_cast<float>(config.beta2),
                          .eps = static_cast<float>(config.eps),
                          .grad_scale = grad_scale,
                          .step = update};
  auto* low = plan_.compute_dtype() == DType::kBf16 ? static_cast<bf16*>(arrays_.weights) : nullptr;
  for (const FlatRange& range : zero_ ? rank_.share : rank_.buckets) {
    for_tensors_in(rank_, range, [&](const LocalTensor& local, int64_t begin, int64_t end) {
      args.weight_decay = plan_.tensors[local.tensor].decay ? static_cast<float>(config.weight_decay) : 0.0f;
      const int64_t state = rank_.state_offset_of(begin);
      kernels::adamw(args, arrays_.grads + begin, master_of(begin, state), arrays_.exp_avg + state,
                     arrays_.exp_avg_sq + state, low != nullptr ? low + begin : nullptr, end - begin);
    });
  }
  if (!zero_ || groups_.dp->size() == 1) return {};
  const int64_t elem_bytes = dtype_size_bytes(plan_.compute_dtype());
  auto* weights = static_cast<std::byte*>(arrays_.weights);
  return for_buckets([&](size_t b) {
    return groups_.dp->all_gather(weights + rank_.share[b].begin * elem_bytes,
                                  weights + rank_.buckets[b].begin * elem_bytes, rank_.share[b].size() * elem_bytes,
                                  "updated weights");
  });
}

Status ShardedOptimizer::spread_share() {
  const bool is_bf16 = plan_.compute_dtype() == DType::kBf16;
  const auto gather_floats = [&](float* array, const char* what) {  // arrays that span the whole flat range
    return for_buckets([&](size_t b) {
      return groups_.dp->all_gather(array + rank_.share[b].begin, array + rank_.buckets[b].begin,
                                    rank_.share[b].size() * 4, what);
    });
  };
  if (!zero_ && groups_.dp->size() > 1) {
    RT_TRY(gather_floats(arrays_.exp_avg, "first moments"));
    RT_TRY(gather_floats(arrays_.exp_avg_sq, "second moments"));
    if (is_bf16) RT_TRY(gather_floats(arrays_.master, "master weights"));
  }
  if (!is_bf16)
    return groups_.dp->size() > 1 ? gather_floats(static_cast<float*>(arrays_.weights), "weights") : Status{};
  auto* weights = static_cast<bf16*>(arrays_.weights);
  if (!zero_) {
    kernels::cast(arrays_.master, weights, rank_.flat_elems);
    return {};
  }
  for (const FlatRange& range : rank_.share) {
    kernels::cast(arrays_.master + rank_.state_offset_of(range.begin), weights + range.begin, range.size());
  }
  if (groups_.dp->size() == 1) return {};
  return for_buckets([&](size_t b) {
    return groups_.dp->all_gather(weights + rank_.share[b].begin, weights + rank_.buckets[b].begin,
                                  rank_.share[b].size() * 2, "weights");
  });
}

}  // namespace cairn::optim
