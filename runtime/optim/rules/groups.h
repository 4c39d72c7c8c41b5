#pragma once
// What the recipe's parameter groups mean for one tensor.

#include "runtime/config/optimizer.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::optim {

struct TensorRates {
  double lr = 1;            // times the learning rate of the step
  double weight_decay = 0;  // decoupled: times the tensor's learning rate
};

/// Without a group: rate 1, and optimizer.weight_decay on matrices alone.
TensorRates rates_of(const OptimizerConfig& config, const TensorSpec& tensor);

}  // namespace cairn::optim
