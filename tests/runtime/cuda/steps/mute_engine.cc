#include "tests/runtime/cuda/steps/mute_engine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

namespace cairn::testing {

class MuteComm final : public comm::Comm {
 public:
  MuteComm(MuteEngine& engine, std::string name, int64_t rank, int64_t size)
      : engine_(engine), name_(std::move(name)), rank_(rank), size_(size) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

  Status all_reduce(void* data, int64_t, DType, comm::ReduceOp, std::string_view) override { return note(data); }
  Status reduce_scatter(const void*, void* output, int64_t, DType, comm::ReduceOp, std::string_view) override {
    return note(output);
  }
  Status reduce_scatter_add(const void*, void* output, int64_t, DType, int64_t, std::string_view) override {
    return note(output);
  }
  Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view) override {
    if (engine_.on_device_(output)) return note(output);
    const std::vector<std::byte> own(static_cast<const std::byte*>(input),
                                     static_cast<const std::byte*>(input) + bytes_per_rank);
    for (int64_t r = 0; r < size_; ++r) {
      std::memcpy(static_cast<std::byte*>(output) + r * bytes_per_rank, own.data(), own.size());
    }
    return {};
  }
  Status broadcast(void* data, int64_t, int64_t, std::string_view) override { return note(data); }
  Status all_to_all(std::span<const comm::OutPart>, std::span<const comm::InPart> in, std::string_view) override {
    return in.empty() ? Status() : note(in.front().data);
  }
  Status barrier(std::string_view) override { return {}; }
  Status isend(const void* data, int64_t, int64_t, std::string_view) override { return note(data); }
  Status recv(void* data, int64_t, int64_t, std::string_view) override { return note(data); }
  Status wait_sends(std::string_view) override { return {}; }
  Status wait_sends_to(int64_t, int64_t, std::string_view) override { return {}; }
  Traffic traffic() const override { return {}; }

 private:
  Status note(const void* at) {
    engine_.calls_ += size_ > 1 && engine_.on_device_(at) ? 1 : 0;
    return {};
  }

  MuteEngine& engine_;
  const std::string name_;
  const int64_t rank_, size_;
};

Result<std::unique_ptr<comm::Comm>> MuteEngine::group(std::string_view axis, const std::vector<int64_t>& world_ranks) {
  const auto mine = std::ranges::find(world_ranks, rank_) - world_ranks.begin();
  return std::unique_ptr<comm::Comm>(
      std::make_unique<MuteComm>(*this, fmt::format("{}{}", axis, world_ranks), mine, std::ssize(world_ranks)));
}

}  // namespace cairn::testing
