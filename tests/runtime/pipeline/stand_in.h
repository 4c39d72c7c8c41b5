#pragma once
// Stages that compute nothing: what the executor does with them is seen, not what a model does.

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/schedule.h"

namespace cairn::pipeline::testing {

/// What travels between stand-ins, in many places of a boundary tensor, its ends among them.
struct Stamp {
  double time = 0;  // when the sender's pass ended
  int64_t stage = 0, micro_batch = 0, place = 0;
};

/// The clock of one rank and what has happened on it. `pass` is called for each pass: it lets the time go by that the
/// pass takes, from `ready` (when the sender ended) on.
struct RankClock {
  std::function<void(RankClock&, ActionKind kind, double ready)> pass;
  double now = 0;
  bool records = true;
  std::vector<TimedAction> timeline;
};

/// The chunk `chunk` of rank `rank`. It reads the number of the micro-batch from tokens[0] and checks what it is given:
/// that a message comes from the stage next to it and is of that micro-batch, and that slots hold what they should.
class StandIn final : public nn::StageModel {
 public:
  StandIn(const ScheduleShape& shape, int64_t rank, int64_t chunk, int64_t boundary_bytes, RankClock& clock,
          int64_t stamps = 2)
      : stage_(stage_at(shape, rank, chunk)),
        stages_(shape.pp * shape.chunks),
        chunk_(chunk),
        bytes_(boundary_bytes),
        stamps_(stamps),
        clock_(clock),
        slots_(in_flight_micro_batches(shape, rank)[chunk], -1),
        late_(late_micro_batches(shape, rank)[chunk], -1) {
    RT_CHECK(bytes_ >= static_cast<int64_t>(sizeof(Stamp)) && stamps_ >= 2);
  }

  void set_dropout_keys(int64_t, std::span<const uint64_t>) override {}
  void set_sequences(int64_t, const nn::SequenceRows&) override {}
  Status forward_cached(const int32_t*, const nn::CachedRows&) override { return no_cache(); }
  Status cached_logits(int64_t, int64_t, std::span<float>) override { return no_cache(); }
  Status forward(int64_t slot, const int32_t* tokens, const int32_t*, DevicePtr<const void> input,
                 DevicePtr<void> output) override {
    const int64_t micro_batch = tokens[0];
    RT_CHECK((input == nullptr) == (stage_ == 0) && (output == nullptr) == (stage_ + 1 == stages_));
    slots_.at(slot) = micro_batch;
    run(ActionKind::kForward, micro_batch, slot, 0, address_of(input), stage_ - 1, address_of(output));
    losses_[slot] = static_cast<float>(micro_batch);
    return {};
  }
  Status backward(int64_t slot, const int32_t* tokens, const int32_t*, DevicePtr<const void> doutput,
                  DevicePtr<void> dinput, float) override {
    RT_CHECK(slots_.at(slot) == tokens[0], "slot {} holds {}, not {}", slot, slots_[slot], tokens[0]);
    run(ActionKind::kBackward, tokens[0], slot, 0, address_of(doutput), stage_ + 1, address_of(dinput));
    slots_[slot] = -1;
    return {};
  }
  Status backward_input(int64_t slot, int64_t late, const int32_t* tokens, const int32_t*,
                        DevicePtr<const void> doutput, DevicePtr<void> dinput, float) override {
    RT_CHECK(slots_.at(slot) == tokens[0], "slot {} holds {}, not {}", slot, slots_[slot], tokens[0]);
    late_.at(late) = tokens[0];
    run(ActionKind::kBackwardInput, tokens[0], slot, late, address_of(doutput), stage_ + 1, address_of(dinput));
    return {};
  }
  Status backward_weight(int64_t slot, int64_t late) override {
    RT_CHECK(slots_.at(slot) >= 0 && slots_[slot] == late_.at(late), "slots hold {} and {}", slots_[slot], late_[late]);
    run(ActionKind::kBackwardWeight, slots_[slot], slot, late, nullptr, 0, nullptr);
    slots_[slot] = late_[late] = -1;
    return {};
  }
  void leave_losses(bool) override {}
  void token_losses(int64_t slot, std::span<float> losses) const override { losses[0] = losses_.at(slot); }
  void note_ruined_losses(int64_t, bool, DevicePtr<double>) const override {}
  int64_t rows() const override { return 1; }
  int64_t loss_rows() const override { return 1; }
  Status logits(int64_t, std::span<float>) override { return Error{ErrorCode::kUnsupported, "a stand-in"}; }
  int64_t boundary_bytes() const override { return bytes_; }

 private:
  static Status no_cache() { return Error{ErrorCode::kInternal, "a stand-in has no cache"}; }
  void run(ActionKind kind, int64_t micro_batch, int64_t slot, int64_t late, const void* input, int64_t sender,
           void* output) {
    double ready = 0;
    if (input != nullptr) {
      for (int64_t k = 0; k < stamps_; ++k) {
        Stamp stamp;
        std::memcpy(&stamp, static_cast<const char*>(input) + stamp_at(k), sizeof(stamp));
        RT_CHECK(stamp.stage == sender && stamp.micro_batch == micro_batch && stamp.place == k,
                 "stage {} got place {} of micro-batch {} of stage {}, not {} of {} of {}", stage_, stamp.place,
                 stamp.micro_batch, stamp.stage, k, micro_batch, sender);
        ready = stamp.time;
      }
    }
    const double before = std::max(clock_.now, ready);
    clock_.pass(clock_, kind, ready);
    if (clock_.records) clock_.timeline.push_back({{kind, micro_batch, chunk_, slot, late}, before, clock_.now});
    if (output == nullptr) return;
    for (int64_t k = 0; k < stamps_; ++k) {
      const Stamp stamp{clock_.now, stage_, micro_batch, k};
      std::memcpy(static_cast<char*>(output) + stamp_at(k), &stamp, sizeof(stamp));
    }
  }

  /// Where the k-th stamp lies: they are spread evenly.
  int64_t stamp_at(int64_t k) const { return (bytes_ - static_cast<int64_t>(sizeof(Stamp))) * k / (stamps_ - 1); }

  int64_t stage_, stages_, chunk_, bytes_, stamps_;
  RankClock& clock_;
  std::vector<int64_t> slots_, late_;  // the micro-batch in each
  std::map<int64_t, float> losses_;    // of each slot
};

}  // namespace cairn::pipeline::testing
