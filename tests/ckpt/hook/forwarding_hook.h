#pragma once
// A checkpoint hook that passes every call on to another one, for tests that change some of the calls.

#include <cstdint>
#include <optional>
#include <span>

#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::ckpt::testing {

class ForwardingHook : public trainer::CheckpointHook {
 public:
  /// `hook` outlives it.
  explicit ForwardingHook(trainer::CheckpointHook& hook) : hook_(hook) {}

  Result<trainer::StateMemory> memory(std::span<const trainer::StateTensor> saved,
                                      std::span<const trainer::StateTensor> copies, int64_t weight_bytes) override {
    return hook_.memory(saved, copies, weight_bytes);
  }
  Result<std::optional<trainer::Restored>> restore(std::span<const trainer::StateTensor> state) override {
    return hook_.restore(state);
  }
  Result<int64_t> next_bank(int64_t current) override { return hook_.next_bank(current); }
  Status begin_update(int64_t bank, int64_t step) override { return hook_.begin_update(bank, step); }
  Result<trainer::StepOrder> decide(const trainer::TrainPosition& position, bool last) override {
    return hook_.decide(position, last);
  }
  Status weights_whole(int64_t step) override { return hook_.weights_whole(step); }
  Status snapshot(const trainer::StepOrder& order, const trainer::TrainPosition& position, int64_t bank,
                  std::span<const trainer::StateTensor> state, std::span<const uint64_t> sums) override {
    return hook_.snapshot(order, position, bank, state, sums);
  }
  void condemn(int64_t step) override { hook_.condemn(step); }
  Status finish() override { return hook_.finish(); }
  void release() override { hook_.release(); }

 private:
  trainer::CheckpointHook& hook_;
};

}  // namespace cairn::ckpt::testing
