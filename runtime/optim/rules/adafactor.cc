#include "runtime/optim/rules/adafactor.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "runtime/optim/rules/device_norms.h"
#include "runtime/optim/rules/world_sum.h"

namespace cairn::optim {
namespace {

/// Second moments of whole tensors. Arrays::work has the sums of squares of a step, and behind them the factors.
class Factored {
 public:
  Factored(StateWalk& walk, const Update& update)
      : walk_(walk),
        plan_(walk.plan()),
        rank_(walk.rank()),
        update_(update),
        squares_(walk.arrays().work.as<double>()),
        factors_((squares_ + rank_.dense_work + rank_.expert_work).as<float>()),
        of_tensor_(rank_.tensors.size()) {
    for (size_t k = 0; k < rank_.sums.size(); ++k) {
      OfTensor& sums = of_tensor_[rank_.sums[k].local];
      (rank_.sums[k].kind == StateKind::kExpAvgSqRow ? sums.rows : sums.cols) = static_cast<int64_t>(k);
    }
  }

  /// The second moments of rows and columns go on, and leave their factors: from the sums of squares over the rows and
  /// columns of whole tensors, in the order of SumPiece::work_offset, which ranks add up in between.
  Status make_factors(const comm::RankGroups& groups);
  /// The run of its local tensor's matrix that `count` elements of a piece are, and the factors of that tensor.
  std::pair<kernels::MatrixRun, kernels::AdafactorFactors> run_of(const StatePiece& piece, int64_t begin,
                                                                  DevicePtr<const float> grad, int64_t count) const;
  std::vector<kernels::AdafactorRun> runs_of(std::span<const TensorRates> rates,
                                             std::span<const StateBlock> batch) const;

 private:
  /// A matrix's rows and columns, or a vector's elements, which stand as columns: indices into RankPlan::sums.
  struct OfTensor {
    int64_t rows = -1, cols = -1;
  };
  std::vector<kernels::SquaresRun> squares_of_runs() const;
  std::vector<kernels::FactoredTensor> tensors();
  Status add_up_squares(const comm::RankGroups& groups);

  StateWalk& walk_;
  const Plan& plan_;
  const RankPlan& rank_;
  const Update& update_;
  DevicePtr<double> squares_;
  DevicePtr<float> factors_;
  std::vector<OfTensor> of_tensor_;  // of RankPlan::tensors
};

std::pair<kernels::MatrixRun, kernels::AdafactorFactors> Factored::run_of(const StatePiece& piece, int64_t begin,
                                                                          DevicePtr<const float> grad,
                                                                          int64_t count) const {
  const int64_t flat = piece.flat_offset + begin;
  const auto next = std::partition_point(rank_.tensors.begin(), rank_.tensors.end(),
                                         [&](const LocalTensor& local) { return local.offset <= flat; });
  const LocalTensor& local = *std::prev(next);
  const OfTensor& sums = of_tensor_[std::prev(next) - rank_.tensors.begin()];
  const bool matrix = local.shape.size() > 1;
  const auto at = [&](int64_t sum) { return factors_ + rank_.sums[sum].work_offset; };
  return {{grad, update_.clip, flat - local.offset, count, matrix ? local.shape[1] : local.shape[0]},
          {matrix ? at(sums.rows) : DevicePtr<float>(), at(sums.cols)}};
}

std::vector<kernels::AdafactorRun> Factored::runs_of(std::span<const TensorRates> rates,
                                                     std::span<const StateBlock> batch) const {
  std::vector<kernels::AdafactorRun> out;
  out.reserve(batch.size());
  for (const StateBlock& block : batch) {
    const auto [matrix, factors] = run_of(*block.piece, block.begin, block.grad, block.count);
    const TensorRates& of = rates[block.piece->tensor];
    out.push_back({.matrix = matrix,
                   .factors = factors,
                   .from = block.from,
                   .to = block.to,
                   .decay = static_cast<float>(update_.lr * of.lr * of.weight_decay),
                   .beta1 = static_cast<float>(plan_.recipe.optimizer.beta1),
                   .dtype = plan_.compute_dtype(),
                   .weights = walk_.weights_of(block),
                   .tensor = block.piece->tensor});
  }
  return out;
}

std::vector<kernels::SquaresRun> Factored::squares_of_runs() const {
  const auto squares_of = [&](DevicePtr<const float> factor) {
    return factor ? squares_ + (factor - DevicePtr<const float>(factors_)) : DevicePtr<double>();
  };
  std::vector<kernels::SquaresRun> out;
  for (const StatePiece& piece : rank_.pieces) {
    if (plan_.tensors[piece.tensor].balances) continue;
    const DevicePtr<const float> grad = walk_.arrays().grads + rank_.grad_offset(piece);
    const auto [run, factors] = run_of(piece, 0, grad, piece.count_elems());
    out.push_back({run, squares_of(factors.row), squares_of(factors.col)});
  }
  return out;
}

std::vector<kernels::FactoredTensor> Factored::tensors() {
  std::vector<kernels::FactoredDim> dims(rank_.sums.size());
  walk_.for_sums(update_.from, update_.to, [&](int64_t k, DevicePtr<const float> source, DevicePtr<float> target) {
    const SumPiece& piece = rank_.sums[k];
    const Shape& shape = plan_.tensors[piece.tensor].shape;
    const int64_t terms = piece.kind == StateKind::kExpAvgSq      ? 1
                          : piece.kind == StateKind::kExpAvgSqRow ? shape[1]
                                                                  : shape[0];
    dims[k] = {squares_ + piece.work_offset, source, target, factors_ + piece.work_offset, piece.count(), terms};
  });
  // The rows' mean is the columns', and each rank has all of that dim which tp does not cut.
  std::vector<kernels::FactoredTensor> out;
  for (const OfTensor& sums : of_tensor_) {
    if (sums.cols < 0) continue;
    const bool matrix = sums.rows >= 0;
    out.push_back({.rows = matrix ? dims[sums.rows] : kernels::FactoredDim(),
                   .cols = dims[sums.cols],
                   .mean_of_cols = matrix && plan_.tensors[rank_.sums[sums.rows].tensor].cut == TensorCut::kDim0});
  }
  return out;
}

Status Factored::add_up_squares(const comm::RankGroups& groups) {
  const auto reduce = [&](comm::Comm* group, int64_t begin, int64_t count) -> Status {
    if (group == nullptr || group->size() == 1 || count == 0) return {};
    return group->all_reduce(squares_ + begin, count, DType::kF64, comm::ReduceOp::kSum, "squares of rows and columns");
  };
  RT_TRY(reduce(groups.shard, 0, rank_.dense_work));
  RT_TRY(reduce(groups.expert_shard, rank_.dense_work, rank_.expert_work));
  for (const SumPiece& piece : rank_.sums) {  // of heads that several tp ranks hold, one counts
    const LocalTensor& local = rank_.tensors[piece.local];
    const bool over_tp = piece.work_offset >= rank_.tp_work.begin && piece.work_offset < rank_.tp_work.end;
    if (over_tp && local.sum_over_kv && rank_.at.tp % plan_.kv_copies() != 0) {
      walk_.on().fill_doubles(0, squares_ + piece.work_offset, piece.count());
    }
  }
  return reduce(groups.tp, rank_.tp_work.begin, rank_.tp_work.size());
}

Status Factored::make_factors(const comm::RankGroups& groups) {
  const kernels::AdafactorDecay decay{
      1.0 - std::pow(static_cast<double>(update_.number), -plan_.recipe.optimizer.decay_power), update_.clip};
  const kernels::StateExec& on = walk_.on();
  const std::vector<kernels::SquaresRun> runs = squares_of_runs();
  on.fill_doubles(0, squares_, rank_.dense_work + rank_.expert_work);
  if (!has_other_ranks(groups)) {
    on.adafactor_moments(decay, runs, tensors());
  } else {
    on.adafactor_squares_of_runs(runs);
    RT_TRY(add_up_squares(groups));
    on.adafactor_factors_of_tensors(decay, tensors());
  }
  walk_.sum_up_sums(update_.to);
  return {};
}

}  // namespace

Status adafactor(StateWalk& walk, std::span<const TensorRates> rates, const Update& update,
                 const comm::RankGroups& groups) {
  const kernels::StateExec& on = walk.on();
  const Plan& plan = walk.plan();
  const OptimizerConfig& config = plan.recipe.optimizer;
  Factored factored(walk, update);
  RT_TRY(factored.make_factors(groups));
  DeviceNorms norms(walk);
  const auto norm = [&](std::span<const StateBlock> batch) {
    std::vector<StateBlock> counted;  // so that each element counts once
    std::ranges::copy_if(batch, std::back_inserter(counted), [](const StateBlock& block) { return block.saved >= 0; });
    if (!counted.empty()) on.adafactor_norms_of_runs(factored.runs_of(rates, counted), norms.partials_of(counted));
  };
  walk.for_batches(update.from, update.to, norm, StateWalk::Pieces::kReadOnly);
  std::vector<kernels::AdafactorRate> of_tensors;
  for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
    of_tensors.push_back({static_cast<double>(count_elems(plan.tensors[tensor].shape)), update.lr * rates[tensor].lr});
  }
  const kernels::AdafactorLimits limits{config.update_clip, config.least_scale, config.scale_parameter};
  const DevicePtr<float> made = (walk.arrays().work + walk.rank().tensor_rates_offset()).as<float>();
  if (!has_other_ranks(groups)) {
    norms.make_rates(limits, of_tensors, made);
  } else {
    const DevicePtr<double> words = norms.add_up();
    RT_TRY(add_over_world(groups, words, walk.rank().tensor_norms, "norms of tensors"));
    on.adafactor_rates(limits, of_tensors, words, made);
  }
  walk.for_batches(update.from, update.to, [&](std::span<const StateBlock> batch) {
    on.adafactor_step_of_runs(factored.runs_of(rates, batch), made);
    for (const StateBlock& block : batch) walk.sum_up(block);
  });
  return {};
}

}  // namespace cairn::optim
