// Communication of a device's arrays through the host's memory (runtime/cuda/staged). One rank has its arrays on a
// device that is a double, its peer in the host's memory, so that the peer's results are those of the engine beneath;
// and calls of the runtime come in the same order each time.

#include "runtime/cuda/staged/staged_engine.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/lane.h"
#include "runtime/comm/thread_world.h"
#include "runtime/cuda/arena.h"
#include "runtime/device/host_numbers.h"
#include "runtime/kernels/cuda/maps.h"
#include "tests/runtime/cuda/cuda_machine.h"
#include "tests/support/ok.h"

using namespace cairn;
using cairn::testing::CudaMachine;

namespace {

constexpr int64_t kRanks = 2, kPerRank = 768, kCount = kRanks * kPerRank;
constexpr int64_t kPart = kPerRank * 4, kBytes = kCount * 4;
constexpr int kArrays = 4;
constexpr uint64_t kSeeds = 24;

/// A rank's arrays of kCount floats, where it has them.
class Arrays {
 public:
  virtual ~Arrays() = default;
  virtual DevicePtr<float> at(int array) = 0;
  virtual void scale(int array, float by) = 0;
  virtual void add(int to, int from) = 0;
  virtual Stream& stream() = 0;
};

class OnHost final : public Arrays {
 public:
  explicit OnHost(float first) {
    for (int k = 0; k < kArrays; ++k) {
      arrays_.emplace_back(kCount);
      std::iota(arrays_.back().begin(), arrays_.back().end(), first + static_cast<float>(k));
    }
  }
  DevicePtr<float> at(int array) override { return DevicePtr<float>(values(array).data()); }
  void scale(int array, float by) override {
    for (float& x : values(array)) x *= by;
  }
  void add(int to, int from) override {
    for (size_t i = 0; i < kCount; ++i) values(to)[i] += values(from)[i];
  }
  Stream& stream() override { return *stream_; }
  std::vector<float>& values(int array) { return arrays_[static_cast<size_t>(array)]; }

 private:
  const std::unique_ptr<Stream> stream_ = make_cpu_stream();
  std::vector<std::vector<float>> arrays_;
};

class OnDouble final : public Arrays {
 public:
  OnDouble(const std::shared_ptr<cuda::Context>& context, float first)
      : arena_(cuda::Arena::reserve(context, kArrays * kBytes).value()), stream_(cuda::CudaStream::make(context)) {
    OnHost same(first);
    for (int k = 0; k < kArrays; ++k) {
      arrays_.push_back(Buffer::allocate(context->device(), kBytes).value());
      stream_->give(std::span<const float>(same.values(k)), at(k));
    }
  }
  ~OnDouble() override { ignore(stream_->settle(), "its work is in memory that goes"); }
  DevicePtr<float> at(int array) override { return arrays_[static_cast<size_t>(array)].at<float>(); }
  void scale(int array, float by) override {
    kernels::cuda::Queue queue{stream_->handle()};
    kernels::cuda::scale_floats(queue, at(array).address(), by, kCount);
    stream_->keep(queue.error, "launch");
  }
  void add(int to, int from) override {
    kernels::cuda::Queue queue{stream_->handle()};
    kernels::cuda::add_to(queue, at(to).address(), at(from).address(), kCount);
    stream_->keep(queue.error, "launch");
  }
  cuda::CudaStream& stream() override { return *stream_; }
  bool holds(const void* place) const { return arena_->holds(place); }
  Result<std::vector<float>> values(int array) {
    HostNumbers<float> numbers(*stream_, kCount);
    stream_->copy(numbers.room().data(), at(array).address(), kBytes, cuda::kToHost);
    RT_TRY(stream_->settle());
    return std::vector<float>(numbers.read().begin(), numbers.read().end());
  }

 private:
  const std::unique_ptr<cuda::Arena> arena_;
  std::vector<Buffer> arrays_;
  const std::unique_ptr<cuda::CudaStream> stream_;
};

/// Each operation, with work on the arrays before and behind. `late`: what this rank does before each.
Status talk(comm::Engine& engine, Arrays& arrays, int rounds, const std::function<void()>& late) {
  using comm::ReduceOp;
  RT_TRY_SET(auto group, engine.group("dp", {0, 1}));
  RT_TRY_SET(auto beside, engine.group("shard", {0, 1}));
  comm::Comm& comm = *group;
  const int64_t me = comm.rank(), other = 1 - me;
  comm::Lane lane(arrays.stream(), false);
  // Before each operation its arrays change, and behind it what it gave is read and changed, so that each order is
  // needed. The last array keeps all that was seen.
  for (int round = 0; round < rounds; ++round) {
    arrays.scale(0, 0.5f);
    late();
    RT_TRY(comm.all_reduce(arrays.at(0), kCount, DType::kF32, ReduceOp::kSum, "sums"));
    arrays.add(3, 0);
    arrays.scale(0, 0.25f);
    late();
    RT_TRY(comm.reduce_scatter(arrays.at(0), arrays.at(0) + me * kPerRank, kPerRank, DType::kF32, ReduceOp::kSum,
                               "in place"));
    arrays.add(3, 0);
    arrays.scale(0, 0.75f);
    late();
    RT_TRY(comm.all_gather(arrays.at(0) + me * kPerRank, arrays.at(0), kPart, "in place"));
    arrays.add(3, 0);
    arrays.add(1, 0);
    late();
    RT_TRY(comm.reduce_scatter_add(arrays.at(1), arrays.at(2), kPerRank, DType::kF32, 1, "added"));
    arrays.add(3, 2);
    arrays.scale(2, 0.5f);
    arrays.scale(1, 0.5f);
    late();
    RT_TRY(comm.all_gather(arrays.at(1), arrays.at(0), kPart, "elsewhere"));
    arrays.add(3, 0);
    arrays.scale(0, 0.5f);
    arrays.scale(1, 0.75f);
    const comm::OutPart out = comm::OutPart::of(other, arrays.at(1), kPart);
    const comm::InPart in = comm::InPart::of(other, arrays.at(1) + kPerRank, kPart);
    late();
    RT_TRY(comm.all_to_all({&out, 1}, {&in, 1}, "parts"));
    arrays.add(3, 1);
    arrays.add(2, 1);
    // On a lane, beside the rank's own.
    const auto ticket = lane.submit([&] {
      late();
      return beside->all_reduce(arrays.at(2), kCount, DType::kF32, ReduceOp::kSum, "beside");
    });
    arrays.scale(1, 0.5f);
    RT_TRY(lane.wait(ticket));
    arrays.add(3, 2);
    arrays.scale(2, 0.5f);
    // Messages, each larger than the channel: so one rank receives first.
    const auto send = [&]() -> Status {
      for (int message = 0; message < 3; ++message) {
        late();
        arrays.scale(0, 0.5f);
        RT_TRY(comm.isend(arrays.at(0), kBytes, other, "a message"));
        RT_TRY(comm.wait_sends_to(other, 0, "room"));
        arrays.scale(0, 0.75f);
      }
      return comm.wait_sends("end");
    };
    if (me == 0) RT_TRY(send());
    for (int message = 0; message < 3; ++message) {
      late();
      arrays.add(3, 2);
      RT_TRY(comm.recv(arrays.at(2), kBytes, other, "a message"));
      arrays.add(0, 2);
    }
    arrays.add(3, 0);
    if (me == 1) RT_TRY(send());
    RT_TRY(comm.barrier("end"));
  }
  return {};
}

struct Talked {
  std::string error;
  std::vector<std::vector<float>> arrays;  // rank 0's
  int64_t pinned = 0, pinned_at_first = 0;
  int64_t edges = 0, waits = 0;
  std::vector<std::string> misuses, left;
};

comm::ShmWorldConfig small_channels() { return {.world_size = kRanks, .channel_bytes = 2048, .staging_bytes = 16384}; }

/// A rank comes late to each operation, so that who does not wait for it goes wrong; or early, so that what it brings
/// is there before there is room for it.
std::function<void()> late_if(bool late) {
  return [late] {
    if (late) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
}

/// Both on the host.
std::vector<std::vector<float>> expected(int rounds) {
  comm::ThreadWorld world(small_channels(), {.deadline_ms = 20000});
  OnHost mine(1), peers(5);
  const auto engine = world.engine(0);
  Status theirs_done;
  std::thread peer([&, theirs = world.engine(1)] { theirs_done = talk(*theirs, peers, rounds, [] {}); });
  const Status done = talk(*engine, mine, rounds, [] {});
  peer.join();
  REQUIRE_OK(done);
  REQUIRE_OK(theirs_done);
  std::vector<std::vector<float>> out;
  for (int k = 0; k < kArrays; ++k) out.push_back(mine.values(k));
  return out;
}

struct Plant {
  int rounds = 1;
  int64_t dropped_edge = -1;
  bool peer_dies = false, without_words = false;
  int words_refused = 0;  // a CUresult
  StagingRooms rooms = {};
};

Talked on_double(uint64_t seed, const Plant& plant) {
  Talked out;
  CudaMachine machine(seed);
  {
    comm::ThreadWorld world(small_channels(), {.deadline_ms = 20000});
    OnHost peers(5);
    const auto engine = world.engine(0);
    std::thread peer([&, theirs = world.engine(1)]() mutable {
      int calls = 0;
      ignore(talk(*theirs, peers, plant.rounds,
                  [&, late = late_if(seed / 2 % 2 == 0)] {
                    late();
                    if (plant.peer_dies && ++calls == 3) theirs->abort("the peer dies");
                  }),
             "it ends as the other one does");
    });
    {
      OnDouble mine(machine.open(), 1);
      if (plant.without_words) machine.runtime.without_words();
      machine.runtime.refuse_words(plant.words_refused);
      auto staged = cuda::make_staged_engine(
          *engine, mine.stream(), [&](const void* at) { return mine.holds(at); }, plant.rooms);
      if (!staged.ok()) {
        out.error = staged.error().message;
        engine->abort("the test ends");
      } else {
        CHECK(mine.stream().settle().ok());
        out.pinned_at_first = staged.value()->pinned_bytes();
        machine.cuda.take_counts();
        simt::StreamDouble::take_own_waits();
        const int64_t before = machine.runtime.edges();
        machine.runtime.drop_edge(plant.dropped_edge);
        // The device goes on by itself while the host is at something else.
        std::atomic<bool> over = false;
        std::thread device([&] {
          simt::StreamDouble::Event* event = nullptr;
          CHECK(machine.cuda.create_event(&event) == 0);
          while (!over && seed / 4 % 2 == 0) {
            for (int piece = 0; piece < 3; ++piece) machine.cuda.query(event);
            std::this_thread::sleep_for(std::chrono::microseconds(20));
          }
          CHECK(machine.cuda.destroy_event(event) == 0);
        });
        Status done = talk(*staged.value(), mine, plant.rounds, late_if(seed / 2 % 2 == 1));
        out.waits = simt::StreamDouble::take_own_waits();
        out.pinned = staged.value()->pinned_bytes();
        if (done.ok()) done = mine.stream().settle();
        out.edges = machine.runtime.edges() - before;
        over = true;
        device.join();
        for (int k = 0; k < kArrays && done.ok(); ++k) {
          auto values = mine.values(k);
          if (values.ok()) {
            out.arrays.push_back(std::move(values).value());
          } else {
            done = values.error();
          }
        }
        if (!done.ok()) {
          out.error = done.error().message;
          engine->abort("the test ends");
        }
      }
    }
    peer.join();
  }
  out.misuses = machine.cuda.misuses();
  out.left = machine.cuda.left();
  return out;
}

void check_same(const std::vector<std::vector<float>>& got, const std::vector<std::vector<float>>& wanted) {
  REQUIRE(got.size() == wanted.size());
  for (size_t array = 0; array < wanted.size(); ++array) {
    const auto at = std::ranges::mismatch(got[array], wanted[array]);
    CAPTURE(array);
    CAPTURE(at.in1 - got[array].begin());
    CHECK_MESSAGE(at.in1 == got[array].end(), (at.in1 == got[array].end() ? 0 : *at.in1), " instead of ",
                  (at.in2 == wanted[array].end() ? 0 : *at.in2));
  }
}

}  // namespace

TEST_SUITE("runtime/cuda/train/staged") {
  TEST_CASE("each operation on a device's arrays gives what the engine beneath gives, and the host waits for none") {
    const auto wanted = expected(2);
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      CAPTURE(seed);
      const Talked got = on_double(seed, {.rounds = 2});
      CHECK(got.error == "");
      check_same(got.arrays, wanted);
      CHECK(got.waits <= 5);  // of the end of the lane and of both groups
      CHECK(got.misuses == std::vector<std::string>());
      CHECK(got.left == std::vector<std::string>());
    }
  }

  TEST_CASE("each edge between streams, and each wait for the host, shows under some seed when it is dropped") {
    const auto wanted = expected(1);
    const int64_t edges = on_double(0, {}).edges;
    CHECK(edges > 30);
    for (int64_t dropped = 0; dropped < edges; ++dropped) {
      CAPTURE(dropped);
      bool seen = false;
      for (uint64_t seed = 0; seed < kSeeds && !seen; ++seed)
        seen = on_double(seed, {.dropped_edge = dropped}).arrays != wanted;
      CHECK(seen);
    }
  }

  TEST_CASE("rooms that are large enough are all that is pinned; what does not fit pins more, and is right too") {
    // The largest: sums with what they are added to; the lane's; three messages one after another, of which one is
    // under way at a time.
    const StagingRooms rooms{.own_bytes = kBytes + kPart, .lane_bytes = kBytes, .messages = 1, .message_bytes = kBytes};
    const auto wanted = expected(1);
    const Talked fits = on_double(2, {.rooms = rooms});
    CHECK(fits.error == "");
    CHECK(fits.pinned_at_first == rooms.total_bytes());
    CHECK(fits.pinned == rooms.total_bytes());
    check_same(fits.arrays, wanted);
    for (const auto& [without, least] :
         {std::pair(StagingRooms{.own_bytes = kBytes, .lane_bytes = kBytes, .messages = 1, .message_bytes = kBytes},
                    kPart),
          {StagingRooms{.own_bytes = kBytes + kPart, .messages = 1, .message_bytes = kBytes}, kBytes},
          {StagingRooms{.own_bytes = kBytes + kPart, .lane_bytes = kBytes}, kBytes}}) {
      const Talked grows = on_double(2, {.rooms = without});
      CHECK(grows.error == "");
      CHECK(grows.pinned_at_first == without.total_bytes());
      CHECK(grows.pinned >= without.total_bytes() + least);
      check_same(grows.arrays, wanted);
    }
  }

  TEST_CASE("a peer that is lost is told where the stream is settled or asked again, and nothing hangs or is left") {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      CAPTURE(seed);
      const Talked got = on_double(seed, {.peer_dies = true});
      CHECK(got.error.find("the peer dies") != std::string::npos);
      CHECK(got.left == std::vector<std::string>());
    }
  }

  TEST_CASE(
      "a driver without waits for words of the host, or that refuses them, is refused before the first operation") {
    const std::string where = "communication through the host's memory: cuda:0: ";
    const Talked without = on_double(0, {.without_words = true});
    CHECK(without.error == where + "the driver has no cuStreamWaitValue32");
    CHECK(without.left == std::vector<std::string>());
    const Talked refused = on_double(0, {.words_refused = 801});
    CHECK(refused.error == where + "the driver refuses cuStreamWaitValue32: refused by the double (CUresult 801)");
    CHECK(refused.left == std::vector<std::string>());
  }
}
