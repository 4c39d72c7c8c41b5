#pragma once
// The recipe's `optimizer` and `loss_scale`. runtime/config/recipe.h says how it is filled.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/span.h"

namespace cairn {

enum class OptimizerKind { kAdamW, kLamb, kAdafactor };
enum class LrFrom { kStart, kStage };  // where an LR schedule counts from: of the run, or of the stage that set it

struct LrStage {
  enum class Kind { kWarmup, kCosine, kLinear, kHold, kInverseSqrt, kExponential, kOneMinusSqrt } kind = Kind::kHold;
  Span over;      // length; value 0, at most one: what the others leave of the run
  double to = 0;  // the rate at the end of the stage; inverse square root: the least rate; none with warm-up and hold
};

/// Tensors that are trained differently. Of several groups that name a tensor the last one counts.
struct ParameterGroup {
  std::string tensors;       // pattern of names (runtime/core/glob.h)
  double lr = 1;             // times the learning rate; 0 freezes
  double weight_decay = -1;  // below 0: as without the group
};

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double peak_lr = 0;
  std::vector<LrStage> lr;  // empty: constant
  LrFrom lr_from = LrFrom::kStart;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  // Adafactor reads beta1 alone
  double decay_power = 0.8;                      // Adafactor: of step t, second moments keep 1 - t^-decay_power
  double update_clip = 1;       // Adafactor: largest root mean square of a tensor's step, before the rate; 0: off
  bool scale_parameter = true;  // Adafactor: the rate is times the root mean square of the tensor's weights
  double least_scale = 1e-3;    // Adafactor: and that is at least this
  double weight_decay = 0;      // matrices only; none on biases and norm weights
  std::vector<ParameterGroup> groups;
  double clip = 0;                  // global gradient norm over the whole mesh; 0: off
  double z_loss = 0;                // weight of the squared logarithm of the softmax's denominator, added to each loss
  double embedding_gradient = 1;    // part of the gradient that goes through the token embedding (GLM-130B: 0.1)
  double ema = 0;                   // decay of the average of weights that is kept beside them; 0: none
  double qk_clip = 0;               // attention scores above it scale a head's q and k down after the update; 0: off
  std::string offload;              // folder on a disk for the banks of optimizer state; empty: shared memory
  int zero = 0;                     // split over dp: 1 optimizer states, 2 gradients too, 3 weights too
  int64_t bucket = 0;               // elements reduced or gathered at once; 0: plan::default_bucket_elems
  bool overlap = true;              // reductions run beside backward, gathers of weights beside forward
  bool keep_after_forward = false;  // ZeRO-3: weights gathered for forward stay until the end of the step
};

/// precision = fp16 alone.
struct LossScaleConfig {
  double initial = 65536;
  int64_t window = 1000;   // steps without overflow before it doubles; 0: never
  int64_t hysteresis = 2;  // overflows before it halves
  double min = 1;          // an overflow at this scale stops the run
};

}  // namespace cairn
