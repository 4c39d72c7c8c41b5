#include "runtime/optim/sharded_optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/core/word_sums.h"
#include "runtime/device/guard.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/ema.h"
#include "runtime/kernels/lamb.h"
#include "runtime/kernels/parallel.h"

namespace cairn::optim {
namespace {

// State below this may still be in the caches when the next update reads it.
constexpr int64_t kCachedBytes = int64_t{8} << 20;

constexpr size_t kBlocksAhead = 2;  // of banks on a disk: that are on their way while one is updated

float* advanced(float* array, int64_t by) { return array == nullptr ? nullptr : array + by; }

kernels::AdamwState advanced(const kernels::AdamwState& state, int64_t by) {
  return {advanced(state.master, by), advanced(state.exp_avg, by), advanced(state.exp_avg_sq, by),
          advanced(state.ema, by)};
}

double mean_of(const float* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
  return sum / static_cast<double>(count);
}

/// Before this process writes memory that it shares and may not have touched: a page that is first read is mapped
/// together with its neighbours, one that is first written alone, and that takes longer than the writing.
void map_pages(const std::byte* area, int64_t bytes) {
  constexpr int64_t kMappedAtOnce = int64_t{64} << 10;  // Linux' fault_around_bytes
  kernels::parallel_elements(bytes, [=](int64_t at, int64_t end) {
    for (; at < end; at += kMappedAtOnce) static_cast<void>(*static_cast<const volatile std::byte*>(area + at));
  });
}

std::vector<std::span<std::byte>> areas_of(const kernels::AdamwState& state, int64_t count) {
  std::vector<std::span<std::byte>> out;
  for (float* values : {state.master, state.exp_avg, state.exp_avg_sq, state.ema}) {
    if (values != nullptr) out.push_back(std::as_writable_bytes(std::span(values, static_cast<size_t>(count))));
  }
  return out;
}

}  // namespace

float* kernels::AdamwState::*member_of(StateKind kind) {
  switch (kind) {
    case StateKind::kWeight:
      return &kernels::AdamwState::master;
    case StateKind::kExpAvg:
      return &kernels::AdamwState::exp_avg;
    case StateKind::kExpAvgSq:
      return &kernels::AdamwState::exp_avg_sq;
    case StateKind::kEma:
      return &kernels::AdamwState::ema;
    case StateKind::kExpAvgSqRow:
    case StateKind::kExpAvgSqCol:
      break;
  }
  RT_CHECK(false, "kind {} is no array", static_cast<int>(kind));
}

ShardedOptimizer::ShardedOptimizer(const Plan& plan, const RankPlan& rank, const comm::RankGroups& groups,
                                   Arrays arrays)
    : plan_(plan), rank_(rank), groups_(groups), arrays_(std::move(arrays)) {
  for (const StateKind kind : plan.state_kinds().arrays()) members_.push_back(member_of(kind));
  int64_t saved = 0;
  for (const StatePiece& piece : rank.pieces) {
    saved_before_.push_back(saved);
    saved += piece.primary ? 1 : 0;
  }
  for (const auto& bank : arrays_.banks) {
    RT_CHECK(std::ssize(bank) == saved, "a bank with {} of {} pieces", bank.size(), saved);
  }
  stream_ = rank.bank_bytes() > kCachedBytes;
  summed_ = arrays_.gate == nullptr;
  elsewhere_ = arrays_.originals.has_value();
  const auto primary_sums = std::count_if(rank.sums.begin(), rank.sums.end(), [](const auto& p) { return p.primary; });
  sums_.resize(static_cast<size_t>(rank.saved_arrays * saved + primary_sums));
  local_sums_.resize(rank.tensors.size());
  for (size_t k = 0; k < rank.sums.size(); ++k) {
    LocalSums& local = local_sums_[rank.sums[k].local];
    (rank.sums[k].kind == StateKind::kExpAvgSqRow ? local.rows : local.cols) = static_cast<int64_t>(k);
  }
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
  return advanced(arrays_.private_state, offset);
}

void ShardedOptimizer::put_weights(const float* master, int64_t flat, int64_t count) const {
  switch (plan_.compute_dtype()) {
    case DType::kBf16:
      return kernels::cast(master, static_cast<bf16*>(arrays_.weights) + flat, count);
    case DType::kF16:
      return kernels::cast(master, static_cast<f16*>(arrays_.weights) + flat, count);
    default: {
      float* const to = static_cast<float*>(arrays_.weights) + flat;
      kernels::parallel_elements(count, [=](int64_t i, int64_t end) { std::copy(master + i, master + end, to + i); });
    }
  }
}

const Original& ShardedOptimizer::original_of(const float* copy) const {
  const std::vector<Original>& all = *arrays_.originals;
  const auto next = std::partition_point(all.begin(), all.end(), [&](const Original& o) { return o.copy <= copy; });
  RT_CHECK(next != all.begin() && copy < std::prev(next)->copy + std::prev(next)->count, "state that nobody saves");
  return *std::prev(next);
}

template <typename Body>
void ShardedOptimizer::for_private(int64_t bank, int64_t offset, int64_t count, const Body& body) const {
  if (!elsewhere_) return body(int64_t{0}, count, private_at(offset));
  for (int64_t done = 0; done < count;) {
    int64_t run = count - done;
    kernels::AdamwState state;
    for (float* kernels::AdamwState::*const array : members_) {
      if (array == &kernels::AdamwState::ema) continue;
      const float* const copy = arrays_.private_state.*array + offset + done;
      const Original& original = original_of(copy);
      const int64_t inside = copy - original.copy;
      state.*array = const_cast<float*>(original.banks[bank]) + inside;  // a state that is read
      run = std::min(run, original.count - inside);
    }
    body(done, run, state);
    done += run;
  }
}

void ShardedOptimizer::copy_originals(int64_t bank, float* copy, int64_t count) {
  for (int64_t done = 0; done < count;) {
    const Original& original = original_of(copy + done);
    const int64_t inside = copy + done - original.copy, run = std::min(count - done, original.count - inside);
    const float* const from = original.banks[bank] + inside;
    kernels::parallel_elements(run, [&](int64_t i, int64_t end) { std::copy(from + i, from + end, copy + done + i); });
    done += run;
  }
}

void ShardedOptimizer::copy_originals(int64_t bank) {
  for (const Original& original : *arrays_.originals) copy_originals(bank, original.copy, original.count);
  elsewhere_ = false;
}

ExactSum ShardedOptimizer::squared_norm_part() const {
  const DeviceAccess inside;
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
void ShardedOptimizer::for_parts(int64_t from, int64_t to, const Body& body, Parts which) const {
  const auto wanted = [&](int64_t tensor) { return plan_.tensors[tensor].balances == (which == Parts::kBalancing); };
  struct Block {
    const StatePiece* piece;
    int64_t saved, begin, count;
  };
  std::vector<Block> blocks;
  const bool paged = arrays_.pager != nullptr;
  CopyGate* const gate = which == Parts::kReadOnly ? nullptr : arrays_.gate;
  int64_t saved = 0;
  for (const StatePiece& piece : rank_.pieces) {
    const int64_t k = piece.primary ? saved++ : -1, elems = piece.count_elems();
    if (!wanted(piece.tensor)) continue;
    const int64_t longest = paged                       ? arrays_.pager->block_bytes() / 4
                            : gate != nullptr && k >= 0 ? gate->block_bytes() / 4
                                                        : std::max<int64_t>(1, elems);
    for (int64_t begin = 0; begin < elems; begin += longest)
      blocks.push_back({&piece, k, begin, std::min(longest, elems - begin)});
  }
  const auto states = [&](const Block& block) {
    return std::pair(advanced(arrays_.banks[from][block.saved], block.begin),
                     advanced(arrays_.banks[to][block.saved], block.begin));
  };
  size_t fetched = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (; paged && fetched < std::min(blocks.size(), b + 1 + kBlocksAhead); ++fetched) {
      if (blocks[fetched].saved < 0) continue;
      const auto [source, target] = states(blocks[fetched]);
      fetch(source, target, blocks[fetched].count);
    }
    const auto& [piece, k, first, length] = blocks[b];
    if (k >= 0) {
      const auto [source, target] = states(blocks[b]);
      if (gate != nullptr) gate->wait(areas_of(target, length));
      body(*piece, first, length, source, target, k);
      if (paged) release(source, target, length);
      continue;
    }
    const kernels::AdamwState own = private_at(piece->state_offset + first);
    for_private(from, piece->state_offset + first, length,
                [&, first = first](int64_t begin, int64_t count, const kernels::AdamwState& source) {
                  body(*piece, first + begin, count, source, advanced(own, begin), int64_t{-1});
                  if (paged && elsewhere_) arrays_.pager->release(areas_of(source, count), false);
                });
  }
}

void ShardedOptimizer::fetch(const kernels::AdamwState& from, const kernels::AdamwState& to, int64_t count) const {
  std::vector<std::span<std::byte>> areas = areas_of(from, count);
  if (to.master != from.master) {  // a page that is not there is read before its first byte can be written
    const std::vector<std::span<std::byte>> written = areas_of(to, count);
    areas.insert(areas.end(), written.begin(), written.end());
  }
  arrays_.pager->fetch(areas);
}

void ShardedOptimizer::release(const kernels::AdamwState& from, const kernels::AdamwState& to, int64_t count) const {
  arrays_.pager->release(areas_of(to, count), true);
  if (to.master != from.master) arrays_.pager->release(areas_of(from, count), false);
}

void ShardedOptimizer::note_sum(int64_t array, int64_t saved_piece, int64_t begin, uint64_t sums) {
  uint64_t& sum = sums_[array * std::ssize(arrays_.banks[0]) + saved_piece];
  sum = add_word_sums(begin == 0 ? 0 : sum, shift_word_sums(sums, begin));
}

void ShardedOptimizer::note_sums(int64_t saved_piece, int64_t begin, const kernels::AdamwState& state, int64_t count) {
  if (!summed_) return;
  for (size_t array = 0; array < members_.size(); ++array) {
    if (members_[array] == &kernels::AdamwState::ema) continue;
    const auto* const values = reinterpret_cast<const std::byte*>(state.*members_[array]);
    note_sum(static_cast<int64_t>(array), saved_piece, begin, word_sums(values, count));
  }
}

void ShardedOptimizer::balance(int64_t from, int64_t to, int64_t tokens) {
  const MoeConfig& moe = plan_.recipe.model.moe;
  if (moe.bias_rate == 0) return;
  const auto mean = static_cast<float>(static_cast<double>(tokens * moe.top_k) / static_cast<double>(moe.experts));
  for_parts(
      from, to,
      [&](const auto& part, int64_t begin, int64_t count, const kernels::AdamwState& source,
          const kernels::AdamwState& target, int64_t k) {
        const float* const choices = arrays_.grads + rank_.grad_offset(part) + begin;
        const auto rate = static_cast<float>(rates_[part.tensor].lr > 0 ? moe.bias_rate : 0);
        for (int64_t i = 0; i < count; ++i) {
          const float step = choices[i] < mean ? rate : choices[i] > mean ? -rate : 0.0f;
          target.master[i] = source.master[i] + step;
        }
        for (float* kernels::AdamwState::*const moment :
             {&kernels::AdamwState::exp_avg, &kernels::AdamwState::exp_avg_sq}) {
          if (source.*moment != target.*moment) std::copy_n(source.*moment, count, target.*moment);
        }
        put_weights(target.master, rank_.weight_offset(part) + begin, count);
        if (k >= 0) note_sums(k, begin, target, count);
      },
      Parts::kBalancing);
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
  const DeviceAccess inside;
  if (elsewhere_ && from == to) {  // the others are about to write over it
    copy_originals(from);
    RT_TRY(world.barrier("optimizer state of other ranks"));
  }
  balance(from, to, tokens);
  switch (plan_.recipe.optimizer.kind) {
    case OptimizerKind::kAdamW:
      adamw(update, lr, grad_scale, from, to);
      break;
    case OptimizerKind::kLamb:
      RT_TRY(lamb(update, lr, grad_scale, from, to, world));
      break;
    case OptimizerKind::kAdafactor:
      RT_TRY(adafactor(update, lr, grad_scale, from, to, world));
      break;
  }
  elsewhere_ = false;
  if (heads != nullptr && heads->clipped_heads > 0) scale_heads(*heads, to);
  if (plan_.recipe.optimizer.ema > 0) average(from, to);
  return {};
}

void ShardedOptimizer::scale_heads(const HeadFactors& heads, int64_t bank) {
  for_parts(bank, bank,
            [&](const auto& part, int64_t first, int64_t count, const kernels::AdamwState&,
                const kernels::AdamwState& state, int64_t k) {
              const auto rows = std::find_if(head_rows_.begin(), head_rows_.end(),
                                             [&](const HeadRows& r) { return r.tensor == part.tensor; });
              if (rows == head_rows_.end()) return;
              const std::vector<float>& factors = rows->key ? heads.key : heads.query;
              const int64_t begin = part.flat_offset + first - rows->offset;
              for (int64_t at = 0; at < count;) {
                const int64_t head = (begin + at) / rows->head_elems;
                const int64_t end = std::min(count, (head + 1) * rows->head_elems - begin);
                kernels::scale(state.master + at, factors[rows->first_factor + head], end - at);
                at = end;
              }
              put_weights(state.master, rank_.weight_offset(part) + first, count);
              if (k >= 0 && summed_)
                note_sum(0, k, first, word_sums(reinterpret_cast<const std::byte*>(state.master), count));
            });
}

void ShardedOptimizer::average(int64_t from, int64_t to) {
  for (const Parts which : {Parts::kTrained, Parts::kBalancing}) {
    for_parts(
        from, to,
        [&](const auto&, int64_t begin, int64_t count, const kernels::AdamwState& source,
            const kernels::AdamwState& target, int64_t k) {
          if (k < 0) return;
          note_sum(rank_.saved_arrays - 1, k, begin,
                   kernels::ema(plan_.recipe.optimizer.ema, target.master, source.ema, target.ema, count));
        },
        which);
  }
}

void ShardedOptimizer::adamw(int64_t update, double lr, float grad_scale, int64_t from, int64_t to) {
  const DType compute = plan_.compute_dtype();
  auto* low = compute == DType::kBf16 ? static_cast<bf16*>(arrays_.weights) : nullptr;
  auto* full = compute == DType::kF32 ? static_cast<float*>(arrays_.weights) : nullptr;
  for_parts(from, to,
            [&](const auto& part, int64_t begin, int64_t count, const kernels::AdamwState& source,
                const kernels::AdamwState& target, int64_t k) {
              const int64_t weight = rank_.weight_offset(part) + begin;
              const bool summed = k >= 0 && summed_;
              kernels::AdamwSums sums;
              kernels::adamw(args_of(part.tensor, update, lr, grad_scale),
                             arrays_.grads + rank_.grad_offset(part) + begin, source, target,
                             full != nullptr ? full + weight : nullptr, low != nullptr ? low + weight : nullptr, count,
                             summed ? &sums : nullptr);
              if (compute == DType::kF16) put_weights(target.master, weight, count);
              if (!summed) return;
              note_sum(0, k, begin, sums.master);
              note_sum(1, k, begin, sums.exp_avg);
              note_sum(2, k, begin, sums.exp_avg_sq);
            });
}

Status ShardedOptimizer::lamb(int64_t update, double lr, float grad_scale, int64_t from, int64_t to,
                              comm::Comm& world) {
  std::vector<kernels::LambNorms> norms(plan_.tensors.size());
  for_parts(from, to,
            [&](const auto& part, int64_t begin, int64_t count, const kernels::AdamwState& source,
                const kernels::AdamwState& target, int64_t k) {
              kernels::lamb_moments(args_of(part.tensor, update, lr, grad_scale),
                                    arrays_.grads + rank_.grad_offset(part) + begin, source, target, count,
                                    k >= 0 ? &norms[part.tensor] : nullptr);
            });
  std::vector<ExactSum> sums;
  for (const kernels::LambNorms& n : norms) sums.insert(sums.end(), {n.weight, n.step});
  std::vector<double> squares;
  RT_TRY(add_norms(sums, world, &squares));
  for_parts(from, to,
            [&](const auto& part, int64_t begin, int64_t count, const kernels::AdamwState& source,
                const kernels::AdamwState& target, int64_t k) {
              const double weight = std::sqrt(squares[2 * part.tensor]), step = std::sqrt(squares[2 * part.tensor + 1]);
              const double trust = weight > 0 && step > 0 ? weight / step : 1.0;
              kernels::lamb_step(args_of(part.tensor, update, lr, grad_scale), static_cast<float>(trust), source,
                                 target, count);
              put_weights(target.master, rank_.weight_offset(part) + begin, count);
              if (k >= 0) note_sums(k, begin, target, count);
            });
  return {};
}

void ShardedOptimizer::keep(int64_t from, int64_t to) {
  const DeviceAccess inside;
  if (elsewhere_) copy_originals(from);
  if (arrays_.gate != nullptr && from == to) return;  // it is where it is
  const auto copy = [](const float* source, float* target, int64_t count) {
    if (target != source) std::copy_n(source, count, target);
    return word_sums(reinterpret_cast<const std::byte*>(target), count);
  };
  const size_t saved = arrays_.banks[to].size();
  size_t k = 0;
  for (const StatePiece& piece : rank_.pieces) {
    if (!piece.primary) continue;
    for (size_t array = 0; array < members_.size(); ++array) {
      sums_[array * saved + k] =
          copy(arrays_.banks[from][k].*members_[array], arrays_.banks[to][k].*members_[array], piece.count_elems());
    }
    ++k;
  }
  size_t at = 0;
  for (const SumPiece& piece : rank_.sums) {
    if (!piece.primary) continue;
    sums_[members_.size() * saved + at] = copy(arrays_.bank_sums[from][at], arrays_.bank_sums[to][at], piece.count());
    ++at;
  }
}

Status ShardedOptimizer::add_norms(std::span<const ExactSum> sums, comm::Comm& world, std::vector<double>* out) {
  std::vector<double> words;
  for (const ExactSum& sum : sums) {
    const auto add = sum.words();
    words.insert(words.end(), add.begin(), add.end());
  }
  RT_TRY(world.all_reduce(words.data(), std::ssize(words), DType::kF64, comm::ReduceOp::kSum, "norms of tensors"));
  for (size_t at = 0; at < words.size(); at += ExactSum::kWords) {
    out->push_back(ExactSum::from(std::span<const double, ExactSum::kWords>(&words[at], ExactSum::kWords)).value());
  }
  return {};
}

std::pair<kernels::MatrixRun, kernels::AdafactorFactors> ShardedOptimizer::matrix_run(int64_t flat_offset,
                                                                                      const float* grad,
                                                                                      float grad_scale,
                                                                                      int64_t count) const {
  const auto next = std::partition_point(rank_.tensors.begin(), rank_.tensors.end(),
                                         [&](const LocalTensor& local) { return local.offset <= flat_offset; });
  const LocalTensor& local = *std::prev(next);
  const LocalSums& sums = local_sums_[std::prev(next) - rank_.tensors.begin()];
  const bool matrix = local.shape.size() > 1;
  const auto at = [&](int64_t index) { return factors() + rank_.sums[index].work_offset; };
  return {{grad, grad_scale, flat_offset - local.offset, count, matrix ? local.shape[1] : local.shape[0]},
          {matrix ? at(sums.rows) : nullptr, at(sums.cols)}};
}

Status ShardedOptimizer::add_squares(float grad_scale) {
  const int64_t all = rank_.dense_work + rank_.expert_work;
  std::fill_n(work(), all, 0.0);
  for (const StatePiece& piece : rank_.pieces) {
    if (plan_.tensors[piece.tensor].balances) continue;
    const auto [matrix, factors_at] =
        matrix_run(piece.flat_offset, arrays_.grads + rank_.grad_offset(piece), grad_scale, piece.count_elems());
    const auto sums_of = [&](const float* factor) {
      return factor == nullptr ? nullptr : work() + (factor - factors());
    };
    kernels::adafactor_squares(matrix, sums_of(factors_at.row), sums_of(factors_at.col));
  }
  const auto reduce = [&](comm::Comm* group, int64_t begin, int64_t count) -> Status {
    if (group == nullptr || group->size() == 1 || count == 0) return {};
    return group->all_reduce(work() + begin, count, DType::kF64, comm::ReduceOp::kSum, "squares of rows and columns");
  };
  RT_TRY(reduce(groups_.shard, 0, rank_.dense_work));
  RT_TRY(reduce(groups_.expert_shard, rank_.dense_work, rank_.expert_work));
  for (const SumPiece& piece : rank_.sums) {  // of heads that several tp ranks hold, one counts
    const LocalTensor& local = rank_.tensors[piece.local];
    const bool over_tp = piece.work_offset >= rank_.tp_work.begin && piece.work_offset < rank_.tp_work.end;
    if (over_tp && local.sum_over_kv && rank_.at.tp % plan_.kv_copies() != 0) {
      std::fill_n(work() + piece.work_offset, piece.count(), 0.0);
    }
  }
  return reduce(groups_.tp, rank_.tp_work.begin, rank_.tp_work.size());
}

float* ShardedOptimizer::state_of(const SumPiece& piece, size_t index, int64_t bank) const {
  return piece.primary ? arrays_.bank_sums[bank][index] : arrays_.private_sums + piece.state_offset;
}

void ShardedOptimizer::factor(int64_t update, int64_t from, int64_t to) {
  constexpr double kLeastSquare = 1e-30;  // eps1 of the paper
  const double old_part = 1.0 - std::pow(static_cast<double>(update), -plan_.recipe.optimizer.decay_power);
  std::vector<double> means(rank_.sums.size());  // of the new state
  size_t primary = 0;
  for (size_t k = 0; k < rank_.sums.size(); ++k) {
    const SumPiece& piece = rank_.sums[k];
    const Shape& shape = plan_.tensors[piece.tensor].shape;
    const int64_t terms = piece.kind == StateKind::kExpAvgSq      ? 1
                          : piece.kind == StateKind::kExpAvgSqRow ? shape[1]
                                                                  : shape[0];
    const float* const source = state_of(piece, primary, from);
    float* const target = state_of(piece, primary, to);
    if (elsewhere_ && !piece.primary) copy_originals(from, target, piece.count());
    if (arrays_.gate != nullptr && piece.primary) {
      const std::array area = {std::as_writable_bytes(std::span(target, static_cast<size_t>(piece.count())))};
      arrays_.gate->wait(area);
    }
    const double* const squares = work() + piece.work_offset;
    for (int64_t i = 0; i < piece.count(); ++i) {
      const double now = squares[i] / static_cast<double>(terms) + kLeastSquare;
      target[i] = static_cast<float>(old_part * static_cast<double>(source[i]) + (1.0 - old_part) * now);
    }
    if (piece.primary) {
      if (summed_) {
        sums_[members_.size() * arrays_.banks[to].size() + primary] =
            word_sums(reinterpret_cast<const std::byte*>(target), piece.count());
      }
      ++primary;
    }
    means[k] = mean_of(target, piece.count());
    float* const factor = factors() + piece.work_offset;
    for (int64_t i = 0; i < piece.count(); ++i) {
      factor[i] = static_cast<float>(1.0 / std::sqrt(static_cast<double>(target[i])));
    }
  }
  // The rows' mean is the columns', and each rank has all of that dim which tp does not cut.
  for (const LocalSums& local : local_sums_) {
    if (local.rows < 0) continue;
    const SumPiece& rows = rank_.sums[local.rows];
    const bool by_columns = plan_.tensors[rows.tensor].cut == TensorCut::kDim0;
    const auto root = static_cast<float>(std::sqrt(means[by_columns ? local.cols : local.rows]));
    for (int64_t i = 0; i < rows.count(); ++i) factors()[rows.work_offset + i] *= root;
  }
}

Status ShardedOptimizer::adafactor(int64_t update, double lr, float grad_scale, int64_t from, int64_t to,
                                   comm::Comm& world) {
  const OptimizerConfig& config = plan_.recipe.optimizer;
  RT_TRY(add_squares(grad_scale));
  factor(update, from, to);
  const auto run_of = [&](const auto& part, int64_t begin, int64_t count) {
    return matrix_run(part.flat_offset + begin, arrays_.grads + rank_.grad_offset(part) + begin, grad_scale, count);
  };
  std::vector<kernels::AdafactorNorms> norms(plan_.tensors.size());
  for_parts(
      from, to,
      [&](const auto& part, int64_t begin, int64_t count, const kernels::AdamwState& source, const kernels::AdamwState&,
          int64_t k) {
        if (k < 0) return;
        const auto [run, factors] = run_of(part, begin, count);
        kernels::adafactor_norms(run, factors, source.master, &norms[part.tensor]);
      },
      Parts::kReadOnly);
  std::vector<ExactSum> sums;
  for (const kernels::AdafactorNorms& n : norms) sums.insert(sums.end(), {n.weight, n.step});
  std::vector<double> squares;
  RT_TRY(add_norms(sums, world, &squares));
  for_parts(from, to,
            [&](const auto& part, int64_t begin, int64_t count, const kernels::AdamwState& source,
                const kernels::AdamwState& target, int64_t k) {
              const auto elems = static_cast<double>(count_elems(plan_.tensors[part.tensor].shape));
              const double weight = std::sqrt(squares[2 * part.tensor] / elems);
              const double step = std::sqrt(squares[2 * part.tensor + 1] / elems);
              const double unclipped = lr * rates_[part.tensor].lr;
              double rate = unclipped;
              if (config.update_clip > 0) rate /= std::max(1.0, step / config.update_clip);
              if (config.scale_parameter) rate *= std::max(config.least_scale, weight);
              const auto [run, factors] = run_of(part, begin, count);
              kernels::adafactor_step({.rate = static_cast<float>(rate),
                                       .decay = static_cast<float>(unclipped * rates_[part.tensor].weight_decay),
                                       .beta1 = static_cast<float>(config.beta1)},
                                      run, factors, source.master, source.exp_avg, target.master, target.exp_avg);
              put_weights(target.master, rank_.weight_offset(part) + begin, count);
              if (k >= 0) note_sums(k, begin, target, count);
            });
  return {};
}

void ShardedOptimizer::make_weights(int64_t bank, const Bucket& bucket) const {
  const DeviceAccess inside;
  const auto from = [&](int64_t flat) {
    return std::partition_point(rank_.pieces.begin(), rank_.pieces.end(),
                                [&](const StatePiece& piece) { return piece.flat_offset < flat; });
  };
  const int64_t elem_bytes = dtype_size_bytes(plan_.compute_dtype());
  const auto put = [&](const float* master, int64_t at, int64_t count) {
    map_pages(static_cast<const std::byte*>(arrays_.weights) + at * elem_bytes, count * elem_bytes);
    put_weights(master, at, count);
  };
  for (const StatePiece& piece : std::span(from(bucket.range.begin), from(bucket.range.end))) {
    const int64_t at = rank_.weight_offset(piece), count = piece.count_elems();
    if (piece.primary) {
      put(arrays_.banks[bank][saved_before_[static_cast<size_t>(&piece - rank_.pieces.data())]].master, at, count);
    } else {
      for_private(bank, piece.state_offset, count, [&](int64_t begin, int64_t run, const kernels::AdamwState& state) {
        put(state.master, at + begin, run);
      });
    }
  }
}

}  // namespace cairn::optim
