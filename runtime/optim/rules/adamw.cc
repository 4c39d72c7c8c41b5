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
          .clip = update.clip,
          .step = update.number};
}

void adamw(StateWalk& walk, std::span<const TensorRates> rates, const Update& update) {
  const DType compute = walk.plan().compute_dtype();
  const DevicePtr<std::byte> weights = walk.arrays().weights;
  const DevicePtr<bf16> low = compute == DType::kBf16 ? weights.as<bf16>() : nullptr;
  const DevicePtr<float> full = compute == DType::kF32 ? weights.as<float>() : nullptr;
  walk.for_blocks(update.from, update.to, [&](const StateBlock& block) {
    kernels::AdamwArgs args = adamw_args(walk.plan().recipe.optimizer, rates[block.piece->tensor], update);
    args.stream = walk.rank().bank_bytes() > kCachedBytes;
    walk.on().adamw(args, block.grad, block.from, block.to, full ? full + block.weight : nullptr,
                    low ? low + block.weight : nullptr, block.count, walk.sums_of(block, 0, 3));
    if (compute == DType::kF16) walk.put_weights(block);
  });
}

}  // namespace cairn::optim
