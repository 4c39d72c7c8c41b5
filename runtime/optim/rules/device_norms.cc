#include "runtime/optim/rules/device_norms.h"

#include "runtime/core/check.h"

namespace cairn::optim {

static_assert(RankPlan::kNormElems == kernels::kStateChunk);

DeviceNorms::DeviceNorms(const StateWalk& walk)
    : walk_(walk),
      words_((walk.arrays().work + walk.rank().tensor_norms_offset()).as<double>()),
      partials_((walk.arrays().work + walk.rank().norm_partials_offset()).as<double>()) {
  walk_.on().fill_doubles(0, words_, walk_.rank().tensor_norms);
}

DevicePtr<double> DeviceNorms::partials_of(std::span<const StateBlock> batch) {
  int64_t more = 0;
  for (const StateBlock& block : batch) more += block.saved >= 0 ? kernels::norm_chunks(block.count) : 0;
  const int64_t room = walk_.rank().norm_partials / kernels::TensorNorms::kWords;
  if (chunks_ + more > room) add_up();  // blocks smaller than a chunk have more parts
  RT_CHECK(more <= room, "{} chunks of a batch, room for {}", more, room);
  for (const StateBlock& block : batch) {
    if (block.saved >= 0) runs_.push_back({.count = block.count, .tensor = block.piece->tensor});
  }
  const int64_t first = chunks_;
  chunks_ += more;
  return partials_ + first * kernels::TensorNorms::kWords;
}

DevicePtr<double> DeviceNorms::add_up() {
  walk_.on().add_norms_of_runs(runs_, partials_, words_);
  runs_.clear();
  chunks_ = 0;
  added_ = true;
  return words_;
}

void DeviceNorms::make_rates(const kernels::AdafactorLimits& limits, std::span<const kernels::AdafactorRate> tensors,
                             DevicePtr<float> rates) {
  if (!added_) return walk_.on().adafactor_rates_of_runs(limits, tensors, runs_, partials_, words_, rates);
  walk_.on().adafactor_rates(limits, tensors, add_up(), rates);
}

}  // namespace cairn::optim
