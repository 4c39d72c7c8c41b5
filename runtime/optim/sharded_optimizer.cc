#include "runtime/optim/sharded_optimizer.h"

#include <algorithm>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/core/word_sums.h"
#include "runtime/kernels/elementwise.h"

namespace cairn::optim {
namespace {

// State below this may still be in the caches when the next update reads it.
constexpr int64_t kCachedBytes = int64_t{8} << 20;

}  // namespace

ShardedOptimizer::ShardedOptimizer(const Plan& plan, const RankPlan& rank, comm::Comm& replica, Arrays arrays)
    : plan_(plan), rank_(rank), replica_(replica), arrays_(std::move(arrays)) {
  const int64_t saved = std::count_if(rank.pieces.begin(), rank.pieces.end(), [](const auto& p) { return p.primary; });
  for (const auto& bank : arrays_.banks) {
    RT_CHECK(std::ssize(bank) == saved, "a bank with {} of {} pieces", bank.size(), saved);
  }
  stream_ = rank.bank_bytes() > kCachedBytes;
  sums_.resize(3 * saved);
  for (const TensorSpec& tensor : plan.tensors) rates_.push_back(rates_of(plan.recipe.optimizer, tensor));
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

ExactSum ShardedOptimizer::squared_norm_part() const {
  ExactSum sum;
  int64_t tensor = -1, begin = 0, end = 0;  // a run: pieces that follow one another, begun at a multiple of 16 elements
  const auto add_run = [&] {
    if (end > begin) kernels::add_squares(arrays_.grads + begin, end - begin, sum);
  };
  for (const StatePiece& piece : rank_.pieces) {
    if (!piece.primary) continue;
    const int64_t at = rank_.grad_offset(piece);
    if (piece.tensor != tensor || at != end) {
      add_run();
      tensor = piece.tensor;
      begin = at;
      RT_CHECK(begin % kAlignElems == 0, "a share begins at element {}", begin);
    }
    end = at + piece.count_elems();
  }
  add_run();
  return sum;
}

void ShardedOptimizer::update(int64_t update, double lr, float grad_scale, int64_t from, int64_t to) {
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
  const auto run = [&](const auto& part, int64_t count, const kernels::AdamwState& source,
                       const kernels::AdamwState& target, kernels::AdamwSums* sums) {
    args.lr = static_cast<float>(lr * rates_[part.tensor].lr);
    args.weight_decay = static_cast<float>(rates_[part.tensor].weight_decay);
    const int64_t weight = rank_.weight_offset(part);
    kernels::adamw(args, arrays_.grads + rank_.grad_offset(part), source, target,
                   full != nullptr ? full + weight : nullptr, low != nullptr ? low + weight : nullptr, count, sums);
    if (compute == DType::kF16) put_weights(target.master, weight, count);
  };
  const size_t saved = sums_.size() / 3;
  size_t k = 0;
  for (const StatePiece& piece : rank_.pieces) {
    if (!piece.primary) {
      const kernels::AdamwState state = private_at(piece.state_offset);
      run(piece, piece.count_elems(), state, state, nullptr);
      continue;
    }
    kernels::AdamwSums sums;
    run(piece, piece.count_elems(), arrays_.banks[from][k], arrays_.banks[to][k], &sums);
    sums_[k] = sums.master;
    sums_[saved + k] = sums.exp_avg;
    sums_[2 * saved + k] = sums.exp_avg_sq;
    ++k;
  }
  for (const ReplicaRun& replica : rank_.replicas) {
    const kernels::AdamwState state = private_at(replica.state_offset);
    run(replica, replica.count, state, state, nullptr);
  }
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
  if (replica_.size() > 1) {  // each array takes the way of the gradients: by bucket, in their memory
    for (float* kernels::AdamwState::*const array :
         {&kernels::AdamwState::master, &kernels::AdamwState::exp_avg, &kernels::AdamwState::exp_avg_sq}) {
      for_pieces(bank, [&](const StatePiece& piece, const kernels::AdamwState& state) {
        std::copy_n(state.*array, piece.count_elems(), arrays_.grads + rank_.grad_offset(piece));
      });
      for (const Bucket& bucket : rank_.buckets) {
        float* const shard = arrays_.grads + (rank_.scattered_grads ? bucket.shard_offset : bucket.shard.begin);
        RT_TRY(replica_.all_gather(shard + bucket.share.begin - bucket.shard.begin, shard, bucket.share.size() * 4,
                                   "optimizer state of the other replicas"));
      }
      for (const ReplicaRun& run : rank_.replicas) {
        std::copy_n(arrays_.grads + rank_.grad_offset(run), run.count, private_at(run.state_offset).*array);
      }
    }
  }
  if (weights_ready) return {};
  for_pieces(bank, [&](const StatePiece& piece, const kernels::AdamwState& state) {
    put_weights(state.master, rank_.weight_offset(piece), piece.count_elems());
  });
  for (const ReplicaRun& run : rank_.replicas) {
    put_weights(private_at(run.state_offset).master, rank_.weight_offset(run), run.count);
  }
  return {};
}

}  // namespace cairn::optim
