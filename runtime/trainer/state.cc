#include "runtime/trainer/state.h"

#include <fmt/format.h>

#include <cstring>

#include "runtime/plan/activations.h"
#include "runtime/trainer/initial.h"

namespace cairn::trainer {

namespace {

constexpr StateKind kKinds[] = {StateKind::kWeight, StateKind::kExpAvg, StateKind::kExpAvgSq, StateKind::kEma};

std::span<const StateKind> saved_kinds(const RankPlan& rank) {
  return std::span(kKinds).first(static_cast<size_t>(rank.saved_arrays));
}

float* array_of(const kernels::AdamwState& state, StateKind kind) {
  switch (kind) {
    case StateKind::kWeight:
      return state.master;
    case StateKind::kExpAvg:
      return state.exp_avg;
    case StateKind::kExpAvgSq:
      return state.exp_avg_sq;
    case StateKind::kEma:
      return state.ema;
  }
  return nullptr;
}

}  // namespace

std::vector<StateTensor> saved_tensors(const RankPlan& rank) {
  std::vector<StateTensor> out;
  for (const StateKind kind : saved_kinds(rank)) {
    for (const StatePiece& piece : rank.pieces) {
      if (piece.primary) out.push_back({kind, piece.tensor, piece.box, nullptr, piece.count_elems() * 4, true});
    }
  }
  return out;
}

Result<TrainState> TrainState::allocate(const Plan& plan, const RankPlan& rank, const StateMemory& memory) {
  const Device device{DeviceKind::kCpu, 0};
  TrainState out;
  if (memory.weights == nullptr) {
    RT_TRY_SET(out.weights_, Buffer::allocate(device, rank.weight_bytes));
  }
  RT_TRY_SET(out.gathered_, Buffer::allocate(device, rank.gathered_bytes));
  RT_TRY_SET(out.grads_, Buffer::allocate(device, rank.grad_bytes));
  RT_TRY_SET(out.private_, Buffer::allocate(device, rank.private_elems * kPrivateArrays * 4));
  RT_TRY_SET(out.activations_, Buffer::allocate(device, largest_stage_buffers_bytes(plan, rank.rank)));
  RT_TRY_SET(out.boundary_, Buffer::allocate(device, plan.boundary_buffers_bytes()));
  out.arrays_.weights = memory.weights != nullptr ? memory.weights : out.weights_.data();
  out.arrays_.grads = reinterpret_cast<float*>(out.grads_.data());
  out.memory_ = {.weights = static_cast<std::byte*>(out.arrays_.weights),
                 .gathered = rank.scattered_weights ? out.gathered_.data() : nullptr,
                 .sums = out.arrays_.grads,
                 .slots = rank.scattered_grads ? out.arrays_.grads + rank.grad_elems() : nullptr};
  auto* own = reinterpret_cast<float*>(out.private_.data());
  out.arrays_.private_state = {own, own + rank.private_elems, own + 2 * rank.private_elems};

  size_t saved = 0;
  for (const StatePiece& piece : rank.pieces) saved += piece.primary ? 1 : 0;
  for (const std::vector<std::byte*>& bank : memory.banks) {
    const size_t wanted = static_cast<size_t>(rank.saved_arrays) * saved;
    if (bank.size() != wanted) {
      return Error{ErrorCode::kInternal,
                   fmt::format("a bank with {} tensors, rank {} saves {}", bank.size(), rank.rank, wanted)};
    }
    std::vector<kernels::AdamwState>& states = out.arrays_.banks.emplace_back();
    const auto at = [&](size_t k) { return reinterpret_cast<float*>(bank[k]); };
    for (size_t k = 0; k < saved; ++k) {
      states.push_back({at(k), at(saved + k), at(2 * saved + k), rank.saved_arrays > 3 ? at(3 * saved + k) : nullptr});
    }
  }
  if (memory.banks.empty()) {
    RT_TRY_SET(out.bank_, Buffer::allocate(device, rank.bank_bytes()));
    auto* bank = reinterpret_cast<float*>(out.bank_.data());
    std::vector<kernels::AdamwState>& states = out.arrays_.banks.emplace_back();
    for (const StatePiece& piece : rank.pieces) {
      float* const at = bank + piece.state_offset;
      if (!piece.primary) continue;
      states.push_back({at, at + rank.saved_elems, at + 2 * rank.saved_elems,
                        rank.saved_arrays > 3 ? at + 3 * rank.saved_elems : nullptr});
    }
  }
  return out;
}

std::span<std::byte> TrainState::activations() {
  return {activations_.data(), static_cast<size_t>(activations_.size_bytes())};
}

std::span<std::byte> TrainState::boundary() { return {boundary_.data(), static_cast<size_t>(boundary_.size_bytes())}; }

int64_t TrainState::allocated_bytes() const {
  return weights_.size_bytes() + gathered_.size_bytes() + grads_.size_bytes() + bank_.size_bytes() +
         private_.size_bytes() + activations_.size_bytes() + boundary_.size_bytes();
}

std::vector<StateTensor> TrainState::tensors(const RankPlan& rank, int64_t bank) const {
  std::vector<StateTensor> out;
  out.reserve(static_cast<size_t>(rank.saved_arrays) * rank.pieces.size());
  for (const StateKind kind : saved_kinds(rank)) {
    size_t saved = 0;
    for (const StatePiece& piece : rank.pieces) {
      if (!piece.primary && kind == StateKind::kEma) continue;
      float* const data = piece.primary ? array_of(arrays_.banks[bank][saved++], kind)
                                        : array_of(arrays_.private_state, kind) + piece.state_offset;
      out.push_back(
          {kind, piece.tensor, piece.box, reinterpret_cast<std::byte*>(data), piece.count_elems() * 4, piece.primary});
    }
  }
  return out;
}

void TrainState::initialize(const Plan& plan, const RankPlan& rank) {
  for (const StateTensor& tensor : tensors(rank, 0)) {
    if (tensor.kind == StateKind::kWeight || tensor.kind == StateKind::kEma) {
      initial_weights(plan, tensor.tensor, tensor.box, reinterpret_cast<float*>(tensor.data));
    } else {
      std::memset(tensor.data, 0, tensor.bytes);  // a hook's memory may have been used before
    }
  }
}

}  // namespace cairn::trainer
