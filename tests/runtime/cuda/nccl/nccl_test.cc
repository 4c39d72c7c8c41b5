// NCCL's engine on doubles: the order of what it asks for, and what becomes of ranks that do not come.
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <algorithm>
#include <climits>
#include <numeric>
#include <optional>
#include <string>
#include <thread>

#include "runtime/comm/call_group.h"
#include "runtime/comm/early_receiver.h"
#include "runtime/comm/ordered_on.h"
#include "runtime/comm/side_sums.h"
#include "runtime/core/random.h"
#include "tests/runtime/comm/fabric.h"
#include "tests/runtime/cuda/nccl/nccl_rank.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::comm;
using namespace cairn::comm::testing;
using cuda::testing::NcclRank;
using cuda::testing::RankOptions;
using cuda::testing::Ranks;

namespace {

constexpr int64_t kRanks = 2, kPerRank = 640, kCount = kRanks * kPerRank, kPart = kPerRank * 4, kBytes = kCount * 4;

/// What a test does to a rank, once it is there.
using Plant = std::function<void(NcclRank&)>;
/// Some arrays of kCount floats.
class Arrays {
 public:
  static constexpr int kArrays = 4;

  explicit Arrays(NcclRank& rank) : rank_(rank) {
    for (int k = 0; k < kArrays; ++k) {
      at_[k] = reinterpret_cast<float*>(rank.take(kBytes));
      std::vector<float> first(kCount);
      std::iota(first.begin(), first.end(), static_cast<float>(10 * rank.engine().world_rank() + k));
      rank.stream().copy(at_[k], first.data(), kBytes, cuda::kToDevice);
    }
  }
  ~Arrays() {
    ignore(rank_.stream().settle(), "told by who settled it first");
    for (float* const at : at_) rank_.give_back(reinterpret_cast<std::byte*>(at), kBytes);
  }
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  float* at(int k) const { return at_[k]; }
  /// x := by x + k, as a kernel of the stream.
  void change(int k, float by) {
    float* const x = at_[k];
    rank_.cuda.launch(rank_.stream().handle(), [=] {
      for (int64_t i = 0; i < kCount; ++i) x[i] = x[i] * by + static_cast<float>(k);
    });
  }
  void add(int to, int from) {
    float *const x = at_[to], *const y = at_[from];
    rank_.cuda.launch(rank_.stream().handle(), [=] {
      for (int64_t i = 0; i < kCount; ++i) x[i] += y[i];
    });
  }
  /// A number that stands for all of their bits.
  Result<uint64_t> told() {
    uint64_t out = 0;
    for (float* const at : at_) {
      std::vector<uint32_t> values(kCount);
      rank_.stream().copy(values.data(), at, kBytes, cuda::kToHost);
      RT_TRY(rank_.stream().settle());
      for (const uint32_t value : values) out = mix64(out ^ value);
    }
    return out;
  }

 private:
  NcclRank& rank_;
  float* at_[kArrays] = {};
};

/// Each operation, with work on the arrays before and behind, so that each order is needed.
Status talk(NcclRank& rank, Arrays& arrays) {
  RT_TRY_SET(auto group, rank.engine().group("dp", {0, 1}));
  Comm& comm = *group;
  const int64_t me = comm.rank(), other = 1 - me;
  arrays.change(0, 0.5f);
  RT_TRY(comm.all_reduce(arrays.at(0), kCount, DType::kF32, ReduceOp::kSum, "sums"));
  arrays.add(3, 0);
  arrays.change(0, 0.25f);
  RT_TRY(comm.reduce_scatter(arrays.at(0), arrays.at(0) + me * kPerRank, kPerRank, DType::kF32, ReduceOp::kSum, "own"));
  arrays.add(3, 0);
  RT_TRY(comm.all_gather(arrays.at(0) + me * kPerRank, arrays.at(0), kPart, "in place"));
  arrays.add(1, 0);
  RT_TRY(comm.reduce_scatter_add(arrays.at(1), arrays.at(2), kPerRank, DType::kF32, 1, "added"));
  arrays.add(3, 2);
  arrays.change(1, 0.75f);
  const OutPart out[] = {{other, arrays.at(1), kPart}};
  const InPart in[] = {{other, arrays.at(1) + kPerRank, kPart}};
  RT_TRY(comm.all_to_all(out, in, "parts"));
  arrays.add(3, 1);
  RT_TRY(comm.broadcast(arrays.at(2), kBytes, 1, "from the second"));
  arrays.add(3, 2);
  for (int message = 0; message < 3; ++message) {
    arrays.change(0, 0.5f);
    RT_TRY(comm.isend(arrays.at(0), kBytes, other, "a message"));
    arrays.add(3, 1);
    RT_TRY(comm.recv(arrays.at(1), kBytes, other, "a message"));
    arrays.add(2, 1);
    RT_TRY(comm.wait_sends_to(other, 0, "room"));
    arrays.change(0, 0.75f);  // the buffer that was sent
    arrays.add(0, 1);
  }
  // A message that comes in while the rank computes.
  auto& early = dynamic_cast<EarlyReceiver&>(comm);
  RT_TRY(comm.isend(arrays.at(3), kBytes, other, "a message"));
  RT_TRY(early.receive_early(DevicePtr<void>(arrays.at(1)), kBytes, other, "a message"));
  arrays.add(2, 0);
  RT_TRY(early.take_early(other, "a message"));
  arrays.add(2, 1);
  RT_TRY(comm.wait_sends_to(other, 0, "room"));
  arrays.change(3, 0.25f);
  RT_TRY(comm.isend(arrays.at(0), kPart, me, "to itself"));
  RT_TRY(comm.recv(arrays.at(2), kPart, me, "to itself"));
  RT_TRY(comm.wait_sends("end"));
  arrays.change(0, 0.5f);
  return rank.stream().settle();
}

/// "bits edges" of each rank, or what went wrong there.
std::vector<std::string> talked(RankOptions options, const Plant& plant = {}) {
  options.device_runs = options.seed / 2 % 2 == 0;  // else all is done where the host waits
  Ranks ranks(kRanks, options, [&](NcclRank& rank) -> std::string {
    std::string told;
    {
      Arrays arrays(rank);
      EXPECT_OK(rank.stream().settle());
      const int64_t before = rank.runtime.edges();
      if (plant) plant(rank);
      EXPECT_OK(talk(rank, arrays));
      const int64_t edges = rank.runtime.edges() - before;
      EXPECT_SET(const uint64_t bits, arrays.told());
      told = fmt::format("{} {}", bits, edges);
    }
    const std::string wrong = rank.finish();
    return wrong.empty() ? told : wrong;
  });
  return ranks.join();
}

const std::function<bool(int64_t)> all_register = [](int64_t) { return true; };

std::string bits_of(const std::string& told) { return told.substr(0, told.find(' ')); }

}  // namespace

TEST_SUITE("runtime/cuda/nccl") {
  TEST_CASE("what a device is asked for comes in the right order, whatever comes late") {
    const auto wanted = talked({.seed = 0});
    REQUIRE(wanted.size() == kRanks);
    CHECK(std::stoll(wanted[0].substr(wanted[0].find(' '))) > 10);
    for (uint64_t seed = 1; seed < 16; ++seed) {
      CAPTURE(seed);
      const auto got = talked({.seed = seed});
      for (size_t r = 0; r < kRanks; ++r) CHECK(got[r] == wanted[r]);
    }
  }

  TEST_CASE("each edge between streams is needed: without it some seed gives other bits") {
    const auto wanted = talked({.seed = 0});
    const int64_t edges = std::stoll(wanted[0].substr(wanted[0].find(' ')));
    bool seen[4] = {};                  // of each message: before and behind a send, before and behind a receive
    constexpr int64_t kOfFirstUse = 4;  // when the group is made, with nothing in the messages
    for (int64_t dropped = kOfFirstUse; dropped < edges; ++dropped) {
      CAPTURE(dropped);
      bool& of_kind = seen[dropped % 4];
      for (uint64_t seed = 0; seed < 64 && !of_kind; ++seed) {
        const auto got = talked({.seed = seed, .deadline_ms = 2000}, [&](NcclRank& rank) {
          if (rank.engine().world_rank() == 0) rank.runtime.drop_edge(dropped);
        });
        for (size_t r = 0; r < kRanks; ++r) of_kind = of_kind || bits_of(got[r]) != bits_of(wanted[r]);
      }
    }
    for (const bool of_kind : seen) CHECK(of_kind);
  }

  TEST_CASE("a sum beside the rank's own has its bits, whatever the rank and a lane sum meanwhile") {
    const auto summed = [](uint64_t seed, bool beside) {
      return Ranks(kRanks, {.seed = seed, .device_runs = seed % 2 == 0},
                   [&](NcclRank& rank) -> std::string {
                     std::string told;
                     {
                       Arrays arrays(rank);
                       EXPECT_SET(auto tp, rank.engine().group("tp", {0, 1}));
                       EXPECT_SET(auto dp, rank.engine().group("dp", {0, 1}));
                       EXPECT_SET(auto ep, rank.engine().group("ep", {0, 1}));
                       const std::unique_ptr<Stream> lane = rank.stream().beside();
                       auto& side = dynamic_cast<comm::SideSums&>(*tp);
                       const auto sum = [&](Comm& comm, int at) {
                         return comm.all_reduce(arrays.at(at), kCount, DType::kF32, ReduceOp::kSum, "sums");
                       };
                       for (int k = 0; k < 3; ++k) arrays.change(k, 0.5f);
                       if (beside) {
                         EXPECT_OK(side.sum_beside(DevicePtr<void>(arrays.at(0)), kCount, DType::kF32, "sums"));
                         lane->follow(rank.stream().mark());
                         {
                           const comm::OrderedOn on(*lane);
                           EXPECT_OK(sum(*dp, 1));
                         }
                         arrays.change(3, 0.25f);
                         EXPECT_OK(sum(*ep, 2));  // on the rank's own stream, before it has joined the sums beside it
                         EXPECT_OK(side.join_sums());
                         rank.stream().follow(lane->mark());
                       } else {
                         for (const auto& [comm, at] : {std::pair(tp.get(), 0), {dp.get(), 1}, {ep.get(), 2}}) {
                           EXPECT_OK(sum(*comm, at));
                         }
                         arrays.change(3, 0.25f);
                       }
                       for (const int at : {0, 1, 2}) arrays.add(3, at);
                       EXPECT_OK(rank.stream().settle());
                       EXPECT_SET(const uint64_t bits, arrays.told());
                       told = std::to_string(bits);
                     }
                     const std::string wrong = rank.finish();
                     return wrong.empty() ? told : wrong;
                   })
          .join();
    };
    const auto wanted = summed(0, false);
    for (uint64_t seed = 0; seed < 32; ++seed) {
      CAPTURE(seed);
      CHECK(summed(seed, true) == wanted);
    }
  }

  TEST_CASE("a sum beside the rank's stream waits for the other rank; the rank's own work does not") {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      CAPTURE(seed);
      const auto got = Ranks(kRanks, {.seed = seed, .deadline_ms = 2000}, [&](NcclRank& rank) -> std::string {
                         {
                           Arrays arrays(rank);
                           EXPECT_SET(auto tp, rank.engine().group("tp", {0, 1}));
                           auto& side = dynamic_cast<comm::SideSums&>(*tp);
                           const auto begin = [&] {
                             return side.sum_beside(DevicePtr<void>(arrays.at(0)), kCount, DType::kF32, "sums");
                           };
                           const bool first = tp->rank() == 0;
                           if (first) EXPECT_OK(begin());
                           arrays.change(1, 0.5f);
                           EXPECT_OK(rank.stream().settle_at(rank.stream().mark()));
                           EXPECT_OK(tp->barrier("the first has done its own work"));
                           if (!first) EXPECT_OK(begin());
                           EXPECT_OK(side.join_sums());
                           EXPECT_OK(rank.stream().settle());
                         }
                         return rank.finish();
                       }).join();
      CHECK(got == std::vector<std::string>(kRanks, ""));
    }
  }

  TEST_CASE("gathers of a group are launched at once, before anything else that is asked for; the bits are the same") {
    std::vector<std::string> wanted;
    for (const bool together : {false, true}) {
      for (uint64_t seed = 0; seed < 8; ++seed) {
        CAPTURE(together);
        CAPTURE(seed);
        const auto got =
            Ranks(kRanks, {.seed = seed, .device_runs = seed % 2 == 0}, [&](NcclRank& rank) -> std::string {
              std::string told;
              {
                Arrays arrays(rank);
                EXPECT_SET(auto dp, rank.engine().group("dp", {0, 1}));
                EXPECT_SET(auto ep, rank.engine().group("ep", {0, 1}));
                const int64_t me = dp->rank(), before = rank.nccl.launches();
                arrays.change(0, 0.5f);
                {
                  std::optional<comm::CallGroup> group;
                  if (together) group.emplace();
                  for (const int64_t at : {0, 1}) {
                    EXPECT_OK(dp->all_gather(arrays.at(at) + me * kPerRank, arrays.at(at), kPart, "weights"));
                  }
                  EXPECT_OK(ep->all_gather(arrays.at(2) + me * kPerRank, arrays.at(2), kPart, "weights"));
                  EXPECT(rank.nccl.launches() - before == (together ? 0 : 3));
                  if (group) EXPECT_OK(group->end());
                }
                EXPECT(rank.nccl.launches() - before == (together ? 1 : 3));
                for (const int64_t at : {0, 1, 2}) arrays.add(3, at);
                {  // an operation that is none of the group comes behind what is held
                  std::optional<comm::CallGroup> group;
                  if (together) group.emplace();
                  EXPECT_OK(dp->all_gather(arrays.at(3) + me * kPerRank, arrays.at(3), kPart, "weights"));
                  EXPECT_OK(dp->all_reduce(arrays.at(3), kCount, DType::kF32, ReduceOp::kSum, "sums"));
                  if (group) EXPECT_OK(group->end());
                }
                EXPECT_OK(rank.stream().settle());
                EXPECT_SET(const uint64_t bits, arrays.told());
                told = std::to_string(bits);
              }
              const std::string wrong = rank.finish();
              return wrong.empty() ? told : wrong;
            }).join();
        if (wanted.empty()) wanted = got;
        CHECK(got == wanted);
      }
    }
  }

  TEST_CASE("in registered memory the bits are the same; each communicator of a group has it until it is closed") {
    const auto wanted = talked({.seed = 0});
    for (uint64_t seed = 0; seed < 4; ++seed) {
      CAPTURE(seed);
      CHECK(talked({.seed = seed, .registers = all_register}) == wanted);
    }
    const auto results =
        Ranks(kRanks, {.seed = 2, .room_bytes = 3 << 20, .registers = all_register}, [](NcclRank& rank) -> std::string {
          {
            Arrays arrays(rank);
            EXPECT(rank.nccl.registered() == 0);
            EXPECT_SET(auto group, rank.engine().group("dp", {0, 1}));
            EXPECT(rank.nccl.registered() == 3);  // of all, of messages there and back; the world's moves nothing
            EXPECT(rank.nccl.registrations_left() == 3);
            const int64_t used = rank.nccl.in_registered(), mapped = rank.nccl.mapped();
            EXPECT(used == 5);    // of first use
            EXPECT(mapped == 3);  // nothing of it is left for later
            EXPECT_OK(group->all_gather(arrays.at(0), arrays.at(1), kPart, "x"));
            EXPECT_OK(rank.stream().settle());
            EXPECT(rank.nccl.in_registered() == used + 1);
            EXPECT(rank.nccl.mapped() == mapped);
            group.reset();
            EXPECT(rank.nccl.registrations_left() == 0);
          }
          return rank.finish();
        }).join();
    CHECK(results == std::vector<std::string>(kRanks, ""));
  }

  TEST_CASE("what a program does wrong with registered memory is told") {
    using Body = std::function<std::string(NcclRank&)>;
    const Body group = [](NcclRank& rank) -> std::string {
      auto made = rank.engine().group("dp", {0, 1});
      if (made.ok()) made.value().reset();
      return rank.finish();
    };
    const RankOptions registered{.seed = 2, .deadline_ms = 400, .registers = all_register};
    const auto says = [&](const std::string& what, const RankOptions& options, const Body& body) {
      const auto got = Ranks(kRanks, options, body).join();
      CAPTURE(what);
      CAPTURE(got[0]);
      CAPTURE(got[1]);
      CHECK((got[0].find(what) != std::string::npos || got[1].find(what) != std::string::npos));
    };
    says("communicator 1 (rank 0 of 2) is finalized with memory registered", registered, [&](NcclRank& rank) {
      rank.nccl.without_deregistering();
      return group(rank);
    });
    RankOptions wrong = registered;
    wrong.of_cuda = true;
    says("registers memory that is not NCCL's: it is not used", wrong, group);
    wrong = registered;
    wrong.registers = [](int64_t rank) { return rank == 1; };
    says("its collective 0 is all_gather of 32768 of type 1, root 0, registered, rank 0 has another", wrong, group);
    says("in memory that is not registered, where other memory is", registered, [](NcclRank& rank) -> std::string {
      void* other = nullptr;
      RT_CHECK(rank.cuda.allocate(&other, kBytes) == 0);
      {
        EXPECT_SET(auto made, rank.engine().group("dp", {0, 1}));
        EXPECT_OK(made->broadcast(other, kBytes, 0, "x"));
        EXPECT_OK(rank.stream().settle());
      }
      rank.cuda.free(other);
      return rank.finish();
    });
  }

  TEST_CASE("an arena of NCCL's memory takes whole pieces of it and is refused where it could not be registered") {
    simt::StreamDouble cuda(2, int64_t{16} << 20);
    simt::CudaApi runtime(cuda);
    simt::NcclSegment segment;
    simt::NcclDouble nccl(cuda, segment, 2);
    auto opened = cuda::Context::open(runtime.api(), 0);
    REQUIRE_OK(opened);
    const std::shared_ptr<cuda::Context> context = std::move(opened).value();
    const auto reserve = [&](int64_t bytes) { return cuda::Arena::reserve(context, bytes, &nccl.api()); };
    {
      const auto arena = reserve((int64_t{2} << 20) + 1);
      REQUIRE_OK(arena);
      CHECK(arena.value()->bytes() == int64_t{4} << 20);
      CHECK(arena.value()->bytes() == cuda::Arena::reserved_for((int64_t{2} << 20) + 1, true));
      CHECK(cuda.range_of(arena.value()->all().first.address()).is_mapped);
    }
    const auto refusal = [&](int64_t bytes) {
      const auto arena = reserve(bytes);
      return arena.ok() ? std::string() : arena.error().message;
    };
    CHECK(refusal(int64_t{18} << 20) ==
          "18874368 bytes on cuda:0: ncclMemAlloc: refused by the double: nothing more is known");
    nccl.allocate_in_pieces_of(int64_t{8} << 20);
    CHECK(refusal(1000) ==
          "2097152 bytes on cuda:0: ncclMemAlloc: it took 8388608 bytes, 2097152 were planned in pieces of 2097152; do "
          "without: --comm nccl");
    ::setenv("NCCL_CUMEM_ENABLE", "0", 1);
    const std::string without = refusal(1000);
    ::unsetenv("NCCL_CUMEM_ENABLE");
    CHECK(without.find("it gave memory of cudaMalloc, in which NCCL registers nothing: NCCL_CUMEM_ENABLE=0") !=
          std::string::npos);
    CHECK(cuda.left() == std::vector<std::string>());
    CHECK(cuda.misuses() == std::vector<std::string>());
    CHECK(nccl.misuses() == std::vector<std::string>());
  }

  TEST_CASE("where NCCL registers nothing ranks that asked for it are told so") {
    ::setenv("NCCL_LOCAL_REGISTER", "0", 1);
    const auto got = talked({.seed = 2, .registers = all_register});
    ::unsetenv("NCCL_LOCAL_REGISTER");
    for (const std::string& told : got) {
      CHECK(told.find("dp[0,1]: ncclCommRegister: NCCL registers nothing: NCCL_LOCAL_REGISTER=0") != std::string::npos);
    }
  }

  TEST_CASE("ranks that call in another order are told apart by the double, and the deadline ends them") {
    const auto got = talked({.seed = 2, .deadline_ms = 400}, [](NcclRank& rank) {
      if (rank.engine().world_rank() == 0) rank.nccl.swap_calls(1);
    });
    for (const std::string& told : got) {
      CAPTURE(told);
      CHECK(told.find("dp[0,1].") != std::string::npos);
    }
  }

  TEST_CASE("messages that wait for each other outside of a group end at the deadline, with the operation's name") {
    const auto got = talked({.seed = 2, .deadline_ms = 400}, [](NcclRank& rank) { rank.nccl.without_groups(); });
    for (const std::string& told : got) {
      CAPTURE(told);
      CHECK(told.find("dp[0,1].first_use(") != std::string::npos);
    }
    CHECK(std::ranges::any_of(got, [](const std::string& told) {
      return told.find("not done after 400 ms on the device of rank ") != std::string::npos;
    }));
  }

  TEST_CASE("an error that NCCL finds beside any call ends the rank, and the others, with its name") {
    const auto results = Ranks(3, {.seed = 2}, [](NcclRank& rank) -> std::string {
                           EXPECT_SET(auto group, rank.engine().group("dp", {0, 1, 2}));
                           rank.engine().at(7, "optimizer");
                           if (rank.engine().world_rank() == 2) rank.nccl.fail(simt::kNcclRemoteError);
                           const double begin_ms = now_ms();
                           Status settled;
                           while (settled.ok() && now_ms() - begin_ms < 5000) {
                             std::this_thread::sleep_for(std::chrono::milliseconds(1));
                             settled = rank.stream().settle();
                           }
                           EXPECT(now_ms() - begin_ms < 1000);
                           group.reset();
                           const std::string wrong = rank.finish();
                           return wrong.empty() ? settled.error().message : wrong;
                         }).join();
    CHECK(results[2].find("NCCL: refused by the double: nothing more is known") != std::string::npos);
    for (const size_t r : {0, 1}) CHECK(results[r].find("rank 2: NCCL: refused by the double") != std::string::npos);
  }

  TEST_CASE("a rank that does not come is a timeout at the deadline, with operation and place, on every other rank") {
    constexpr int64_t kDeadlineMs = 300;
    for (uint64_t seed = 0; seed < 4; ++seed) {
      CAPTURE(seed);
      const Shared<double> stopped_ms;
      const RankOptions options{.seed = seed, .deadline_ms = kDeadlineMs, .host_name = "a-host"};
      Ranks ranks(3, options, [&](NcclRank& rank) -> std::string {
        std::string told;
        {
          EXPECT_SET(auto group, rank.engine().group("dp", {0, 1, 2}));
          Arrays arrays(rank);
          EXPECT_OK(group->all_reduce(arrays.at(0), kCount, DType::kF32, ReduceOp::kSum, "first"));
          EXPECT_OK(rank.stream().settle());
          EXPECT_OK(group->barrier("both"));
          rank.engine().at(12, "gradients");
          if (rank.engine().world_rank() == 1) ::raise(SIGSTOP);
          *stopped_ms = now_ms();
          EXPECT_OK(group->all_reduce(arrays.at(0), kCount, DType::kF32, ReduceOp::kSum, "gradients"));
          EXPECT_OK(group->all_gather(arrays.at(0), arrays.at(1), 8, "behind it"));
          const Status settled = rank.stream().settle();
          EXPECT(!settled.ok());
          EXPECT(now_ms() - *stopped_ms < kDeadlineMs + 1500);
          told = fmt::format("{} {}", error_code_name(settled.error().code), settled.error().message);
        }
        const std::string wrong = rank.finish();
        return wrong.empty() ? told : wrong;
      });
      const std::string stopped = fmt::format(
          "rank 1 (pid {}) is stopped; it was last seen outside of any operation, after "
          "dp[0,1,2].barrier(both)",
          ranks.processes.pid(1));
      const std::vector<std::string> told = {ranks.processes.join(0), ranks.processes.join(2)};
      ranks.processes.send_signal(1, SIGKILL);
      for (const std::string& one : told) {
        CAPTURE(one);
        CHECK(one.find("dp[0,1,2].all_reduce(gradients): not done after 300 ms on the device of rank ") !=
              std::string::npos);
        CHECK(one.find(" on a-host (operation 3 of its stream, step 12 (gradients)); " + stopped) != std::string::npos);
      }
      CHECK(std::ranges::any_of(told, [](const std::string& one) { return one.starts_with("timeout "); }));
    }
  }

  TEST_CASE("a rank that dies while the others wait for it on their devices is named by each of them, soon") {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      CAPTURE(seed);
      const Shared<double> killed_ms;
      const RankOptions options{.seed = seed, .registers = [&](int64_t) { return seed >= 2; }};
      Ranks ranks(3, options, [&](NcclRank& rank) -> std::string {
        std::string told;
        {
          EXPECT_SET(auto group, rank.engine().group("dp", {0, 1, 2}));
          Arrays arrays(rank);
          EXPECT(rank.nccl.registrations_left() == (seed >= 2 ? 5 : 0));
          EXPECT_OK(group->barrier("both"));
          if (rank.engine().world_rank() == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            *killed_ms = now_ms();
            ::raise(SIGKILL);
          }
          EXPECT_OK(group->all_reduce(arrays.at(0), kCount, DType::kF32, ReduceOp::kSum, "gradients"));
          const Status settled = rank.stream().settle();
          EXPECT(now_ms() - *killed_ms < 1000);
          told = fmt::format("{} {}", error_code_name(settled.error().code), settled.error().message);
        }
        const std::string wrong = rank.finish();
        return wrong.empty() ? told : wrong;
      });
      const std::string died = fmt::format(
          "dp[0,1,2].all_reduce(gradients): rank 1 (pid {}) died; it was last seen "
          "outside of any operation, after dp[0,1,2].barrier(both)",
          ranks.processes.pid(1));
      const std::vector<std::string> got = ranks.join();
      CHECK(got[1] == "signal 9");
      for (const size_t r : {0, 2}) {
        CAPTURE(got[r]);
        CHECK(got[r].starts_with("peer lost "));
        CHECK(got[r].find(died) != std::string::npos);
      }
    }
  }

  TEST_CASE("when the others give up a rank that waits on its device is told why at once") {
    Ranks ranks(2, {.seed = 2}, [&](NcclRank& rank) -> std::string {
      std::string told;
      {
        EXPECT_SET(auto group, rank.engine().group("dp", {0, 1}));
        Arrays arrays(rank);
        EXPECT_OK(group->barrier("both"));
        if (rank.engine().world_rank() == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          rank.engine().give_up(ErrorCode::kInternal, "rank 1: no memory");
          return "";
        }
        const double begin_ms = now_ms();
        EXPECT_OK(group->all_reduce(arrays.at(0), kCount, DType::kF32, ReduceOp::kSum, "gradients"));
        const Status settled = rank.stream().settle();
        EXPECT(now_ms() - begin_ms < 1000);
        told = fmt::format("{} {}", error_code_name(settled.error().code), settled.error().message);
        EXPECT(group->all_gather(arrays.at(0), arrays.at(1), 8, "after").error().code == ErrorCode::kPeerLost);
      }
      return told;
    });
    CHECK(ranks.join()[0] == "peer lost cuda:0: dp[0,1].all_reduce(gradients): rank 1: no memory");
  }

  TEST_CASE("groups of all ranks are split off the world's communicator, others have one of their own") {
    const auto results = Ranks(3, {.seed = 2}, [](NcclRank& rank) -> std::string {
                           {
                             const int64_t made = rank.nccl.made();
                             EXPECT(made == 1);
                             EXPECT_SET(auto all, rank.engine().group("dp", {2, 0, 1}));
                             EXPECT(rank.nccl.split() == 1);
                             EXPECT(rank.nccl.made() == made + 4);  // messages to and from two others
                             EXPECT(all->rank() == (rank.engine().world_rank() + 1) % 3);
                             EXPECT(rank.nccl.left() == rank.nccl.made() + rank.nccl.split());
                           }
                           return rank.finish();
                         }).join();
    CHECK(results == std::vector<std::string>(3, ""));
  }

  TEST_CASE("groups whose operations run beside compute take few blocks of the device, others what NCCL wants") {
    const RankOptions options{.seed = 2, .max_ctas = [](std::string_view axis) { return axis == "shard" ? 16 : 0; }};
    const auto results = Ranks(2, options, [](NcclRank& rank) -> std::string {
                           {
                             EXPECT_SET(auto tp, rank.engine().group("tp", {0, 1}));
                             EXPECT_SET(auto shard, rank.engine().group("shard", {0, 1}));
                             EXPECT(rank.nccl.split_blocks() == std::vector<int>{INT_MIN, 16});
                           }
                           return rank.finish();
                         }).join();
    CHECK(results == std::vector<std::string>(2, ""));
  }

  TEST_CASE("of ranks on two hosts a report names the host of each: who reports, who died, who cannot be seen") {
    for (const int signal : {SIGSTOP, SIGKILL}) {
      CAPTURE(signal);
      const WorldSpec spec{.size = 4, .deadline_ms = signal == SIGSTOP ? 500 : 20000};
      simt::NcclSegment segment;
      const auto names = [](int64_t rank) { return rank < 2 ? "one-host" : "other-host"; };
      Hosts world(
          spec, 2,
          [&](Engine& engine) -> std::string {
            EXPECT_SET(const auto group, engine.group("dp", {0, 1, 2, 3}));
            EXPECT_OK(group->barrier("all"));
            engine.at(12, "gradients");
            if (engine.world_rank() == 3) ::raise(signal);
            std::vector<float> x(kCount, 1.0f);
            const Status done = group->all_reduce(x.data(), kCount, DType::kF32, ReduceOp::kSum, "gradients");
            EXPECT(!done.ok());
            return done.error().message;
          },
          {},
          [&](std::unique_ptr<Engine> host) -> Result<std::unique_ptr<Engine>> {
            const int64_t rank = host->world_rank();
            RT_TRY_SET(auto made, NcclRank::make(std::move(host), segment,
                                                 {.seed = static_cast<uint64_t>(2 * rank),
                                                  .deadline_ms = spec.deadline_ms,
                                                  .host_name = names(rank)}));
            return std::unique_ptr<Engine>(std::make_unique<cuda::testing::CarriedEngine>(std::move(made)));
          });
      std::vector<std::string> told;
      for (int64_t rank = 0; rank < 3; ++rank) told.push_back(world.ranks->join(rank));
      const std::string third = fmt::format("rank 3 (pid {})", world.ranks->pid(3));
      world.ranks->send_signal(3, SIGKILL);
      for (const std::string& one : told) {
        CAPTURE(one);
        const auto says = [&](const std::string& text) { return one.find(text) != std::string::npos; };
        CHECK(one.starts_with("cuda:0: dp[0,1,2,3].all_reduce(gradients): "));
        if (signal == SIGKILL) {
          CHECK(says(third + " died; it was last seen "));
          CHECK(one.ends_with(", on other-host"));
          continue;
        }
        bool reports = false;
        for (int64_t rank = 0; rank < 3; ++rank) {
          reports = reports || says(fmt::format("not done after 500 ms on the device of rank {} on {} (operation ",
                                                rank, names(rank)));
        }
        CHECK(reports);
        CHECK(says(" of its stream, step 12 (gradients)); "));
        CHECK((says("rank 3 is on other-host") || says(third + " is stopped")));
      }
    }
  }

  TEST_CASE("where every rank is told of every axis, all groups are split off the world's communicator") {
    const RankOptions options{
        .seed = 2, .peers = [](std::string_view) { return cuda::NcclPeers::kNone; }, .whole_axes = true};
    const auto results =
        Ranks(4, options, [](NcclRank& rank) -> std::string {
          {
            const int64_t me = rank.engine().world_rank();
            EXPECT_SET(auto tp, rank.engine().group("tp", {me / 2 * 2, me / 2 * 2 + 1}));
            EXPECT_SET(auto dp, rank.engine().group("dp", {me % 2 + 2, me % 2}));  // not as ranks count
            EXPECT_SET(auto alone, rank.engine().group("kv", {me}));
            std::unique_ptr<Comm> ends;
            if (me == 0 || me == 3) {
              EXPECT_SET(ends, rank.engine().group("embedding", {0, 3}));
            } else {
              EXPECT_OK(rank.engine().no_group("embedding"));
            }
            EXPECT_SET(auto all, rank.engine().group("shard", {0, 1, 2, 3}));
            EXPECT(rank.nccl.made() == 1);
            EXPECT(rank.nccl.split() == (ends ? 4 : 3));
            EXPECT(dp->rank() == 1 - me / 2);
            Arrays arrays(rank);
            for (Comm* const comm : {tp.get(), dp.get(), ends.get(), all.get()}) {
              if (comm == nullptr) continue;
              std::vector<float> x(kCount, 1.0f), sum(kCount);
              rank.stream().copy(arrays.at(0), x.data(), kBytes, cuda::kToDevice);
              EXPECT_OK(comm->all_reduce(arrays.at(0), kCount, DType::kF32, ReduceOp::kSum, "x"));
              rank.stream().copy(sum.data(), arrays.at(0), kBytes, cuda::kToHost);
              EXPECT_OK(rank.stream().settle());
              EXPECT(sum == std::vector<float>(kCount, static_cast<float>(comm->size())));
            }
          }
          return rank.finish();
        }).join();
    CHECK(results == std::vector<std::string>(4, ""));
  }

  TEST_CASE("ranks that split the world's communicator in different orders are told so, before anything is sent") {
    const RankOptions options{
        .seed = 2, .peers = [](std::string_view) { return cuda::NcclPeers::kNone; }, .whole_axes = true};
    const auto results = Ranks(2, options, [](NcclRank& rank) -> std::string {
                           const bool first = rank.engine().world_rank() == 0;
                           auto made = rank.engine().group(first ? "tp" : "dp", {0, 1});
                           EXPECT(!made.ok());
                           return made.error().message;
                         }).join();
    for (const std::string& one : results) {
      CAPTURE(one);
      CHECK(one.find("ranks make their groups in different orders") != std::string::npos);
      CHECK((one.find("tp[0,1]: NCCL has split off a communicator of 1 ranks") != std::string::npos ||
             one.find("dp[0,1]: NCCL has split off a communicator of 1 ranks") != std::string::npos));
    }
  }
}
