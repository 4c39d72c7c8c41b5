#include "runtime/optim/sharded_optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/core/word_sums.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/ema.h"
#include "runtime/kernels/lamb.h"

namespace cairn::optim {
namespace {

// State below this may still be in the caches when the next update reads it.
constexpr int64_t kCachedBytes = int64_t{8} << 20;

}  // namespace

ShardedOptimizer::ShardedOptimizer(const Plan& plan, const RankPlan& rank, comm::Comm& replica,
                                   comm::Comm* expert_replica, Arrays arrays)
    : plan_(plan), rank_(rank), replica_(replica), expert_replica_(expert_replica), arrays_(std::move(arrays)) {
  const int64_t saved = std::count_if(rank.pieces.begin(), rank.pieces.end(), [](const auto& p) { return p.primary; });
  for (const auto& bank : arrays_.banks) {
    RT_CHECK(std::ssize(bank) == saved, "a bank with {} of {} pieces", bank.size(), saved);
  }
  stream_ = rank.bank_bytes() > kCachedBytes;
  sums_.resize(rank.saved_arrays * saved);
  for (const TensorSpec& tensor : plan.tensors) rates_.push_back(rates_of(plan.recipe.optimizer, tensor));
  if (plan.recipe.optimizer.qk_clip > 0) find_head_rows();
}

void ShardedOptimizer::find_head_rows() {
  const ModelConfig& model = plan_.recipe.model;
  for (const LocalTensor& local : rank_.tensors) {
    const TensorSpec& spec = plan_.tensors[local.tensor];
    const bool key = spec.name.find(".attn.k.") != std::string::npos;
    if (spec.layer < 0 || spec.layer >= model.layers || !(key || spec.name.find(".attn.q.") != std::string::npos)) {
      continue;
    }
    const int64_t row_elems = spec.shape.size() > 1 ? spec.shape[1] : 1;
    head_rows_.push_back({local.tensor, local.offset, model.head_dim * row_elems,
                          spec.layer * (key ? model.kv_heads : model.heads) + local.box.lo[0] / model.head_dim, key});
  }
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
    if (!piece.primary || plan_.tensors[piece.tensor].balances) continue;
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

template <typename Body>
void ShardedOptimizer::for_parts(int64_t from, int64_t to, const Body& body, bool balancing) const {
  const auto wanted = [&](int64_t tensor) { return plan_.tensors[tensor].balances == balancing; };
  int64_t saved = 0;
  for (const StatePiece& piece : rank_.pieces) {
    const int64_t k = piece.primary ? saved++ : -1;
    if (!wanted(piece.tensor)) continue;
    if (piece.primary) {
      body(piece, piece.count_elems(), arrays_.banks[from][k], arrays_.banks[to][k], k);
    } else {
      const kernels::AdamwState state = private_at(piece.state_offset);
      body(piece, piece.count_elems(), state, state, int64_t{-1});
    }
  }
  for (const ReplicaRun& replica : rank_.replicas) {
    if (!wanted(replica.tensor)) continue;
    const kernels::AdamwState state = private_at(replica.state_offset);
    body(replica, replica.count, state, state, int64_t{-1});
  }
}

void ShardedOptimizer::note_sums(int64_t saved_piece, const kernels::AdamwState& state, int64_t count) {
  const int64_t saved = std::ssize(arrays_.banks[0]);
  int64_t array = 0;
  for (const float* values : {state.master, state.exp_avg, state.exp_avg_sq}) {
    sums_[array++ * saved + saved_piece] = word_sums(reinterpret_cast<const std::byte*>(values), count);
  }
}

void ShardedOptimizer::balance(int64_t from, int64_t to, int64_t tokens) {
  const MoeConfig& moe = plan_.recipe.model.moe;
  if (moe.bias_rate == 0) return;
  const auto mean = static_cast<float>(static_cast<double>(tokens * moe.top_k) / static_cast<double>(moe.experts));
  for_parts(
      from, to,
      [&](const auto& part, int64_t count, const kernels::AdamwState& source, const kernels::AdamwState& target,
          int64_t k) {
        const float* const choices = arrays_.grads + rank_.grad_offset(part);
        const auto rate = static_cast<float>(rates_[part.tensor].lr > 0 ? moe.bias_rate : 0);
        for (int64_t i = 0; i < count; ++i) {
          const float step = choices[i] < mean ? rate : choices[i] > mean ? -rate : 0.0f;
          target.master[i] = source.master[i] + step;
          target.exp_avg[i] = source.exp_avg[i];
          target.exp_avg_sq[i] = source.exp_avg_sq[i];
        }
        put_weights(target.master, rank_.weight_offset(part), count);
        if (k >= 0) note_sums(k, target, count);
      },
      true);
}

kernels::AdamwArgs ShardedOptimizer::args_of(int64_t tensor, int64_t update, double lr, float grad_scale) const {
  const OptimizerConfig& config = plan_.recipe.optimizer;
  return {.lr = static_cast<float>(lr * rates_[tensor].lr),
          .beta1 = static_cast<float>(config.beta1),
          .beta2 = static_cast<float>(config.beta2),
          .eps = static_cast<float>(config.eps),
          .weight_decay = static_cast<float>(rates_[tensor].weight_decay),
          .grad_scale = grad_scale,
          .step = update,
          .stream = stream_};
}

Status ShardedOptimizer::update(int64_t update, double lr, float grad_scale, int64_t from, int64_t to, int64_t tokens,
                                comm::Comm& world, const HeadFactors* heads) {
  balance(from, to, tokens);
  if (plan_.recipe.optimizer.kind == OptimizerKind::kLamb) {
    RT_TRY(lamb(update, lr, grad_scale, from, to, world));
  } else {
    adamw(update, lr, grad_scale, from, to);
  }
  if (heads != nullptr && heads->clipped_heads > 0) scale_heads(*heads, to);
  if (plan_.recipe.optimizer.ema > 0) average(from, to);
  return {};
}

void ShardedOptimizer::scale_heads(const HeadFactors& heads, int64_t bank) {
  for_parts(
      bank, bank,
      [&](const auto& part, int64_t count, const kernels::AdamwState&, const kernels::AdamwState& state, int64_t k) {
        const auto rows = std::find_if(head_rows_.begin(), head_rows_.end(),
                                       [&](const HeadRows& r) { return r.tensor == part.tensor; });
        if (rows == head_rows_.end()) return;
        const std::vector<float>& factors = rows->key ? heads.key : heads.query;
        const int64_t begin = part.flat_offset - rows->offset;
        for (int64_t at = 0; at < count;) {
          const int64_t head = (begin + at) / rows->head_elems;
          const int64_t end = std::min(count, (head + 1) * rows->head_elems - begin);
          kernels::scale(state.master + at, factors[rows->first_factor + head], end - at);
          at = end;
        }
        put_weights(state.master, rank_.weight_offset(part), count);
        if (k >= 0) sums_[k] = word_sums(reinterpret_cast<const std::byte*>(state.master), count);
      });
}

void ShardedOptimizer::average(int64_t from, int64_t to) {
  const size_t saved = arrays_.banks[to].size();
  for (size_t k = 0, piece = 0; piece < rank_.pieces.size(); ++piece) {
    if (!rank_.pieces[piece].primary) continue;
    const kernels::AdamwState& target = arrays_.banks[to][k];
    sums_[3 * saved + k] = kernels::ema(plan_.recipe.optimizer.ema, target.master, arrays_.banks[from][k].ema,
                                        target.ema, rank_.pieces[piece].count_elems());
    ++k;
  }
}

void ShardedOptimizer::adamw(int64_t update, double lr, float grad_scale, int64_t from, int64_t to) {
  const DType compute = plan_.compute_dtype();
  auto* low = compute == DType::kBf16 ? static_cast<bf16*>(arrays_.weights) : nullptr;
  auto* full = compute == DType::kF32 ? static_cast<float*>(arrays_.weights) : nullptr;
  const int64_t saved = std::ssize(arrays_.banks[to]);
  for_parts(from, to,
            [&](const auto& part, int64_t count, const kernels::AdamwState& source, const kernels::AdamwState& target,
                int64_t k) {
              const int64_t weight = rank_.weight_offset(part);
              kernels::AdamwSums sums;
              kernels::adamw(args_of(part.tensor, update, lr, grad_scale), arrays_.grads + rank_.grad_offset(part),
                             source, target, full != nullptr ? full + weight : nullptr,
                             low != nullptr ? low + weight : nullptr, count, k >= 0 ? &sums : nullptr);
              if (compute == DType::kF16) put_weights(target.master, weight, count);
              if (k < 0) return;
              sums_[k] = sums.master;
              sums_[saved + k] = sums.exp_avg;
              sums_[2 * saved + k] = sums.exp_avg_sq;
            });
}

Status ShardedOptimizer::lamb(int64_t update, double lr, float grad_scale, int64_t from, int64_t to,
                              comm::Comm& world) {
  std::vector<kernels::LambNorms> norms(plan_.tensors.size());
  for_parts(from, to,
            [&](const auto& part, int64_t count, const kernels::AdamwState& source, const kernels::AdamwState& target,
                int64_t k) {
              kernels::lamb_moments(args_of(part.tensor, update, lr, grad_scale),
                                    arrays_.grads + rank_.grad_offset(part), source, target, count,
                                    k >= 0 ? &norms[part.tensor] : nullptr);
            });
  std::vector<double> words;
  for (const kernels::LambNorms& n : norms) {
    for (const ExactSum* sum : {&n.weight, &n.step}) {
      const auto add = sum->words();
      words.insert(words.end(), add.begin(), add.end());
    }
  }
  RT_TRY(world.all_reduce(words.data(), std::ssize(words), DType::kF64, comm::ReduceOp::kSum, "norms of tensors"));
  const auto norm = [&](int64_t index) {
    return std::sqrt(
        ExactSum::from(std::span<const double, ExactSum::kWords>(&words[index * ExactSum::kWords], ExactSum::kWords))
            .value());
  };
  for_parts(from, to,
            [&](const auto& part, int64_t count, const kernels::AdamwState& source, const kernels::AdamwState& target,
                int64_t k) {
              const double weight = norm(2 * part.tensor), step = norm(2 * part.tensor + 1);
              const double trust = weight > 0 && step > 0 ? weight / step : 1.0;
              kernels::lamb_step(args_of(part.tensor, update, lr, grad_scale), static_cast<float>(trust), source,
                                 target, count);
              put_weights(target.master, rank_.weight_offset(part), count);
              if (k >= 0) note_sums(k, target, count);
            });
  return {};
}

void ShardedOptimizer::keep(int64_t from, int64_t to) {
  const size_t saved = arrays_.banks[to].size();
  size_t k = 0;
  for (const StatePiece& piece : rank_.pieces) {
    if (!piece.primary) continue;
    size_t array = 0;
    for (float* kernels::AdamwState::*const member : {&kernels::AdamwState::master, &kernels::AdamwState::exp_avg,
                                                      &kernels::AdamwState::exp_avg_sq, &kernels::AdamwState::ema}) {
      if (array == static_cast<size_t>(rank_.saved_arrays)) break;
      const float* const source = arrays_.banks[from][k].*member;
      float* const target = arrays_.banks[to][k].*member;
      if (target != source) std::copy_n(source, piece.count_elems(), target);
      sums_[array++ * saved + k] = word_sums(reinterpret_cast<const std::byte*>(target), piece.count_elems());
    }
    ++k;
  }
}

Status ShardedOptimizer::spread_share(int64_t bank, bool weights_ready) {
  // With one replica of the others' buckets there is one of the experts' too: they have fewer.
  if (replica_.size() > 1) {  // each array takes the way of the gradients: by bucket, in their memory
    for (float* kernels::AdamwState::*const array :
         {&kernels::AdamwState::master, &kernels::AdamwState::exp_avg, &kernels::AdamwState::exp_avg_sq}) {
      for_pieces(bank, [&](const StatePiece& piece, const kernels::AdamwState& state) {
        std::copy_n(state.*array, piece.count_elems(), arrays_.grads + rank_.grad_offset(piece));
      });
      for (const Bucket& bucket : rank_.buckets) {
        float* const shard = arrays_.grads + (rank_.scattered_grads ? bucket.shard_offset : bucket.shard.begin);
        comm::Comm& replica = bucket.experts ? *expert_replica_ : replica_;
        RT_TRY(replica.all_gather(shard + bucket.share.begin - bucket.shard.begin, shard, bucket.share.size() * 4,
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
