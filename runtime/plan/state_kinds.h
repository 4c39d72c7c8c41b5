#pragma once
// What training keeps of each logical tensor: its weight, and what the optimizer adds. Most kinds have a number for
// each element of the tensor; Adafactor's second moments have one for each row and each column of a matrix.

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/config/optimizer.h"
#include "runtime/plan/model_tensors.h"

namespace cairn {

/// kWeight: the float (master) weight; kExpAvg, kExpAvgSq: first and second moment; kEma: the weight's moving average.
/// kExpAvgSqRow, kExpAvgSqCol: means of the second moment over the rows' and over the columns' elements (Adafactor).
enum class StateKind { kWeight, kExpAvg, kExpAvgSq, kEma, kExpAvgSqRow, kExpAvgSqCol };
constexpr int64_t kStateKindCount = 6;

/// Neither the weight nor its average: what the optimizer starts at zero.
constexpr bool is_moment(StateKind kind) { return kind != StateKind::kWeight && kind != StateKind::kEma; }

/// A set of kinds, and which tensors have them. Where second moments are factored, only vectors have kExpAvgSq, and a
/// router's bias, which is not trained by gradients, has no second moment.
class StateKinds {
 public:
  StateKinds() = default;
  explicit StateKinds(const OptimizerConfig& optimizer);
  static StateKinds weights_alone();

  void add(StateKind kind) { bits_ |= 1u << static_cast<int>(kind); }
  StateKinds without(StateKind kind) const;
  StateKinds moments() const, without_moments() const;
  bool has(StateKind kind) const { return (bits_ >> static_cast<int>(kind) & 1u) != 0; }
  bool factored() const { return has(StateKind::kExpAvgSqRow); }

  /// Of every tensor and element, in the order of a bank and a manifest.
  std::vector<StateKind> arrays() const;
  /// Behind them: fewer numbers, which every rank keeps whole that holds a part of the tensor. Empty unless factored.
  std::vector<StateKind> sums() const;
  std::vector<StateKind> all() const;

  /// Nothing where the tensor has no such state.
  std::optional<Shape> shape_of(StateKind kind, const TensorSpec& tensor) const;

  bool operator==(const StateKinds&) const = default;

 private:
  uint32_t bits_ = 0;
};

}  // namespace cairn
