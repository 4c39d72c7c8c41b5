// Whether ranks can wait for each other for ever: drawn schedules of pipelines, tensor-parallel and data-parallel ranks
// whose devices begin what they are asked for in one order over all communicators (NCCL_LAUNCH_ORDER_IMPLICIT) and,
// with an odd seed, have room for one collective at a time. 100 schedules; with CAIRN_ALL_SCHEDULES=1 1,000.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "runtime/comm/lane.h"
#include "runtime/core/random.h"
#include "runtime/mesh/mesh.h"
#include "runtime/plan/message_order.h"
#include "tests/runtime/cuda/nccl/nccl_rank.h"

using namespace cairn;
using namespace cairn::comm;
using namespace cairn::comm::testing;
using cuda::testing::NcclRank;
using cuda::testing::RankOptions;
using cuda::testing::Ranks;

namespace {

constexpr int64_t kRanks = 4, kElems = 48, kBytes = kElems * 4, kMostWays = 4;

/// Numbers from 0 to `below` - 1 that are the same wherever the words are.
class Draw {
 public:
  explicit Draw(uint64_t key) : key_(key) {}
  int64_t operator()(int64_t below) {
    return static_cast<int64_t>(mix64(key_ + ++drawn_) % static_cast<uint64_t>(below));
  }

 private:
  const uint64_t key_;
  uint64_t drawn_ = 0;
};

struct Layout {
  int64_t tp, dp, pp;
};
constexpr Layout kLayouts[] = {{1, 1, 4}, {2, 1, 2}, {1, 2, 2}, {2, 2, 1}};

ScheduleShape drawn_shape(uint64_t key, int64_t pp) {
  Draw draw(key);
  for (;;) {
    const auto kind = static_cast<PipelineKind>(draw(5));
    const ScheduleShape shape{kind, pp, 1 + draw(8), 1 + draw(3), kind == PipelineKind::kInterleaved ? draw(7) : 0};
    if (find_mistakes(shape).empty() && (pp == 1 || message_ways(shape) <= kMostWays)) return shape;
  }
}

/// A rank's groups and arrays.
class Member {
 public:
  static Result<std::unique_ptr<Member>> make(NcclRank& rank, const Layout& layout) {
    std::unique_ptr<Member> out(new Member(rank));
    RT_TRY_SET(const Mesh mesh, Mesh::make({.tp = layout.tp, .pp = layout.pp, .dp = layout.dp}, kRanks));
    const int64_t me = rank.engine().world_rank();
    out->pp_rank_ = mesh.coords(me).pp;
    const auto group = [&](std::unique_ptr<Comm>& of, const char* name, MeshAxis axis) -> Status {
      RT_TRY_SET(of, rank.engine().group(name, mesh.group(axis, me)));
      return {};
    };
    RT_TRY(group(out->tp_, "tp", MeshAxis::kTp));
    RT_TRY(group(out->dp_, "dp", MeshAxis::kDp));
    RT_TRY(group(out->beside_dp_, "experts", MeshAxis::kDp));  // the same ranks, on the rank's own stream
    RT_TRY(group(out->forward_, "pp", MeshAxis::kPp));
    RT_TRY(group(out->backward_, "pp back", MeshAxis::kPp));
    for (float*& array : out->arrays_) array = reinterpret_cast<float*>(rank.take(kBytes));
    return out;
  }
  ~Member() {
    ignore(rank_.stream().settle(), "told by who settled it first");
    for (float* const array : arrays_) rank_.give_back(reinterpret_cast<std::byte*>(array), kBytes);
  }

  /// A step, and now and then an evaluation before it. What beside messages is asked for, all ranks of a stage draw
  /// alike.
  Status step(const ScheduleShape& shape, uint64_t key) {
    Draw draw(key ^ stream_key(static_cast<uint64_t>(pp_rank_), "stage"));
    Lane lane(rank_.stream(), false);
    std::vector<Lane::Ticket> tickets;
    const auto talk = [&]() -> Status {
      if (draw(2) == 0) RT_TRY(sum(*tp_, 0, "activations"));
      if (draw(3) == 0) RT_TRY(sum(*beside_dp_, 1, "rows"));
      if (draw(3) == 0) tickets.push_back(lane.submit([&] { return sum(*dp_, 2, "gradients"); }));
      if (draw(4) == 0) tickets.push_back(lane.submit([&] { return gather(*dp_, 3, "weights"); }));
      if (!tickets.empty() && draw(4) == 0) {
        RT_TRY(lane.wait(tickets[static_cast<size_t>(draw(std::ssize(tickets)))]));
      }
      return {};
    };
    for (const bool training : {false, true}) {
      if (!training && key % 4 != 0) continue;
      for (const MessageCall& call : message_calls(shape, pp_rank_, training)) {
        Comm& comm = call.forward ? *forward_ : *backward_;
        if (call.sends) {
          RT_TRY(comm.isend(arrays_[4], kBytes, call.peer, "boundary"));
        } else {
          RT_TRY(comm.recv(arrays_[5], kBytes, call.peer, "boundary"));
          RT_TRY(talk());
        }
      }
      for (int64_t micro_batch = 0; shape.pp == 1 && micro_batch < shape.micro_batches; ++micro_batch) RT_TRY(talk());
      for (Comm* const comm : {forward_.get(), backward_.get()}) RT_TRY(comm->wait_sends("end"));
    }
    RT_TRY(lane.wait_all());
    RT_TRY(sum(*tp_, 0, "partial gradients"));
    return rank_.stream().settle();
  }

 private:
  explicit Member(NcclRank& rank) : rank_(rank) {}
  Status sum(Comm& comm, size_t array, std::string_view what) {
    if (comm.size() == 1) return {};
    return comm.all_reduce(arrays_[array], kElems, DType::kF32, ReduceOp::kSum, what);
  }
  Status gather(Comm& comm, size_t array, std::string_view what) {
    if (comm.size() == 1) return {};
    const int64_t part = kElems / comm.size();
    return comm.all_gather(arrays_[array] + comm.rank() * part, arrays_[array], part * 4, what);
  }

  NcclRank& rank_;
  int64_t pp_rank_ = 0;
  std::unique_ptr<Comm> tp_, dp_, beside_dp_, forward_, backward_;
  float* arrays_[6] = {};
};

RankOptions options_of(uint64_t seed, int64_t ways) {
  return {.seed = seed, .ordered = true, .ways = ways, .peers = [](std::string_view axis) {
            return axis.starts_with("pp") ? cuda::NcclPeers::kNeighbours : cuda::NcclPeers::kNone;
          }};
}

}  // namespace

TEST_SUITE("runtime/cuda/nccl/order") {
  TEST_CASE("no drawn schedule of ranks ends in a wait for ever") {
    const uint64_t lives = 8, each = std::getenv("CAIRN_ALL_SCHEDULES") != nullptr ? 125 : 13;
    for (uint64_t life = 0; life < lives; ++life) {
      CAPTURE(life);
      const Layout layout = kLayouts[life / 2];
      const auto told = Ranks(kRanks, options_of(life, kMostWays), [&](NcclRank& rank) -> std::string {
                          {
                            EXPECT_SET(const auto member, Member::make(rank, layout));
                            for (uint64_t k = 0; k < each; ++k) {
                              const uint64_t key = mix64(life << 32 | k);
                              EXPECT_OK(member->step(drawn_shape(key, layout.pp), key));
                            }
                          }
                          return rank.finish();
                        }).join();
      CHECK(told == std::vector<std::string>(kRanks, ""));
    }
  }

  TEST_CASE("ranks that ask in different orders are found out by the deadline") {
    for (int64_t after = -1; after < 6; ++after) {  // -1: none does
      CAPTURE(after);
      RankOptions options = options_of(1, 1);  // one collective at a time
      if (after >= 0) options.deadline_ms = 400;
      const auto told = Ranks(2, options, [&](NcclRank& rank) -> std::string {
                          std::string wrong;
                          {
                            EXPECT_SET(const auto one, rank.engine().group("tp", {0, 1}));
                            EXPECT_SET(const auto other, rank.engine().group("dp", {0, 1}));
                            const int64_t me = rank.engine().world_rank();
                            std::byte* const at = rank.take(kBytes);
                            if (me == 0) rank.nccl.swap_calls(after);
                            for (int k = 0; k < 4 && wrong.empty(); ++k) {
                              Comm& comm = k % 2 == 0 ? *one : *other;
                              Lane lane(rank.stream(), false);
                              Status done = lane.wait(
                                  lane.submit([&] { return other->all_gather(at + me * 16, at, 16, "weights"); }));
                              if (done.ok()) done = comm.all_reduce(at, 8, DType::kF32, ReduceOp::kSum, "activations");
                              if (done.ok()) done = rank.stream().settle();
                              if (!done.ok()) wrong = done.error().message;
                            }
                            ignore(rank.stream().settle(), "told above");
                            rank.give_back(at, kBytes);
                          }
                          return wrong + rank.finish();
                        }).join();
      for (const std::string& one : told) {
        CAPTURE(one);
        if (after < 0) {
          CHECK(one == "");
          continue;
        }
        const bool found = one.find("not done after 400 ms") != std::string::npos ||
                           one.find("has another") != std::string::npos || one.find("rank ") != std::string::npos;
        CHECK(found);
      }
    }
  }

  TEST_CASE("with a communicator too few for the messages under way ranks wait for ever, until the deadline") {
    const ScheduleShape shape{PipelineKind::kInterleaved, 2, 4, 2, 4};
    const int64_t ways = message_ways(shape);
    REQUIRE(ways > 1);
    for (const bool enough : {true, false}) {
      CAPTURE(enough);
      RankOptions options = options_of(2, enough ? ways : ways - 1);
      options.deadline_ms = enough ? 20000 : 400;
      const auto told = Ranks(2, options, [&](NcclRank& rank) -> std::string {
                          std::string wrong;
                          {
                            EXPECT_SET(const auto forward, rank.engine().group("pp", {0, 1}));
                            EXPECT_SET(const auto backward, rank.engine().group("pp back", {0, 1}));
                            std::byte* const at = rank.take(kBytes);
                            for (const MessageCall& call : message_calls(shape, rank.engine().world_rank())) {
                              Comm& comm = call.forward ? *forward : *backward;
                              EXPECT_OK(call.sends ? comm.isend(at, kBytes, call.peer, "boundary")
                                                   : comm.recv(at, kBytes, call.peer, "boundary"));
                            }
                            if (const Status settled = rank.stream().settle(); !settled.ok()) {
                              wrong = settled.error().message;
                            }
                            rank.give_back(at, kBytes);
                          }
                          return wrong.empty() ? rank.finish() : wrong;
                        }).join();
      for (const std::string& one : told) {
        CAPTURE(one);
        CHECK((one == "") == enough);
        if (!enough) CHECK(one.find("(boundary)") != std::string::npos);
      }
    }
  }
}
