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

std::vector<kernels::AdamRun> adam_runs(StateWalk& walk, std::span<const TensorRates> rates, const Update& update,
                                        std::span<const StateBlock> batch) {
  const DType dtype = walk.plan().compute_dtype();
  std::vector<kernels::AdamRun> out;
  out.reserve(batch.size());
  for (const StateBlock& block : batch) {
    out.push_back({.args = adamw_args(walk.plan().recipe.optimizer, rates[block.piece->tensor], update),
                   .grad = block.grad,
                   .from = block.from,
                   .to = block.to,
                   .dtype = dtype,
                   .weights = walk.weights_of(block),
                   .count = block.count,
                   .counts = block.saved >= 0,
                   .tensor = block.piece->tensor});
  }
  return out;
}

void adamw(StateWalk& walk, std::span<const TensorRates> rates, const Update& update) {
  walk.for_batches(update.from, update.to, [&](std::span<const StateBlock> batch) {
    std::vector<kernels::AdamRun> runs = adam_runs(walk, rates, update, batch);
    for (size_t k = 0; k < runs.size(); ++k) {
      runs[k].args.stream = walk.rank().bank_bytes() > kCachedBytes;
      runs[k].sums = walk.sums_of(batch[k], 0, 3);
    }
    walk.on().adamw_of_runs(runs);
  });
}

}  // namespace cairn::optim
