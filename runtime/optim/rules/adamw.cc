#include "runtime/optim/rules/adamw.h"

namespace cairn::optim {
namespace {

// State below this may still be in the caches when the next update reads it.
constexpr int64_t kCachedBytes = int64_t{8} << 20;

}  // namespace

kernels::AdamwArgs adamw_args(const OptimizerConfig& config, const TensorRates& rates, const Update& update) {
  return {.lr = static_cast<float>(update.lr * rates.lr),
          .beta1 = static_cast<float>(config.beta1),
          .beta2 = static_cast<float>(config.beta2),
          .eps = static_cast<float>(config.eps),
          .weight_decay = static_cast<float>(rates.weight_decay),
          .grad_scale = update.grad_scale,
          .step = update.number};
}

void adamw(StateWalk& walk, std::span<const TensorRates> rates, const Update& update) {
  const DType compute = walk.plan().compute_dtype();
  void* const weights = walk.arrays().weights;
  auto* const low = compute == DType::kBf16 ? static_cast<bf16*>(weights) : nullptr;
  auto* const full = compute == DType::kF32 ? static_cast<float*>(weights) : nullptr;
  walk.for_blocks(update.from, update.to, [&](const StateBlock& block) {
    kernels::AdamwArgs args = adamw_args(walk.plan().recipe.optimizer, rates[block.piece->tensor], update);
    args.stream = walk.rank().bank_bytes() > kCachedBytes;
    kernels::AdamwSums sums;
    kernels::adamw(args, block.grad, block.from, block.to, full != nullptr ? full + block.weight : nullptr,
                   low != nullptr ? low + block.weight : nullptr, block.count, walk.summed(block) ? &sums : nullptr);
    if (compute == DType::kF16) walk.put_weights(block);
    walk.note_sum(block, 0, sums.master);
    walk.note_sum(block, 1, sums.exp_avg);
    walk.note_sum(block, 2, sums.exp_avg_sq);
  });
}

}  // namespace cairn::optim
