#include "runtime/optim/sharded_optimizer.h"

#include <algorithm>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/core/word_sums.h"
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

// State below this may still be in the caches when the next update reads it.
constexpr int64_t kCachedBytes = int64_t{8} << 20;

}  // namespace

ShardedOptimizer::ShardedOptimizer(const Plan& plan, const RankPlan& rank, Groups groups, Arrays arrays)
    : plan_(plan), rank_(rank), groups_(groups), arrays_(std::move(arrays)), zero_(plan.recipe.optimizer.zero >= 1) {
  const int64_t saved = std::count_if(rank.pieces.begin(), rank.pieces.end(), [](const auto& p) { return p.primary; });
  for (const auto& bank : arrays_.banks) {
    RT_CHECK(std::ssize(bank) == saved, "a bank with {} of {} pieces", bank.size(), saved);
  }
  stream_ = rank.bank_bytes() > kCachedBytes;
  sums_.resize(3 * saved);
  for (const TensorSpec& tensor : plan.tensors) rates_.push_back(rates_of(plan.recipe.optimizer, tensor));
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

kernels::AdamwState ShardedOptimizer::private_at(int64_t offset) const {
  const kernels::AdamwState& all = arrays_.private_state;
  return {all.master + offset, all.exp_avg + offset, all.exp_avg_sq + offset};
}

void ShardedOptimizer::put_weights(const float* master, int64_t flat, int64_t count) const {
  switch (plan_.compute_dtype()) {
    case DType::kBf16:
      return kernels::cast(master, static_cast<bf16*>(arrays_.weights) + flat, count);
    case DType::kF16:
      return kernels::cast(master, static_cast<f16*>(arrays_.weights) + flat, count);
    default:
      std::copy_n(master, count, static_cast<float*>(arrays_.weights) + flat);
  }
}

template <typename Body>
void ShardedOptimizer::for_pieces(int64_t bank, const Body& body) const {
  size_t saved = 0;
  for (const StatePiece& piece : rank_.pieces) {
    body(piece, piece.primary ? arrays_.banks[bank][saved++] : private_at(piece.state_offset));
  }
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

ExactSum ShardedOptimizer::squared_norm_part() const {
  ExactSum sum;
  for (const FlatRange& range : rank_.share) {
    for_tensors_in(rank_, range, [&](const LocalTensor& local, int64_t begin, int64_t end) {
      if (local.primary) kernels::add_squares(arrays_.grads + begin, end - begin, sum);
    });
  }
  return sum;
}

Status ShardedOptimizer::update(int64_t update, double lr, float grad_scale, int64_t from, int64_t to) {
  const OptimizerConfig& config = plan_.recipe.optimizer;
  kernels::AdamwArgs args{.beta1 = static_cast<float>(config.beta1),
                          .beta2 = static_cast<float>(config.beta2),
                          .eps = static_cast<float>(config.eps),
                          .grad_scale = grad_scale,
                          .step = update,
                          .stream = stream_};
  const DType compute = plan_.compute_dtype();
  auto* low = compute == DType::kBf16 ? static_cast<bf16*>(arrays_.weights) : nullptr;
  auto* full = compute == DType::kF32 ? static_cast<float*>(arrays_.weights) : nullptr;
  const auto run = [&](int64_t tensor, int64_t flat, int64_t count, const kernels::AdamwState& source,
                       const kernels::AdamwState& target, kernels::AdamwSums* sums) {
    args.lr = static_cast<float>(lr * rates_[tensor].lr);
    args.weight_decay = static_cast<float>(rates_[tensor].weight_decay);
    kernels::adamw(args, arrays_.grads + flat, source, target, full != nullptr ? full + flat : nullptr,
                   low != nullptr ? low + flat : nullptr, count, sums);
    if (compute == DType::kF16) put_weights(target.master, flat, count);
  };
  const size_t saved = sums_.size() / 3;
  size_t k = 0;
  for (const StatePiece& piece : rank_.pieces) {
    if (!piece.primary) {
      const kernels::AdamwState state = private_at(piece.state_offset);
      run(piece.tensor, piece.flat_offset, piece.count_elems(), state, state, nullptr);
      continue;
    }
    kernels::AdamwSums sums;
    run(piece.tensor, piece.flat_offset, piece.count_elems(), arrays_.banks[from][k], arrays_.banks[to][k], &sums);
    sums_[k] = sums.master;
    sums_[saved + k] = sums.exp_avg;
    sums_[2 * saved + k] = sums.exp_avg_sq;
    ++k;
  }
  for (const ReplicaRun& replica : rank_.replicas) {
    const kernels::AdamwState state = private_at(replica.state_offset);
    run(replica.tensor, replica.flat_offset, replica.count, state, state, nullptr);
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

void ShardedOptimizer::keep(int64_t from, int64_t to) {
  const size_t saved = sums_.size() / 3;
  size_t k = 0;
  for (const StatePiece& piece : rank_.pieces) {
    if (!piece.primary) continue;
    size_t array = 0;
    for (float* kernels::AdamwState::*const member :
         {&kernels::AdamwState::master, &kernels::AdamwState::exp_avg, &kernels::AdamwState::exp_avg_sq}) {
      const float* const source = arrays_.banks[from][k].*member;
      float* const target = arrays_.banks[to][k].*member;
      if (target != source) std::copy_n(source, piece.count_elems(), target);
      sums_[array++ * saved + k] = word_sums(reinterpret_cast<const std::byte*>(target), piece.count_elems());
    }
    ++k;
  }
}

Status ShardedOptimizer::spread_share(int64_t bank, bool weights_ready) {
  if (!zero_ && groups_.dp->size() > 1) {  // each array takes the way of the gradients: by bucket, in the flat range
    for (float* kernels::AdamwState::*const array :
         {&kernels::AdamwState::master, &kernels::AdamwState::exp_avg, &kernels::AdamwState::exp_avg_sq}) {
      for_pieces(bank, [&](const StatePiece& piece, const kernels::AdamwState& state) {
        std::copy_n(state.*array, piece.count_elems(), arrays_.grads + piece.flat_offset);
      });
      RT_TRY(for_buckets([&](size_t b) {
        return groups_.dp->all_gather(arrays_.grads + rank_.share[b].begin, arrays_.grads + rank_.buckets[b].begin,
                                      rank_.share[b].size() * 4, "optimizer state of the other replicas");
      }));
      for (const ReplicaRun& replica : rank_.replicas) {
        std::copy_n(arrays_.grads + replica.flat_offset, replica.count, private_at(replica.state_offset).*array);
      }
    }
  }
  if (weights_ready) return {};
  for_pieces(bank, [&](const StatePiece& piece, const kernels::AdamwState& state) {
    put_weights(state.master, piece.flat_offset, piece.count_elems());
  });
  for (const ReplicaRun& replica : rank_.replicas) {
    put_weights(private_at(replica.state_offset).master, replica.flat_offset, replica.count);
  }
  if (!zero_ || groups_.dp->size() == 1) return {};
  const int64_t elem_bytes = dtype_size_bytes(plan_.compute_dtype());
  auto* weights = static_cast<std::byte*>(arrays_.weights);
  return for_buckets([&](size_t b) {
    return groups_.dp->all_gather(weights + rank_.share[b].begin * elem_bytes,
                                  weights + rank_.buckets[b].begin * elem_bytes, rank_.share[b].size() * elem_bytes,
                                  "weights");
  });
}

}  // namespace cairn::optim
