#include "runtime/cuda/staged/staged_engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/ordered_on.h"
#include "runtime/comm/side_sums.h"
#include "runtime/core/check.h"
#include "runtime/cuda/staged/staging_lane.h"

namespace cairn::cuda {
namespace {

using comm::Comm;
using comm::InPart;
using comm::OutPart;
using comm::ReduceOp;

/// What all groups of a rank have. A lane of its own for what lanes order, since the other one may be at an operation
/// that waits for ranks which are at one of these.
class Staging {
 public:
  static Result<std::shared_ptr<Staging>> make(CudaStream& rank, std::function<bool(const void*)> on_device,
                                               const StagingRooms& rooms) {
    std::shared_ptr<Staging> out(new Staging(rank, std::move(on_device)));
    RT_TRY_SET(out->lanes_[0], StagingLane::make(rank, comm::RankThread::kMain, out->pinned_));
    RT_TRY_SET(out->lanes_[1], StagingLane::make(rank, comm::RankThread::kLane, out->pinned_));
    if (rooms.own_bytes > 0) out->lanes_[0]->room(rooms.own_bytes);
    if (rooms.lane_bytes > 0) out->lanes_[1]->room(rooms.lane_bytes);
    for (int64_t k = 0; k < rooms.messages; ++k) {
      out->messages_.push_back(std::make_unique<PinnedRoom>(rank, out->pinned_));
      out->messages_.back()->take(rooms.message_bytes);
    }
    rank.settle_with([of = std::weak_ptr(out)]() -> Status {
      const auto staging = of.lock();
      if (staging == nullptr) return {};
      for (const auto& lane : staging->lanes_) RT_TRY(lane->failed());
      return {};
    });
    return out;
  }

  struct Here {
    CudaStream& on;
    StagingLane& lane;
  };
  Here here() const {
    Stream* const ordering = comm::ordering_stream();
    if (ordering == nullptr || ordering == &rank_) return {rank_, *lanes_[0]};
    return {cuda_stream(*ordering), *lanes_[1]};
  }
  bool on_device(const void* at, int64_t bytes) const { return bytes == 0 || on_device_(at); }
  int64_t pinned_bytes() const { return pinned_; }
  /// For messages of one group to one member, which keeps it.
  std::unique_ptr<PinnedRoom> message_room() {
    const std::lock_guard lock(mutex_);
    if (messages_.empty()) return std::make_unique<PinnedRoom>(rank_, pinned_);
    std::unique_ptr<PinnedRoom> out = std::move(messages_.back());
    messages_.pop_back();
    return out;
  }
  void drain() const {
    for (const auto& lane : lanes_) lane->drain();
  }
  /// Until the device is done with pinned memory too.
  void finish() const {
    drain();
    for (const auto& lane : lanes_) ignore(lane->stream().settle(), "the rank's stream has followed it");
  }

 private:
  Staging(CudaStream& rank, std::function<bool(const void*)> on_device)
      : rank_(rank), on_device_(std::move(on_device)) {}

  CudaStream& rank_;
  const std::function<bool(const void*)> on_device_;
  std::atomic<int64_t> pinned_ = 0;
  std::mutex mutex_;                                   // of what follows
  std::vector<std::unique_ptr<PinnedRoom>> messages_;  // that nobody has taken
  std::array<std::unique_ptr<StagingLane>, comm::kRankThreads> lanes_;
};

std::byte* at(void* memory) { return static_cast<std::byte*>(memory); }

class StagedComm final : public Comm, public comm::SideSums {
 public:
  StagedComm(std::unique_ptr<Comm> inner, std::shared_ptr<Staging> staging, int64_t least_chunk_bytes)
      : inner_(std::move(inner)),
        staging_(std::move(staging)),
        least_chunk_bytes_(least_chunk_bytes),
        sends_(static_cast<size_t>(inner_->size())) {}
  ~StagedComm() override { staging_->finish(); }

  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  Traffic traffic() const override {
    staging_->drain();
    return inner_->traffic();
  }

  Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    const int64_t bytes = count * dtype_size_bytes(dtype);
    const auto reduce = [=, this, what = std::string(what)](void* there) {
      return inner_->all_reduce(there, count, dtype, op, what);
    };
    if (!on_device(data, bytes)) return by_host([&] { return reduce(data); });
    return staged(
        bytes, [&](CudaStream& s, std::byte* room) { s.copy(room, data, bytes, kToHost); }, reduce,
        [&](CudaStream& s, std::byte* room) { s.copy(data, room, bytes, kToDevice); });
  }

  int64_t least_chunk_bytes() const override { return least_chunk_bytes_; }
  Status sum_beside(DevicePtr<void> data, int64_t count, DType dtype, std::string_view what) override {
    return static_cast<Comm&>(*this).all_reduce(data, count, dtype, ReduceOp::kSum, what);
  }
  Status join_sums() override { return {}; }

  Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, ReduceOp op,
                        std::string_view what) override {
    const int64_t chunk = count_per_rank * dtype_size_bytes(dtype), own = rank() * chunk;
    const auto reduce = [=, this, what = std::string(what)](const void* from, void* to) {
      return inner_->reduce_scatter(from, to, count_per_rank, dtype, op, what);
    };
    if (!on_device(input, chunk)) return by_host([&] { return reduce(input, output); });
    return staged(
        size() * chunk, [&](CudaStream& s, std::byte* room) { s.copy(room, input, size() * chunk, kToHost); },
        [=](void* room) { return reduce(room, at(room) + own); },
        [&](CudaStream& s, std::byte* room) { s.copy(output, room + own, chunk, kToDevice); });
  }

  Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                            std::string_view what) override {
    const int64_t chunk = count_per_rank * dtype_size_bytes(dtype), sum = size() * chunk;
    const auto reduce = [=, this, what = std::string(what)](const void* from, void* to) {
      return inner_->reduce_scatter_add(from, to, count_per_rank, dtype, tree, what);
    };
    if (!on_device(input, chunk)) return by_host([&] { return reduce(input, output); });
    return staged(
        sum + chunk,
        [&](CudaStream& s, std::byte* room) {
          s.copy(room, input, sum, kToHost);
          s.copy(room + sum, output, chunk, kToHost);
        },
        [=](void* room) { return reduce(room, at(room) + sum); },
        [&](CudaStream& s, std::byte* room) { s.copy(output, room + sum, chunk, kToDevice); });
  }

  Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view what) override {
    const int64_t own = rank() * bytes_per_rank, all = size() * bytes_per_rank;
    const auto gather = [=, this, what = std::string(what)](const void* from, void* to) {
      return inner_->all_gather(from, to, bytes_per_rank, what);
    };
    if (!on_device(input, bytes_per_rank)) return by_host([&] { return gather(input, output); });
    return staged(
        all, [&](CudaStream& s, std::byte* room) { s.copy(room + own, input, bytes_per_rank, kToHost); },
        [=](void* room) { return gather(at(room) + own, room); },
        [&](CudaStream& s, std::byte* room) {
          if (input != at(output) + own) {
            s.copy(output, room, all, kToDevice);
            return;
          }
          // In place: others may be reading what is there already.
          const int64_t behind = own + bytes_per_rank;
          s.copy(output, room, own, kToDevice);
          s.copy(at(output) + behind, room + behind, all - behind, kToDevice);
        });
  }

  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    const auto send = [=, this, what = std::string(what)](void* there) {
      return inner_->broadcast(there, bytes, root, what);
    };
    if (!on_device(data, bytes)) return by_host([&] { return send(data); });
    const bool from_here = rank() == root;
    return staged(
        bytes,
        [&](CudaStream& s, std::byte* room) {
          if (from_here) s.copy(room, data, bytes, kToHost);
        },
        send,
        [&](CudaStream& s, std::byte* room) {
          if (!from_here) s.copy(data, room, bytes, kToDevice);
        });
  }

  Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) override {
    const bool there =
        std::ranges::all_of(out, [&](const OutPart& part) { return on_device(part.data, part.bytes); }) &&
        std::ranges::all_of(in, [&](const InPart& part) { return on_device(part.data, part.bytes); });
    if (!there) return by_host([&] { return inner_->all_to_all(out, in, what); });
    int64_t bytes = 0;
    for (const OutPart& part : out) bytes += part.bytes;
    for (const InPart& part : in) bytes += part.bytes;
    return staged(
        bytes,
        [&](CudaStream& s, std::byte* room) {
          for (const OutPart& part : out)
            s.copy(std::exchange(room, room + part.bytes), part.data, part.bytes, kToHost);
        },
        [this, outgoing = std::vector(out.begin(), out.end()), incoming = std::vector(in.begin(), in.end()),
         what = std::string(what)](void* room) mutable {
          std::byte* next = at(room);
          for (OutPart& part : outgoing) part.data = std::exchange(next, next + part.bytes);
          for (InPart& part : incoming) part.data = std::exchange(next, next + part.bytes);
          return inner_->all_to_all(outgoing, incoming, what);
        },
        [&](CudaStream& s, std::byte* room) {
          for (const OutPart& part : out) room += part.bytes;
          for (const InPart& part : in)
            s.copy(part.data, std::exchange(room, room + part.bytes), part.bytes, kToDevice);
        });
  }

  Status barrier(std::string_view what) override {
    return by_host([&] { return inner_->barrier(what); });
  }

  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    if (dst < 0 || dst >= size()) return inner_->isend(data, bytes, dst, what);  // which says so
    Sends& to = sends_[static_cast<size_t>(dst)];
    const int64_t number = to.sent++;
    if (!on_device(data, bytes)) {
      to.from_host = true;
      return by_host([&] { return inner_->isend(data, bytes, dst, what); });
    }
    const auto [on, lane] = staging_->here();
    RT_TRY(lane.failed());
    CudaStream& stream = lane.stream();
    auto slot = std::ranges::find_if(to.slots, [&](const Slot& one) { return one.message < to.done_before; });
    stream.follow(on.mark());
    if (slot != to.slots.end()) {
      lane.order_behind(to.known_by);
    } else {
      slot = to.slots.insert(to.slots.end(), Slot{staging_->message_room(), 0});
    }
    slot->message = number;
    std::byte* const room = slot->room->take(bytes);
    stream.copy(room, data, bytes, kToHost);
    lane.submit([=, this, what = std::string(what)] { return inner_->isend(room, bytes, dst, what); }, true);
    on.follow(stream.mark());
    return {};
  }

  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    const auto receive = [=, this, what = std::string(what)](void* there) {
      return inner_->recv(there, bytes, src, what);
    };
    if (!on_device(data, bytes)) return by_host([&] { return receive(data); });
    return staged(
        bytes, [](CudaStream&, std::byte*) {}, receive,
        [&](CudaStream& s, std::byte* room) { s.copy(data, room, bytes, kToDevice); });
  }

  // What the device sends is in pinned memory before its buffer may be filled again: there is nothing to wait for but
  // buffers of the host. The lane's thread waits, and says from when on the pinned memory is free.
  Status wait_sends(std::string_view what) override {
    bool from_host = false;
    for (Sends& to : sends_) from_host |= std::exchange(to.from_host, false);
    const auto wait = [this, what = std::string(what)] { return inner_->wait_sends(what); };
    StagingLane& lane = staging_->here().lane;
    const StagingLane::Number known_by = lane.submit(wait, false);
    for (Sends& to : sends_) {
      to.done_before = to.sent;
      to.known_by = known_by;
    }
    return from_host ? lane.wait(known_by) : lane.failed();
  }
  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    if (dst < 0 || dst >= size()) return inner_->wait_sends_to(dst, may_stay, what);
    Sends& to = sends_[static_cast<size_t>(dst)];
    StagingLane& lane = staging_->here().lane;
    if (to.sent - may_stay <= to.done_before) return lane.failed();
    to.done_before = to.sent - may_stay;
    to.known_by =
        lane.submit([=, this, what = std::string(what)] { return inner_->wait_sends_to(dst, may_stay, what); }, false);
    return to.from_host ? lane.wait(to.known_by) : lane.failed();
  }

 private:
  struct Slot {
    std::unique_ptr<PinnedRoom> room;
    int64_t message = 0;  // that it was last taken for
  };
  /// Messages to one member. The lane's thread knows behind `known_by` that those before `done_before` are sent.
  struct Sends {
    std::vector<Slot> slots;
    int64_t sent = 0, done_before = 0;
    StagingLane::Number known_by = 0;
    bool from_host = false;  // since the last wait
  };

  bool on_device(const void* memory, int64_t bytes) const { return staging_->on_device(memory, bytes); }

  /// to_host(stream, room) and to_device(stream, room) order copies; work(room) is done between them.
  template <typename ToHost, typename Work, typename ToDevice>
  Status staged(int64_t bytes, const ToHost& to_host, Work work, const ToDevice& to_device) {
    const auto [on, lane] = staging_->here();
    RT_TRY(lane.failed());
    CudaStream& stream = lane.stream();
    std::byte* const room = lane.room(bytes);
    stream.follow(on.mark());
    to_host(stream, room);
    lane.order_behind(lane.submit([work = std::move(work), room]() mutable { return work(room); }, true));
    to_device(stream, room);
    on.follow(stream.mark());
    return {};
  }
  /// Now, behind what was ordered before.
  template <typename Work>
  Status by_host(const Work& work) {
    StagingLane& lane = staging_->here().lane;
    return lane.wait(lane.submit([&work] { return work(); }, false));
  }

  const std::unique_ptr<Comm> inner_;
  const std::shared_ptr<Staging> staging_;
  const int64_t least_chunk_bytes_;
  std::vector<Sends> sends_;
};

class EngineOfLanes final : public StagedEngine {
 public:
  EngineOfLanes(comm::Engine& inner, std::shared_ptr<Staging> staging, int64_t least_chunk_bytes)
      : inner_(inner), staging_(std::move(staging)), least_chunk_bytes_(least_chunk_bytes) {}
  int64_t pinned_bytes() const override { return staging_->pinned_bytes(); }
  int64_t world_rank() const override { return inner_.world_rank(); }
  int64_t world_size() const override { return inner_.world_size(); }
  bool keeps_rank_order() const override { return inner_.keeps_rank_order(); }
  Result<std::unique_ptr<Comm>> group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    RT_TRY_SET(std::unique_ptr<Comm> made, inner_.group(axis, world_ranks));
    if (made->size() == 1) return made;  // one rank moves nothing
    return std::unique_ptr<Comm>(std::make_unique<StagedComm>(std::move(made), staging_, least_chunk_bytes_));
  }
  /// For numbers of the host: as they are.
  Result<std::unique_ptr<Comm>> exact_group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    return inner_.exact_group(axis, world_ranks);
  }
  void abort(std::string_view reason) override { inner_.abort(reason); }
  void give_up(ErrorCode code, std::string_view reason) override { inner_.give_up(code, reason); }
  void at(int64_t step, std::string_view phase) override { inner_.at(step, phase); }

 private:
  comm::Engine& inner_;
  const std::shared_ptr<Staging> staging_;
  const int64_t least_chunk_bytes_;
};

}  // namespace

Result<std::unique_ptr<StagedEngine>> make_staged_engine(comm::Engine& inner, CudaStream& rank,
                                                         std::function<bool(const void*)> on_device,
                                                         const StagingRooms& rooms, int64_t least_chunk_bytes) {
  RT_TRY_SET(std::shared_ptr<Staging> staging, Staging::make(rank, std::move(on_device), rooms));
  return std::unique_ptr<StagedEngine>(std::make_unique<EngineOfLanes>(inner, std::move(staging), least_chunk_bytes));
}

}  // namespace cairn::cuda
