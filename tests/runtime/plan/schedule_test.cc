#include "runtime/plan/schedule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "runtime/core/random.h"
#include "tests/support/ok.h"

using namespace cairn;

namespace {

constexpr PipelineKind kG = PipelineKind::kGpipe, kF = PipelineKind::k1F1B, kI = PipelineKind::kInterleaved,
                       kH = PipelineKind::kZbH1, kV = PipelineKind::kZbV;

/// "F0 B0 ..."; I and W are the halves of a backward; with several chunks "F0.1" is micro-batch 0 in chunk 1.
std::string spelled(const ScheduleShape& shape, int64_t rank) {
  std::string out;
  for (const Action& a : schedule_actions(shape, rank)) {
    out += "FBIW"[static_cast<int>(a.kind)] + std::to_string(a.micro_batch);
    if (shape.chunks > 1) out += "." + std::to_string(a.chunk);
    out += " ";
  }
  return out;
}

std::string forwards(const ScheduleShape& shape, int64_t rank = 0) {
  std::string out;
  for (const Action& a : forward_actions(shape, rank))
    out += std::to_string(a.micro_batch) + "." + std::to_string(a.chunk) + " ";
  return out;
}

/// What the executor does with rings of buffers and channels that hold nothing: a rank begins an action that sends only
/// when at most `ring - 1` of its messages to that destination have not been taken. True when all actions of all ranks
/// end.
bool ends(const ScheduleShape& shape, const BoundaryBuffers& buffers, bool forward_only = false) {
  const int64_t pp = shape.pp, stages = pp * shape.chunks;
  std::vector<std::vector<Action>> lists;
  for (int64_t rank = 0; rank < pp; ++rank) {
    lists.push_back(forward_only ? forward_actions(shape, rank) : schedule_actions(shape, rank));
  }
  std::vector<size_t> next(pp, 0);
  std::vector<bool> received(pp, false);        // the input of the next action is here
  using Message = std::pair<int64_t, int64_t>;  // for which stage, of which micro-batch
  struct Channels {
    std::map<std::pair<int64_t, int64_t>, std::deque<Message>> sent;  // by source and destination, not taken yet
  } activations, gradients;
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t rank = 0; rank < pp; ++rank) {
      while (next[rank] < lists[rank].size()) {
        const Action& action = lists[rank][next[rank]];
        if (action.kind != ActionKind::kBackwardWeight) {
          const bool is_forward = action.kind == ActionKind::kForward;
          const int64_t stage = stage_at(shape, rank, action.chunk);
          const int64_t from = is_forward ? stage - 1 : stage + 1, to = is_forward ? stage + 1 : stage - 1;
          Channels& channels = is_forward ? activations : gradients;
          if (!received[rank] && from >= 0 && from < stages) {
            std::deque<Message>& queue = channels.sent[{place_of(shape, from).rank, rank}];
            if (queue.empty()) break;
            if (queue.front() != Message{stage, action.micro_batch}) return false;  // another one was expected
            queue.pop_front();
            moved = true;
          }
          received[rank] = true;
          if (to >= 0 && to < stages) {
            std::deque<Message>& queue = channels.sent[{rank, place_of(shape, to).rank}];
            if (std::ssize(queue) >= (is_forward ? buffers.activations : buffers.gradients)) break;
            queue.push_back({to, action.micro_batch});
          }
          received[rank] = false;
        }
        ++next[rank];
        moved = true;
      }
    }
  }
  for (int64_t rank = 0; rank < pp; ++rank) {
    if (next[rank] != lists[rank].size()) return false;
  }
  return true;
}

/// In units of one forward of a stage; both halves of a backward take as long.
double duration(const ScheduleShape& shape) {
  const auto timed = simulate_schedule(shape, PassTimes{});
  REQUIRE_OK(timed);
  double end = 0;
  for (const auto& rank : timed.value()) end = std::max(end, rank.back().end);
  return end;
}

/// Each slot holds one micro-batch from its forward to its last backward, each late slot from one half to the other;
/// actions of a kind run in micro-batch order, once each; no slot is there for nothing.
void check_slots(const ScheduleShape& shape) {
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    const std::vector<int64_t> slots = in_flight_micro_batches(shape, rank), late = late_micro_batches(shape, rank);
    REQUIRE(std::ssize(slots) == shape.chunks);
    REQUIRE(std::ssize(late) == shape.chunks);
    std::vector<std::vector<int64_t>> held, held_late;
    for (const int64_t count : slots) held.emplace_back(count, -1);
    for (const int64_t count : late) held_late.emplace_back(count, -1);
    std::vector<int64_t> forward(shape.chunks, 0), input(shape.chunks, 0), weight(shape.chunks, 0);
    std::vector<int64_t> most(shape.chunks, 0), most_late(shape.chunks, 0);
    for (const Action& a : schedule_actions(shape, rank)) {
      REQUIRE(a.slot < slots[a.chunk]);
      int64_t& slot = held[a.chunk][a.slot];
      if (a.kind == ActionKind::kForward) {
        REQUIRE(a.micro_batch == forward[a.chunk]++);
        REQUIRE(slot == -1);
        slot = a.micro_batch;
      } else {
        REQUIRE(slot == a.micro_batch);
        if (a.kind != ActionKind::kBackwardWeight) {
          REQUIRE(a.micro_batch == input[a.chunk]++);
        }
        if (a.kind != ActionKind::kBackwardInput) {
          REQUIRE(a.micro_batch == weight[a.chunk]++);
          slot = -1;
        }
        if (a.kind != ActionKind::kBackward) {
          REQUIRE(a.late < late[a.chunk]);
          int64_t& late_slot = held_late[a.chunk][a.late];
          REQUIRE(late_slot == (a.kind == ActionKind::kBackwardInput ? -1 : a.micro_batch));
          late_slot = a.kind == ActionKind::kBackwardInput ? a.micro_batch : -1;
        }
      }
      most[a.chunk] = std::max(most[a.chunk], forward[a.chunk] - weight[a.chunk]);
      most_late[a.chunk] = std::max(most_late[a.chunk], input[a.chunk] - weight[a.chunk]);
    }
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      REQUIRE(forward[chunk] == shape.micro_batches);
      REQUIRE(input[chunk] == shape.micro_batches);
      REQUIRE(weight[chunk] == shape.micro_batches);
      REQUIRE(most[chunk] == slots[chunk]);
      REQUIRE(most_late[chunk] == late[chunk]);
    }
  }
}

/// All that is claimed of a schedule; `idle` in units of a forward of a stage.
void check_claims(const ScheduleShape& shape, double idle) {
  CAPTURE(schedule_name(shape.kind));
  CAPTURE(shape.pp);
  CAPTURE(shape.chunks);
  CAPTURE(shape.micro_batches);
  CAPTURE(shape.group);
  REQUIRE(find_mistakes(shape).empty());
  const auto ideal = static_cast<double>(3 * shape.micro_batches * shape.chunks);
  CHECK(duration(shape) == ideal + idle);
  CHECK(bubble_fraction(shape) == doctest::Approx(idle / (ideal + idle)));
  const BoundaryBuffers buffers = boundary_buffers(shape);
  CHECK(ends(shape, buffers));
  CHECK(ends(shape, buffers, true));
  check_slots(shape);
}

/// Most messages of one ring that are sent and not yet taken, when a pass begins that sends another; that one among
/// them. Of all ranks.
int64_t on_the_way(const ScheduleShape& shape, bool activations) {
  if (shape.kind == kG || shape.kind == kF) return 1;  // neighbours are in step
  const auto timeline = simulate_schedule(shape, PassTimes{});
  REQUIRE(timeline.ok());
  const int64_t stages = shape.pp * shape.chunks;
  std::map<std::pair<int64_t, int64_t>, double> begins;  // of the pass that sends or takes, by stage and micro-batch
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    for (const TimedAction& timed : timeline.value()[rank]) {
      const ActionKind kind = timed.action.kind;
      if (kind == ActionKind::kBackwardWeight || (kind == ActionKind::kForward) != activations) continue;
      begins[{stage_at(shape, rank, timed.action.chunk), timed.action.micro_batch}] = timed.begin;
    }
  }
  int64_t most = 0;
  for (const auto& [sender, at] : begins) {
    const auto on_ring = [&](int64_t stage) {
      const StagePlace mine = place_of(shape, sender.first), other = place_of(shape, stage);
      return mine.rank == other.rank && (shape.kind != kV || mine.chunk == other.chunk);
    };
    const int64_t to = activations ? 1 : -1;
    if (sender.first + to < 0 || sender.first + to >= stages) continue;
    int64_t pending = 0;
    for (const auto& [other, began] : begins) {
      if (!on_ring(other.first) || other.first + to < 0 || other.first + to >= stages || began > at) continue;
      pending += begins.at({other.first + to, other.second}) > at ? 1 : 0;
    }
    most = std::max(most, pending);
  }
  return most;
}

}  // namespace

TEST_SUITE("runtime/plan/schedule") {
  TEST_CASE("1F1B on four stages is the published table") {
    CHECK(spelled({kF, 4, 6}, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5 ");
    CHECK(spelled({kF, 4, 6}, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5 ");
    CHECK(spelled({kF, 4, 3}, 3) == "F0 B0 F1 B1 F2 B2 ");
    CHECK(spelled({kG, 2, 3}, 1) == "F0 F1 F2 B0 B1 B2 ");
  }

  TEST_CASE("interleaved: the table of 3 ranks, 3 chunks and 5 micro-batches, and the warm-up of each rank") {
    // Groups of 3; the last one is short: refused for running (it stalls), listed all the same.
    CHECK(forwards({kI, 3, 5, 3}) == "0.0 1.0 2.0 0.1 1.1 2.1 0.2 1.2 2.2 3.0 4.0 3.1 4.1 3.2 4.2 ");
    const auto warm_up = [](const ScheduleShape& shape, int64_t rank) {
      const std::vector<Action> actions = schedule_actions(shape, rank);
      const auto backward =
          std::find_if(actions.begin(), actions.end(), [](const Action& a) { return a.kind == ActionKind::kBackward; });
      return backward - actions.begin() - 1;  // the forward of the first pair is no warm-up
    };
    // min(2 (p - r - 1) + (v - 1) g, m v): Megatron-LM's counts.
    CHECK(warm_up({kI, 4, 8, 2}, 0) == 10);
    CHECK(warm_up({kI, 4, 8, 2}, 1) == 8);
    CHECK(warm_up({kI, 4, 8, 2}, 3) == 4);
    CHECK(warm_up({kI, 2, 8, 3}, 0) == 6);
    CHECK(warm_up({kI, 4, 16, 2, 8}, 0) == 14);  // 2 * 3 + 1 * 8
    CHECK(warm_up({kI, 4, 16, 3, 5}, 3) == 10);  // 2 * 0 + 2 * 5
    CHECK(warm_up({kI, 2, 3, 2, 6}, 0) == 5);    // 2 * 1 + 6 is more than all 6 forwards; the last is no warm-up here
    CHECK(spelled({kI, 2, 4, 2}, 0) ==
          "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0 ");
    CHECK(spelled({kI, 2, 4, 2}, 1) ==
          "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0 ");
    CHECK(spelled({kI, 2, 2, 2}, 1) == "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0 ");  // m = p: all first
  }

  TEST_CASE(
      "interleaved in groups of 3 micro-batches on 2 ranks: each action, derived by hand from the published rule") {
    // The table of virtual micro-batches k: group 1 is 0..2, group 2 is 3..4 (at least pp).
    //   k            0 1 2  3 4 5  6 7  8 9
    //   micro-batch  0 1 2  0 1 2  3 4  3 4
    //   chunk        0 0 0  1 1 1  0 0  1 1     backward: 1 - chunk
    // Warm-up: rank 0 2 (2 - 0 - 1) + (2 - 1) 3 = 5, rank 1 3. Then forward k + warm-up, backward k.
    const ScheduleShape shape{kI, 2, 5, 2, 3};
    REQUIRE(find_mistakes(shape).empty());
    CHECK(forwards(shape) == "0.0 1.0 2.0 0.1 1.1 2.1 3.0 4.0 3.1 4.1 ");
    CHECK(spelled(shape, 0) ==
          "F0.0 F1.0 F2.0 F0.1 F1.1 "
          "F2.1 B0.1 F3.0 B1.1 F4.0 B2.1 F3.1 B0.0 F4.1 B1.0 "
          "B2.0 B3.1 B4.1 B3.0 B4.0 ");
    CHECK(spelled(shape, 1) ==
          "F0.0 F1.0 F2.0 "
          "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.0 B0.0 F4.0 B1.0 F3.1 B2.0 F4.1 B3.1 "
          "B4.1 B3.0 B4.0 ");
  }

  TEST_CASE("1F1B and interleaved, action by action against the published rule, for every rank of many shapes") {
    // The rule once more, from systems' descriptions and not from the code: a table of virtual micro-batches (groups of
    // g micro-batches pass chunk 0, then chunk 1, ...), warm-up forwards, pairs, and the backwards that are left.
    struct Virtual {
      int64_t micro_batch, chunk;
    };
    int64_t shapes = 0, compared = 0;
    for (int64_t p = 2; p <= 8; ++p) {
      for (int64_t v = 1; v <= 4; ++v) {
        for (int64_t m = 1; m <= 3 * p; ++m) {
          for (const int64_t g : {p, p + 1, 2 * p}) {
            if (v == 1 && g != p) continue;
            const ScheduleShape shape{v == 1 ? kF : kI, p, m, v, v > 1 && g != p ? g : 0};
            if (!find_mistakes(shape).empty()) continue;
            ++shapes;
            std::vector<Virtual> table;
            for (int64_t first = 0; first < m; first += g) {
              for (int64_t chunk = 0; chunk < v; ++chunk) {
                for (int64_t k = first; k < std::min(m, first + g); ++k) table.push_back({k, chunk});
              }
            }
            const int64_t all = std::ssize(table);
            REQUIRE(all == m * v);
            for (int64_t r = 0; r < p; ++r) {
              int64_t warm_up = v == 1 ? std::min(p - r - 1, m) : std::min(2 * (p - r - 1) + (v - 1) * g, all);
              if (v > 1 && m == p) warm_up = all;
              std::vector<std::pair<bool, Virtual>> wanted;  // forward?
              for (int64_t k = 0; k < warm_up; ++k) wanted.push_back({true, table[k]});
              for (int64_t k = 0; k < all; ++k) {
                if (warm_up + k < all) wanted.push_back({true, table[warm_up + k]});
                wanted.push_back({false, {table[k].micro_batch, v - 1 - table[k].chunk}});
              }
              const std::vector<Action> got = schedule_actions(shape, r);
              CAPTURE(p);
              CAPTURE(v);
              CAPTURE(m);
              CAPTURE(g);
              CAPTURE(r);
              REQUIRE(std::ssize(got) == std::ssize(wanted));
              for (size_t i = 0; i < got.size(); ++i, ++compared) {
                const auto& [forward, at] = wanted[i];
                const bool same = (got[i].kind == ActionKind::kForward) == forward &&
                                  got[i].micro_batch == at.micro_batch && got[i].chunk == at.chunk;
                REQUIRE(same);
              }
            }
          }
        }
      }
    }
    CHECK(shapes > 200);
    CHECK(compared > 50'000);
  }

  TEST_CASE("ZB-H1: weights' gradients a rank's number of micro-batches late; those of the first stage at once") {
    CHECK(spelled({kH, 4, 6}, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5 ");
    CHECK(spelled({kH, 4, 6}, 1) == "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5 ");
    CHECK(spelled({kH, 4, 6}, 3) == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5 ");
    for (int64_t rank = 0; rank < 4; ++rank) {  // no rank holds more than 1F1B's first
      CHECK(in_flight_micro_batches({kH, 4, 6}, rank) == std::vector<int64_t>{4});
      CHECK(late_micro_batches({kH, 4, 6}, rank) == std::vector<int64_t>{rank == 0 ? 0 : rank + 1});
    }
    CHECK(spelled({kH, 1, 2}, 0) == "F0 B0 F1 B1 ");
  }

  TEST_CASE("ZB-V: the first and the last stage on rank 0, down the V and up again") {
    const ScheduleShape shape{kV, 2, 4, 2};
    for (int64_t stage = 0; stage < 4; ++stage) {
      const StagePlace place = place_of(shape, stage);
      CHECK(place.rank == (stage == 0 || stage == 3 ? 0 : 1));
      CHECK(place.chunk == stage / 2);
      CHECK(stage_at(shape, place.rank, place.chunk) == stage);
    }
    CHECK(spelled(shape, 0) ==
          "F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F3.0 B0.0 F2.1 I2.1 W2.1 B1.0 F3.1 I3.1 W3.1 B2.0 B3.0 ");
    CHECK(spelled(shape, 1) ==
          "F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 F2.0 I0.0 W0.0 F2.1 I1.1 W1.1 F3.0 I1.0 W1.0 F3.1 I2.1 W2.1 I2.0 I3.1 I3.0 "
          "W2.0 W3.1 W3.0 ");
    for (int64_t pp = 2; pp <= 8; ++pp) {
      for (int64_t rank = 0; rank < pp; ++rank) {  // about 1F1B's p micro-batches of a rank, 2 p of its halves
        const std::vector<int64_t> slots = in_flight_micro_batches({kV, pp, 4 * pp, 2}, rank);
        CHECK(slots[0] + slots[1] <= 2 * pp + 1);
      }
    }
  }

  TEST_CASE("every schedule finishes, in the time of the bubble formula, and never reuses a live slot") {
    for (int64_t pp = 1; pp <= 8; ++pp) {
      for (int64_t m = 1; m <= 17; ++m) {
        const auto idle = static_cast<double>(pp - 1);
        for (const PipelineKind kind : {kG, kF}) {
          check_claims({kind, pp, m}, 3 * idle);
          const BoundaryBuffers buffers = boundary_buffers({kind, pp, m});
          CHECK((buffers.rings == 1 && buffers.activations == 1 && buffers.gradients == 1));
        }
        check_claims({kH, pp, m}, idle + static_cast<double>(std::max<int64_t>(0, pp - m)));
        if (pp > 1) check_claims({kV, pp, m, 2}, m >= 2 * pp - 1 ? idle : duration({kV, pp, m, 2}) - 6.0 * m);
      }
    }
  }

  TEST_CASE("two steps from the steady number of micro-batches on tell longer ones, however unequal the stages") {
    std::vector<ScheduleShape> shapes;
    for (const int64_t pp : {2, 3, 4, 6}) {
      shapes.insert(shapes.end(), {{kG, pp, 1}, {kF, pp, 1}, {kH, pp, 1}, {kV, pp, 1, 2}, {kI, pp, 1, 2}});
    }
    shapes.push_back({kI, 3, 1, 3, 4});
    for (ScheduleShape shape : shapes) {
      CAPTURE(schedule_name(shape.kind));
      CAPTURE(shape.pp);
      // Of the step of 8 times as many, from these many and twice these; the most that it errs by.
      const auto error = [&](int64_t few, bool equal) {
        double most = 0;
        for (uint64_t draw = 0; draw < (equal ? 1 : 40); ++draw) {
          std::vector<PassTimes> stages;  // 1 to 2 each
          for (int64_t s = 0; s < shape.pp * shape.chunks; ++s) {
            const double time = equal ? 1.0 : 1.0 + uniform_at(stream_key(draw, "stage"), s);
            stages.push_back({time, time, time});
          }
          const auto step = [&](int64_t micro_batches) {
            shape.micro_batches = micro_batches;
            const auto timed = simulate_schedule(shape, stages);
            REQUIRE_OK(timed);
            double end = 0;
            for (const auto& rank : timed.value()) end = std::max(end, rank.back().end);
            return end;
          };
          const double predicted = step(few) + 7 * (step(2 * few) - step(few));
          most = std::max(most, std::abs(predicted / step(8 * few) - 1));
        }
        return most;
      };
      const int64_t steady = steady_micro_batches(shape);
      CHECK(error(steady, true) < 1e-9);
      CHECK(error(steady, false) < 0.1);
      if (steady > 1 && shape.group == 0) {  // fewer do not do
        CHECK(error(shape.kind == kI ? shape.pp : 1, false) > 0.1);
      }
    }
  }

  TEST_CASE("a V of few micro-batches idles less than 1F1B") {
    for (int64_t pp = 2; pp <= 8; ++pp) {
      for (int64_t m = 1; m < 2 * pp; ++m) CHECK(bubble_fraction({kV, pp, m, 2}) < bubble_fraction({kF, pp, m}));
    }
  }

  TEST_CASE("interleaved schedules that are accepted finish, in the time of the bubble formula") {
    int64_t accepted = 0;
    for (int64_t pp = 2; pp <= 8; ++pp) {
      for (int64_t chunks = 2; chunks <= 4; ++chunks) {
        for (int64_t m = 1; m <= 24; ++m) {
          const ScheduleShape shape{kI, pp, m, chunks};
          CAPTURE(pp);
          CAPTURE(m);
          CHECK(find_mistakes(shape).empty() == (m % pp == 0));
          if (m % pp != 0) continue;
          ++accepted;
          check_claims(shape, 3.0 * static_cast<double>(pp - 1));
        }
      }
    }
    CHECK(accepted == 3 * (12 + 8 + 6 + 4 + 4 + 3 + 3));
  }

  TEST_CASE("interleaved in groups of any size from pp, the last one short: the same bubble, several sends at once") {
    int64_t several = 0;
    for (int64_t pp = 2; pp <= 6; ++pp) {
      for (int64_t group = pp; group <= 2 * pp + 1; ++group) {
        for (int64_t m = 1; m <= 3 * pp + 2; ++m) {
          const ScheduleShape shape{kI, pp, m, 3, group};
          const bool fits = m % group == 0 || m % group >= pp;
          CAPTURE(pp);
          CAPTURE(group);
          CAPTURE(m);
          CHECK(find_mistakes(shape).empty() == fits);
          if (!fits) continue;
          check_claims(shape, 3.0 * static_cast<double>(pp - 1));
          const BoundaryBuffers buffers = boundary_buffers(shape);
          if (buffers.activations > 1 && !ends(shape, {1, 1, 1})) ++several;
        }
      }
    }
    CHECK(several > 0);  // with one buffer those would wait for ever: the rings are needed
  }

  TEST_CASE("what a schedule holds at once is that of all of its micro-batches, however many") {
    int64_t shapes = 0;
    for (const PipelineKind kind : {PipelineKind::k1F1B, PipelineKind::kInterleaved, PipelineKind::kZbH1,
                                    PipelineKind::kZbV, PipelineKind::kGpipe}) {
      for (const int64_t pp : {2, 3, 4, 7}) {
        for (const int64_t chunks : {1, 2, 3, 5}) {
          if ((kind == PipelineKind::kInterleaved) != (chunks > 1) && kind != PipelineKind::kZbV) continue;
          if (kind == PipelineKind::kZbV && chunks != 2) continue;
          for (const int64_t group : {int64_t{0}, pp, pp + 1, 2 * pp}) {
            if (group > 0 && kind != PipelineKind::kInterleaved) continue;
            for (int64_t m = 1; m <= 61; m = m < 9 ? m + 1 : m + 13) {
              const ScheduleShape shape{.kind = kind, .pp = pp, .micro_batches = m, .chunks = chunks, .group = group};
              if (!find_mistakes(shape).empty()) continue;
              CAPTURE(schedule_name(kind));
              CAPTURE(pp);
              CAPTURE(chunks);
              CAPTURE(group);
              CAPTURE(m);
              ++shapes;
              for (int64_t rank = 0; rank < pp; ++rank) {
                std::vector<int64_t> held(chunks, 0), late(chunks, 0);
                for (const Action& a : schedule_actions(shape, rank)) {
                  held[a.chunk] = std::max(held[a.chunk], a.slot + 1);
                  if (a.kind == ActionKind::kBackwardWeight) late[a.chunk] = std::max(late[a.chunk], a.late + 1);
                }
                CHECK(in_flight_micro_batches(shape, rank) == held);
                CHECK(late_micro_batches(shape, rank) == late);
              }
              CHECK(boundary_buffers(shape).activations == std::max<int64_t>(1, on_the_way(shape, true)));
              CHECK(boundary_buffers(shape).gradients == std::max<int64_t>(1, on_the_way(shape, false)));
            }
          }
        }
      }
    }
    CHECK(shapes > 300);
  }

  TEST_CASE("a pipeline schedule that cannot run is refused, with what would") {
    const auto refused = [](const ScheduleShape& shape) {
      const std::vector<Mistake> mistakes = find_mistakes(shape);
      REQUIRE(mistakes.size() == 1);
      return mistakes[0].field + ": " + to_error(mistakes[0]).message;
    };
    CHECK(refused({kF, 2, 4, 2}) ==
          "mesh.virtual_stages: mesh.virtual_stages = 2 is for schedule = \"interleaved\" or \"zb-v\", and \"1f1b\" "
          "runs one stage a rank; accepted: schedule = \"interleaved\" or \"zb-v\", or virtual_stages 1");
    CHECK(refused({kI, 2, 4, 1}) ==
          "schedule: schedule = \"interleaved\" needs mesh.pp >= 2 and mesh.virtual_stages >= 2, got 2 and 1; "
          "accepted: virtual_stages 2, or schedule = \"1f1b\"");
    CHECK(refused({kI, 4, 3, 2}) ==
          "schedule: schedule = \"interleaved\" takes micro-batches in groups of mesh.pp = 4, and a step has 3; "
          "accepted: 4 micro-batches a step");
    CHECK(refused({kI, 3, 7, 2}) ==
          "schedule: schedule = \"interleaved\" takes micro-batches in groups of mesh.pp = 3, and a step has 7; "
          "accepted: 6 or 9 micro-batches a step");
    CHECK(refused({kI, 3, 6, 2, 5}) ==
          "schedule: schedule = \"interleaved\" takes micro-batches in groups of mesh.micro_batch_group = 5, the last "
          "one of at least mesh.pp = 3, and a step has 6; accepted: 5 or 8 micro-batches a step");
    CHECK(
        refused({kI, 4, 8, 2, 3}) ==
        "mesh.micro_batch_group: mesh.micro_batch_group = 3 is less than mesh.pp = 4: a group must fill the "
        "pipeline, or its first rank waits for the last one; accepted: micro_batch_group 4 or more, or 0 for mesh.pp");
    CHECK(refused({kV, 4, 8, 1}) ==
          "schedule: schedule = \"zb-v\" needs mesh.pp >= 2 and mesh.virtual_stages = 2, got 4 and 1; "
          "accepted: virtual_stages 2, or schedule = \"zb-h1\"");
    CHECK(refused({kH, 4, 8, 1, 4}) ==
          "mesh.micro_batch_group: mesh.micro_batch_group = 4 is for schedule = \"interleaved\", not \"zb-h1\"; "
          "accepted: schedule = \"interleaved\", or micro_batch_group 0");
  }
}
