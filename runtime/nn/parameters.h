#pragma once
// Where a rank's parameters lie: views into the memory of weights and gradients, by logical name.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "runtime/kernels/ops.h"
#include "runtime/plan/plan.h"

namespace cairn::nn {

/// One tensor; `grad` is null in a model that only runs forward. Both null: the model has no such tensor.
template <typename Real>
struct Parameter {
  DevicePtr<const Real> weight;
  DevicePtr<float> grad;
  uint8_t* unwritten = nullptr;  // not 0: grad holds nothing yet, and who comes first overwrites it; null: always adds
  int64_t rows = 0;              // first dim in memory
  int64_t first_row = 0;         // logical index of row 0
  int64_t valid_rows = 0;        // without vocabulary padding; may be 0

  explicit operator bool() const { return static_cast<bool>(weight); }
};

template <typename Real>
class Parameters {
 public:
  /// `unwritten`: Parameter::unwritten by tensor of the rank, or empty. `source`: whose gradients, of tensors that keep
  /// them apart (RankPlan::grad_at).
  Parameters(const kernels::Exec<Real>& on, const Plan& plan, const RankPlan& rank, DevicePtr<const Real> weights,
             DevicePtr<float> grads, std::span<uint8_t> unwritten = {}, int64_t source = 0)
      : on_(on), plan_(plan), rank_(rank), weights_(weights), grads_(grads), unwritten_(unwritten), source_(source) {}

  /// The kernels of the device that they lie on.
  const kernels::Exec<Real>& on() const { return on_; }

  /// The same for gradients of the tokens of another ep rank.
  Parameters of_source(int64_t source) const { return {on_, plan_, rank_, weights_, grads_, {}, source}; }

  /// The tensor must live on this rank.
  Parameter<Real> get(std::string_view name) const {
    Parameter<Real> found = get_optional(name);
    RT_CHECK(found, "rank {} holds no tensor {}", rank_.rank, name);
    return found;
  }

  Parameter<Real> get_optional(std::string_view name) const { return view(rank_.find(plan_.tensors, name)); }

  /// The token embedding as the last stage reads it: its own copy where the rank holds one.
  Parameter<Real> table_at_end() const {
    for (const LocalTensor& local : rank_.tensors) {
      if (local.table_copy) return view(&local);
    }
    return get("embed.tokens");
  }

 private:
  Parameter<Real> view(const LocalTensor* local) const {
    if (local == nullptr) return {};
    const DevicePtr<float> grad = grads_ ? grads_ + rank_.grad_at(*local, source_) : nullptr;
    uint8_t* const unwritten = unwritten_.empty() ? nullptr : &unwritten_[local - rank_.tensors.data()];
    return {weights_ + local->weight_at, grad, unwritten, local->shape[0], local->box.lo[0], local->box.extent(0)};
  }

  const kernels::Exec<Real>& on_;
  const Plan& plan_;
  const RankPlan& rank_;
  DevicePtr<const Real> weights_;
  DevicePtr<float> grads_;
  std::span<uint8_t> unwritten_;
  int64_t source_;
};

}  // namespace cairn::nn
