#include "runtime/optim/sharded_optimizer.h"

#include <utility>

#include "runtime/core/check.h"
#include "runtime/device/guard.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/optim/after/ema.h"
#include "runtime/optim/rules/adafactor.h"
#include "runtime/optim/rules/adamw.h"
#include "runtime/optim/rules/lamb.h"
#include "runtime/optim/rules/router_bias.h"

namespace cairn::optim {

ShardedOptimizer::ShardedOptimizer(const Plan& plan, const RankPlan& rank, const comm::RankGroups& groups,
                                   Arrays arrays)
    : walk_(plan, rank, std::move(arrays)), groups_(groups) {
  for (const TensorSpec& tensor : plan.tensors) rates_.push_back(rates_of(plan.recipe.optimizer, tensor));
}

ExactSum ShardedOptimizer::squared_norm_part() const {
  const DeviceAccess inside;
  const RankPlan& rank = walk_.rank();
  ExactSum sum;
  int64_t tensor = -1, begin = 0, end = 0;  // a run: pieces that follow one another, begun at a multiple of 16 elements
  const auto add_run = [&] {
    if (end > begin) kernels::add_squares(walk_.arrays().grads + begin, end - begin, sum);
  };
  for (const StatePiece& piece : rank.pieces) {
    if (!piece.primary || walk_.plan().tensors[piece.tensor].balances) continue;
    const int64_t at = rank.grad_offset(piece);
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

Status ShardedOptimizer::update(const Update& update, comm::Comm& world, const HeadFactors* heads) {
  const DeviceAccess inside;
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

void ShardedOptimizer::keep(int64_t from, int64_t to) {
  const DeviceAccess inside;
  walk_.keep(from, to);
}

void ShardedOptimizer::make_weights(int64_t bank, const Bucket& bucket) const {
  const DeviceAccess inside;
  walk_.make_weights(bank, bucket);
}

}  // namespace cairn::optim
