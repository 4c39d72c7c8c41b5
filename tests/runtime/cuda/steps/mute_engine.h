#pragma once
// Communication for one rank of a run whose other ranks are absent. Collectives are counted and return at once: memory
// that they would fill keeps its content, and a gather of the host's numbers repeats the rank's own. So the rank orders
// what it would order beside the others.

#include <functional>

#include "runtime/comm/comm.h"

namespace cairn::testing {

class MuteEngine final : public comm::Engine {
 public:
  /// `on_device`: whether that is a device's memory, which is not touched.
  MuteEngine(int64_t rank, int64_t size, std::function<bool(const void*)> on_device)
      : rank_(rank), size_(size), on_device_(std::move(on_device)) {}

  int64_t world_rank() const override { return rank_; }
  int64_t world_size() const override { return size_; }
  Result<std::unique_ptr<comm::Comm>> group(std::string_view axis, const std::vector<int64_t>& world_ranks) override;
  Result<std::unique_ptr<comm::Comm>> exact_group(std::string_view axis,
                                                  const std::vector<int64_t>& world_ranks) override {
    return group(axis, world_ranks);
  }
  bool keeps_rank_order() const override { return true; }
  void abort(std::string_view /*reason*/) override {}
  void give_up(ErrorCode /*code*/, std::string_view /*reason*/) override {}

  /// Collectives and messages over the device's memory, of groups of several ranks.
  int64_t take_calls() { return std::exchange(calls_, 0); }

 private:
  friend class MuteComm;
  const int64_t rank_, size_;
  const std::function<bool(const void*)> on_device_;
  int64_t calls_ = 0;
};

}  // namespace cairn::testing
