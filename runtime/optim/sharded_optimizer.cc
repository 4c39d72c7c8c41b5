#include "runtime/optim/sharded_optimizer.h"

#include <utility>

#include "runtime/core/check.h"
#include "runtime/optim/after/ema.h"
#include "runtime/optim/rules/adafactor.h"
#include "runtime/optim/rules/adamw.h"
#include "runtime/optim/rules/lamb.h"
#include "runtime/optim/rules/router_bias.h"

namespace cairn::optim {

static_assert(sizeof(kernels::Clip) <= RankPlan::kStepNumbersBytes);

ShardedOptimizer::ShardedOptimizer(Stream& stream, const Plan& plan, const RankPlan& rank,
                                   const comm::RankGroups& groups, Arrays arrays)
    : walk_(stream, plan, rank, std::move(arrays)), groups_(groups), squared_norm_(stream, ExactSum::kWords) {
  for (const TensorSpec& tensor : plan.tensors) rates_.push_back(rates_of(plan.recipe.optimizer, tensor));
  int64_t tensor = -1;
  for (const StatePiece& piece : rank.pieces) {  // pieces of a tensor that follow one another are one run
    if (!piece.primary || plan.tensors[piece.tensor].balances) continue;
    const int64_t at = rank.grad_offset(piece), count = piece.count_elems();
    kernels::ElemRun* const last = gradient_runs_.empty() ? nullptr : &gradient_runs_.back();
    if (piece.tensor == tensor && at == last->begin + last->count) {
      last->count += count;
      continue;
    }
    tensor = piece.tensor;
    RT_CHECK(at % kAlignElems == 0, "a share begins at element {}", at);
    gradient_runs_.push_back({at, count});
  }
}

void ShardedOptimizer::take_squared_norm() {
  const kernels::StateExec& on = walk_.on();
  on.add_squares_of_runs(walk_.arrays().grads, on.stream.give(std::span<const kernels::ElemRun>(gradient_runs_)),
                         std::ssize(gradient_runs_), squared_norm_.room());
}

ExactSum ShardedOptimizer::squared_norm_part() const {
  return ExactSum::from(squared_norm_.read().first<ExactSum::kWords>());
}

Status ShardedOptimizer::update(Update update, comm::Comm& world, const HeadFactors* heads) {
  const kernels::StateExec& on = walk_.on();
  const DevicePtr<kernels::Clip> clip = (walk_.arrays().work + walk_.rank().step_numbers_offset()).as<kernels::Clip>();
  given_ = update;
  on.clip_by_norm(on.stream.give(std::span<const double>(given_.squared_norm)),
                  on.stream.give(std::span<const kernels::ClipNumbers>(&given_.gradients, 1)), clip);
  update.clip = clip;
  const OptimizerConfig& config = walk_.plan().recipe.optimizer;
  if (walk_.reads_peers() && update.from == update.to) {  // the others are about to write over it
    walk_.bring_peer_copies(update.from);
    RT_TRY(world.barrier("optimizer state of other ranks"));
  }
  router_bias(walk_, rates_, update);  // before the rule: overwrite_turns() says so
  switch (config.kind) {
    case OptimizerKind::kAdamW:
      adamw(walk_, rates_, update);
      break;
    case OptimizerKind::kLamb:
      RT_TRY(lamb(walk_, rates_, update, world));
      break;
    case OptimizerKind::kAdafactor:
      RT_TRY(adafactor(walk_, rates_, groups_, update, world));
      break;
  }
  walk_.leave_peers();
  if (heads != nullptr && heads->clipped_heads > 0) scale_heads(walk_, *heads, update.to);
  if (config.ema > 0) average_weights(walk_, config.ema, update.from, update.to);
  return {};
}

void ShardedOptimizer::keep(int64_t from, int64_t to) { walk_.keep(from, to); }

}  // namespace cairn::optim
