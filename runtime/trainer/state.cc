#include "runtime/trainer/state.h"

#include "runtime/plan/activations.h"
#include "runtime/trainer/initial.h"

namespace cairn::trainer {

Result<TrainState> TrainState::allocate(const Plan& plan, const RankPlan& rank) {
  const Device device{DeviceKind::kCpu, 0};
  TrainState out;
  RT_TRY_SET(out.weights_, Buffer::allocate(device, rank.weight_bytes));
  RT_TRY_SET(out.grads_, Buffer::allocate(device, rank.grad_bytes));
  RT_TRY_SET(out.optimizer_, Buffer::allocate(device, rank.optimizer_bytes));
  RT_TRY_SET(out.activations_, Buffer::allocate(device, stage_buffers_bytes(plan, rank)));
  RT_TRY_SET(out.boundary_, Buffer::allocate(device, plan.boundary_buffers_bytes()));
  out.arrays_.weights = out.weights_.data();
  out.arrays_.grads = reinterpret_cast<float*>(out.grads_.data());
  auto* state = reinterpret_cast<float*>(out.optimizer_.data());
  out.arrays_.exp_avg = state;
  out.arrays_.exp_avg_sq = state + rank.state_elems;
  if (plan.compute_dtype() == DType::kBf16) out.arrays_.master = state + 2 * rank.state_elems;
  return out;
}

std::span<std::byte> TrainState::activations() {
  return {activations_.data(), static_cast<size_t>(activations_.size_bytes())};
}

std::span<std::byte> TrainState::boundary() { return {boundary_.data(), static_cast<size_t>(boundary_.size_bytes())}; }

int64_t TrainState::allocated_bytes() const {
  return weights_.size_bytes() + grads_.size_bytes() + optimizer_.size_bytes() + activations_.size_bytes() +
         boundary_.size_bytes();
}

float* TrainState::weight_at(const StatePiece& piece) const {
  return arrays_.master != nullptr ? arrays_.master + piece.state_offset
                                   : static_cast<float*>(arrays_.weights) + piece.flat_offset;
}

std::vector<StateTensor> TrainState::tensors(const RankPlan& rank) const {
  std::vector<StateTensor> out;
  out.reserve(3 * rank.pieces.size());
  for (const StateKind kind : {StateKind::kWeight, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
    for (const StatePiece& piece : rank.pieces) {
      float* data = kind == StateKind::kWeight   ? weight_at(piece)
                    : kind == StateKind::kExpAvg ? arrays_.exp_avg + piece.state_offset
                                                 : arrays_.exp_avg_sq + piece.state_offset;
      out.push_back(
          {kind, piece.tensor, piece.box, reinterpret_cast<std::byte*>(data), piece.count_elems() * 4, piece.primary});
    }
  }
  return out;
}

void TrainState::initialize(const Plan& plan, const RankPlan& rank) {
  for (const StatePiece& piece : rank.pieces) {
    initial_weights(plan, piece.tensor, piece.box, weight_at(piece));
  }
}

}  // namespace cairn::trainer
