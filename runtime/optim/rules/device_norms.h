#pragma once
// The squares of whole tensors and of their steps, as rules want them that scale each tensor's step. They stay on the
// device: each batch of blocks leaves its parts in Arrays::work, all of which are added up at once.

#include <span>
#include <vector>

#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/tensor_norms.h"
#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

class DeviceNorms {
 public:
  /// Orders that the words begin at zero. `walk` outlives it.
  explicit DeviceNorms(const StateWalk& walk);

  /// Where the next batch leaves its parts: [chunks of its saved blocks, kernels::TensorNorms::kWords].
  DevicePtr<double> partials_of(std::span<const StateBlock> batch);
  /// Once all batches are ordered: the words of this rank's parts of tensors, [RankPlan::tensor_norms].
  DevicePtr<double> add_up();
  /// Where no other rank has parts of these tensors: add_up(), and Adafactor's rates of all, in one order if none of
  /// the parts has been added before.
  void make_rates(const kernels::AdafactorLimits& limits, std::span<const kernels::AdafactorRate> tensors,
                  DevicePtr<float> rates);

 private:
  const StateWalk& walk_;
  const DevicePtr<double> words_, partials_;
  std::vector<kernels::NormRun> runs_;  // whose parts lie there
  int64_t chunks_ = 0;
  bool added_ = false;  // parts of before
};

}  // namespace cairn::optim
