#include "runtime/optim/rules/groups.h"

#include "runtime/core/glob.h"

namespace cairn::optim {

TensorRates rates_of(const OptimizerConfig& config, const TensorSpec& tensor) {
  TensorRates out{.weight_decay = tensor.decay ? config.weight_decay : 0};
  for (const ParameterGroup& group : config.groups) {
    if (!matches(group.tensors, tensor.name)) continue;
    out.lr = group.lr;
    out.weight_decay = group.weight_decay >= 0 ? group.weight_decay : tensor.decay ? config.weight_decay : 0;
  }
  return out;
}

}  // namespace cairn::optim
