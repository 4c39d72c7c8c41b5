#pragma once
// Tensors of a recommender model: names, shapes, and the rules of its options. No layout appears here.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/dlrm.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::dlrm {

/// Errors: kInvalidInput, naming the first field that is wrong, its value and what it accepts. Pure.
Status check(const DlrmConfig& config);
Status check(const DlrmOptimizer& optimizer);

/// Numbers of a sample that the top MLP takes. `config` is checked.
int64_t interaction_width(const DlrmConfig& config);

struct TensorShape {
  std::string name;  // "bottom.0.weight", "cross.0.v", "top.2.bias", "table.C1"
  Shape shape;       // of weights [out, in], of tables [rows, dim]
};

/// All tensors but the tables, in the order in which they lie in memory: bottom, cross layers, top.
std::vector<TensorShape> dense_tensors(const DlrmConfig& config);
std::vector<TensorShape> table_tensors(const DlrmConfig& config);

int64_t count_elems(const std::vector<TensorShape>& tensors);

/// The learning rate of step 1, 2, ...: linear warm-up, constant, then lr ((end - step) / decay_steps)^2 with a floor
/// of 1e-7, which stays at its last value. Divides by Adagrad's own decay. Source: the reference implementation's
/// LRPolicyScheduler, which between warm-up and decay keeps the last rate of the warm-up instead of lr.
double learning_rate(const DlrmOptimizer& optimizer, int64_t step);

}  // namespace cairn::dlrm
