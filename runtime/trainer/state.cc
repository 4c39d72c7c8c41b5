#include "runtime/trainer/state.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/plan/activations.h"
#include "runtime/trainer/initial.h"

namespace cairn::trainer {

namespace {

/// The arrays of state that lie one after another, so many elements each.
kernels::StateArrays arrays_at(const std::vector<StateKind>& kinds, DevicePtr<float> at, int64_t elems) {
  kernels::StateArrays out;
  for (const StateKind kind : kinds) {
    out.*optim::member_of(kind) = at;
    at += elems;
  }
  return out;
}

/// `copies`: all that the rank keeps of others.
Status check_peer_copies(const std::vector<PeerCopy>& parts, const std::vector<StateTensor>& copies, size_t banks) {
  for (const PeerCopy& part : parts) {
    const int64_t room = part.copy >= 0 && part.copy < std::ssize(copies) ? copies[part.copy].bytes : 0;
    if (part.offset < 0 || part.bytes <= 0 || part.offset + part.bytes > room || part.offset % 4 != 0 ||
        part.bytes % 4 != 0 || part.banks.size() != banks) {
      return Error{
          ErrorCode::kInternal,
          fmt::format("a peer has bytes {} to {} of copy {} in {} banks; there are {} copies, this one has {} "
                      "bytes, of floats, in {} banks",
                      part.offset, part.offset + part.bytes, part.copy, part.banks.size(), copies.size(), room, banks)};
    }
  }
  return {};
}

}  // namespace

std::vector<StateTensor> kept_tensors(const Plan& plan, const RankPlan& rank, bool primary) {
  std::vector<StateTensor> out;
  const auto add = [&](StateKind kind, const auto& piece, int64_t count) {
    if (piece.primary == primary) out.push_back({kind, piece.tensor, piece.box, nullptr, count * 4, primary});
  };
  for (const StateKind kind : plan.state_kinds().arrays()) {
    if (!primary && kind == StateKind::kEma) continue;
    for (const StatePiece& piece : rank.pieces) add(kind, piece, piece.count_elems());
  }
  for (const SumPiece& piece : rank.sums) add(piece.kind, piece, piece.count());
  return out;
}

std::vector<int64_t> TrainState::blocks(const Plan& plan, const RankPlan& rank, const StateMemory& memory) {
  return {memory.weights ? 0 : rank.weight_bytes,
          rank.gathered_bytes,
          rank.grad_bytes,
          rank.private_bytes(),
          rank.work_bytes(),
          largest_stage_buffers_bytes(plan, rank.rank),
          plan.boundary_buffers_bytes(),
          memory.banks.empty() || memory.gate != nullptr ? rank.bank_bytes() : 0};
}

Result<TrainState> TrainState::allocate(const Plan& plan, const RankPlan& rank, const StateMemory& memory,
                                        Device device) {
  TrainState out;
  const std::vector<int64_t> sizes = blocks(plan, rank, memory);
  auto bytes = sizes.begin();
  for (Buffer TrainState::*const block :
       {&TrainState::weights_, &TrainState::gathered_, &TrainState::grads_, &TrainState::private_, &TrainState::work_,
        &TrainState::activations_, &TrainState::boundary_, &TrainState::bank_}) {
    RT_TRY_SET(Buffer made, Buffer::allocate(device, *bytes++));
    out.*block = std::move(made).for_device_alone();
  }
  out.arrays_.weights = memory.weights ? memory.weights : out.weights_.at();
  out.arrays_.grads = out.grads_.at<float>();
  out.arrays_.pager = memory.pager;
  out.arrays_.gate = memory.gate;
  out.memory_ = {.weights = out.arrays_.weights,
                 .gathered = rank.scattered_weights ? out.gathered_.at() : nullptr,
                 .sums = out.grads_.at<float>(),
                 .slots = rank.scattered_grads ? out.grads_.at<float>() + rank.grad_elems() : nullptr,
                 .partial = out.work_.at<float>()};
  const DevicePtr<float> own = out.private_.at<float>();
  const StateKinds kinds = plan.state_kinds();
  const std::vector<StateKind> arrays = kinds.arrays(), shared = kinds.without(StateKind::kEma).arrays();
  out.arrays_.private_state = arrays_at(shared, own, rank.private_elems);
  out.arrays_.private_sums = own + rank.private_elems * rank.private_arrays;
  out.arrays_.work = out.work_.at();

  if (memory.banks.empty() || memory.gate != nullptr) {
    const DevicePtr<float> bank = out.bank_.at<float>();
    std::vector<kernels::StateArrays>& states = out.arrays_.banks.emplace_back();
    for (const StatePiece& piece : rank.pieces) {
      if (piece.primary) states.push_back(arrays_at(arrays, bank + piece.state_offset, rank.saved_elems));
    }
    std::vector<DevicePtr<float>>& of_sums = out.arrays_.bank_sums.emplace_back();
    for (const SumPiece& piece : rank.sums) {
      if (piece.primary) of_sums.push_back(bank + rank.saved_elems * rank.saved_arrays + piece.state_offset);
    }
  }
  size_t saved = 0, sums = 0;
  for (const StatePiece& piece : rank.pieces) saved += piece.primary ? 1 : 0;
  for (const SumPiece& piece : rank.sums) sums += piece.primary ? 1 : 0;
  for (const std::vector<DevicePtr<std::byte>>& bank : memory.banks) {
    const size_t wanted = arrays.size() * saved + sums;
    if (bank.size() != wanted) {
      return Error{ErrorCode::kInternal,
                   fmt::format("a bank with {} tensors, rank {} saves {}", bank.size(), rank.rank, wanted)};
    }
    std::vector<kernels::StateArrays>& states = out.arrays_.banks.emplace_back();
    const auto at = [&](size_t k) { return bank[k].as<float>(); };
    for (size_t k = 0; k < saved; ++k) {
      kernels::StateArrays& state = states.emplace_back();
      for (size_t array = 0; array < arrays.size(); ++array)
        state.*optim::member_of(arrays[array]) = at(array * saved + k);
    }
    std::vector<DevicePtr<float>>& of_sums = out.arrays_.bank_sums.emplace_back();
    for (size_t k = 0; k < sums; ++k) of_sums.push_back(at(arrays.size() * saved + k));
  }
  if (memory.peer_copies) {
    RT_TRY(check_peer_copies(*memory.peer_copies, kept_tensors(plan, rank, false), out.arrays_.banks.size()));
    out.arrays_.peer_copies = memory.peer_copies;
  }
  return out;
}

int64_t TrainState::allocated_bytes() const {
  return weights_.size_bytes() + gathered_.size_bytes() + grads_.size_bytes() + bank_.size_bytes() +
         private_.size_bytes() + work_.size_bytes() + activations_.size_bytes() + boundary_.size_bytes();
}

std::vector<StateTensor> TrainState::tensors(const Plan& plan, const RankPlan& rank, int64_t bank) const {
  std::vector<StateTensor> out;
  out.reserve(static_cast<size_t>(rank.saved_arrays) * rank.pieces.size() + rank.sums.size());
  const std::vector<int64_t> turns = optim::overwrite_turns(plan, rank);
  auto turn = turns.begin();
  const auto add = [&](StateKind kind, const auto& piece, DevicePtr<float> data, int64_t count) {
    if (!piece.primary && arrays_.peer_copies) return;
    out.push_back(
        {kind, piece.tensor, piece.box, data.as<std::byte>(), count * 4, piece.primary, piece.primary ? *turn++ : 0});
  };
  for (const StateKind kind : plan.state_kinds().arrays()) {
    DevicePtr<float> kernels::StateArrays::*const array = optim::member_of(kind);
    size_t saved = 0;
    for (const StatePiece& piece : rank.pieces) {
      if (!piece.primary && kind == StateKind::kEma) continue;
      add(kind, piece,
          piece.primary ? arrays_.banks[bank][saved++].*array : arrays_.private_state.*array + piece.state_offset,
          piece.count_elems());
    }
  }
  size_t saved = 0;
  for (const SumPiece& piece : rank.sums) {
    add(piece.kind, piece, piece.primary ? arrays_.bank_sums[bank][saved++] : arrays_.private_sums + piece.state_offset,
        piece.count());
  }
  return out;
}

void TrainState::initialize(Stream& stream, const Plan& plan, const RankPlan& rank) {
  const kernels::StateExec on = kernels::state_exec_on(stream);
  for (const StateTensor& tensor : tensors(plan, rank, 0)) {
    if (!is_moment(tensor.kind)) {
      on.draw_weights(first_weights(plan, tensor.tensor, tensor.box), tensor.data.as<float>());
    } else {
      on.clear_floats(tensor.data.as<float>(), tensor.bytes / 4);  // a hook's memory may have been used before
    }
  }
}

}  // namespace cairn::trainer
