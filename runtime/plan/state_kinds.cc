#include "runtime/plan/state_kinds.h"

namespace cairn {

StateKinds::StateKinds(const OptimizerConfig& optimizer) {
  add(StateKind::kWeight);
  if (optimizer.kind != OptimizerKind::kAdafactor || optimizer.beta1 > 0) add(StateKind::kExpAvg);
  add(StateKind::kExpAvgSq);
  if (optimizer.kind == OptimizerKind::kAdafactor) {
    add(StateKind::kExpAvgSqRow);
    add(StateKind::kExpAvgSqCol);
  }
  if (optimizer.ema > 0) add(StateKind::kEma);
}

StateKinds StateKinds::weights_alone() {
  StateKinds out;
  out.add(StateKind::kWeight);
  return out;
}

StateKinds StateKinds::without(StateKind kind) const {
  StateKinds out = *this;
  out.bits_ &= ~(1u << static_cast<int>(kind));
  return out;
}

StateKinds StateKinds::moments() const { return without(StateKind::kWeight).without(StateKind::kEma); }

StateKinds StateKinds::without_moments() const {
  StateKinds out = *this;
  out.bits_ &= ~moments().bits_;
  return out;
}

std::vector<StateKind> StateKinds::arrays() const {
  std::vector<StateKind> out;
  for (const StateKind kind : {StateKind::kWeight, StateKind::kExpAvg, StateKind::kExpAvgSq, StateKind::kEma}) {
    if (has(kind) && !(factored() && kind == StateKind::kExpAvgSq)) out.push_back(kind);
  }
  return out;
}

std::vector<StateKind> StateKinds::sums() const {
  if (!factored()) return {};
  return {StateKind::kExpAvgSq, StateKind::kExpAvgSqRow, StateKind::kExpAvgSqCol};
}

std::vector<StateKind> StateKinds::all() const {
  std::vector<StateKind> out = arrays();
  for (const StateKind kind : sums()) out.push_back(kind);
  return out;
}

std::optional<Shape> StateKinds::shape_of(StateKind kind, const TensorSpec& tensor) const {
  if (!has(kind)) return std::nullopt;
  if (!factored() || !is_moment(kind) || kind == StateKind::kExpAvg) return tensor.shape;
  if (tensor.balances || (kind == StateKind::kExpAvgSq) == (tensor.shape.size() > 1)) return std::nullopt;
  if (kind == StateKind::kExpAvgSq) return tensor.shape;
  return Shape{tensor.shape[kind == StateKind::kExpAvgSqRow ? 0 : 1]};
}

}  // namespace cairn
