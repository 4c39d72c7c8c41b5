#include "runtime/plan/schedule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

using namespace cairn;

namespace {

constexpr PipelineKind kG = PipelineKind::kGpipe, kF = PipelineKind::k1F1B, kI = PipelineKind::kInterleaved;

/// "F0 B0 ..."; with several chunks "F0.1" is micro-batch 0 in chunk 1.
std::string spelled(const ScheduleShape& shape, int64_t rank) {
  std::string out;
  for (const Action& a : schedule_actions(shape, rank)) {
    out += (a.kind == ActionKind::kForward ? "F" : "B") + std::to_string(a.micro_batch);
    if (shape.chunks > 1) out += "." + std::to_string(a.chunk);
    out += " ";
  }
  return out;
}

std::string forwards(const ScheduleShape& shape) {
  std::string out;
  for (const Action& a : forward_actions(shape))
    out += std::to_string(a.micro_batch) + "." + std::to_string(a.chunk) + " ";
  return out;
}

/// What the executor does with one buffer a direction and a channel that holds nothing: a rank begins an action that
/// sends only when its last message of that kind has been taken. True when all actions of all ranks end.
bool ends_without_buffers(const ScheduleShape& shape) {
  const int64_t pp = shape.pp, stages = pp * shape.chunks;
  std::vector<std::vector<Action>> lists;
  for (int64_t rank = 0; rank < pp; ++rank) lists.push_back(schedule_actions(shape, rank));
  std::vector<size_t> next(pp, 0);
  std::vector<bool> received(pp, false);  // the input of the next action is here
  struct Message {
    int64_t stage = -1, micro_batch = 0;  // for whom; stage -1: none is waiting
    bool operator==(const Message&) const = default;
  };
  std::vector<Message> activations(pp), gradients(pp);  // sent by each rank and not taken yet
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t rank = 0; rank < pp; ++rank) {
      while (next[rank] < lists[rank].size()) {
        const Action& action = lists[rank][next[rank]];
        const bool is_forward = action.kind == ActionKind::kForward;
        const int64_t stage = action.chunk * pp + rank;
        std::vector<Message>& sent = is_forward ? activations : gradients;
        if (!received[rank] && (is_forward ? stage > 0 : stage + 1 < stages)) {
          Message& from = sent[is_forward ? (rank + pp - 1) % pp : (rank + 1) % pp];
          if (from != Message{stage, action.micro_batch}) break;
          from = {};
          moved = true;
        }
        received[rank] = true;
        if (is_forward ? stage + 1 < stages : stage > 0) {
          if (sent[rank].stage >= 0) break;
          sent[rank] = {is_forward ? stage + 1 : stage - 1, action.micro_batch};
        }
        received[rank] = false;
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

double duration(const ScheduleShape& shape) {
  const auto timed =
      simulate_schedule(shape, 1.0 / static_cast<double>(shape.chunks), 2.0 / static_cast<double>(shape.chunks));
  REQUIRE_MESSAGE(timed.ok(), timed.error().message);
  double end = 0;
  for (const auto& rank : timed.value()) end = std::max(end, rank.back().end);
  return end;
}

void check_slots(const ScheduleShape& shape) {
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    const std::vector<int64_t> slots = in_flight_micro_batches(shape, rank);
    REQUIRE(static_cast<int64_t>(slots.size()) == shape.chunks);
    std::vector<std::vector<int64_t>> held;
    for (const int64_t count : slots) held.emplace_back(count, -1);
    std::vector<int64_t> forward(shape.chunks, 0), backward(shape.chunks, 0);
    for (const Action& a : schedule_actions(shape, rank)) {
      REQUIRE(a.slot < slots[a.chunk]);
      if (a.kind == ActionKind::kForward) {
        REQUIRE(a.micro_batch == forward[a.chunk]++);
        REQUIRE(held[a.chunk][a.slot] == -1);
        held[a.chunk][a.slot] = a.micro_batch;
      } else {
        REQUIRE(a.micro_batch == backward[a.chunk]++);
        REQUIRE(held[a.chunk][a.slot] == a.micro_batch);
        held[a.chunk][a.slot] = -1;
      }
    }
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      REQUIRE(forward[chunk] == shape.micro_batches);
      REQUIRE(backward[chunk] == shape.micro_batches);
    }
  }
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
    CHECK(spelled({kI, 2, 4, 2}, 0) ==
          "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0 ");
    CHECK(spelled({kI, 2, 4, 2}, 1) ==
          "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0 ");
    CHECK(spelled({kI, 2, 2, 2}, 1) == "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0 ");  // m = p: all first
  }

  TEST_CASE("every schedule finishes, in the time of the bubble formula, and never reuses a live slot") {
    for (int64_t pp = 1; pp <= 8; ++pp) {
      for (int64_t m = 1; m <= 17; ++m) {
        CAPTURE(pp);
        CAPTURE(m);
        for (const PipelineKind kind : {kG, kF}) {
          const ScheduleShape shape{kind, pp, m};
          REQUIRE(check_schedule(shape).ok());
          CHECK(duration(shape) == doctest::Approx(3 * (m + pp - 1)));  // ideal 3m, bubble 3(p - 1)
          CHECK(bubble_fraction(shape) == doctest::Approx(1 - 3 * m / duration(shape)));
          CHECK(ends_without_buffers(shape));
          check_slots(shape);
        }
      }
    }
  }

  TEST_CASE("interleaved schedules that are accepted finish, in the time of the bubble formula") {
    int64_t accepted = 0;
    for (int64_t pp = 2; pp <= 8; ++pp) {
      for (int64_t chunks = 2; chunks <= 4; ++chunks) {
        for (int64_t m = 1; m <= 24; ++m) {
          const ScheduleShape shape{kI, pp, m, chunks};
          CAPTURE(pp);
          CAPTURE(chunks);
          CAPTURE(m);
          CHECK(check_schedule(shape).ok() == (m % pp == 0));
          if (m % pp != 0) continue;
          ++accepted;
          CHECK(ends_without_buffers(shape));
          check_slots(shape);
          const double ideal = 3 * static_cast<double>(m);
          CHECK(duration(shape) ==
                doctest::Approx(ideal + 3.0 * static_cast<double>(pp - 1) / static_cast<double>(chunks)));
          CHECK(bubble_fraction(shape) == doctest::Approx(1 - ideal / duration(shape)));
        }
      }
    }
    CHECK(accepted == 3 * (12 + 8 + 6 + 4 + 4 + 3 + 3));
  }

  TEST_CASE("what cannot run is refused, with what would") {
    const auto refused = [](const ScheduleShape& shape) { return check_schedule(shape).error().message; };
    CHECK(refused({kF, 2, 4, 2}) ==
          "mesh.virtual_stages = 2 is for schedule = \"interleaved\"; the schedule here runs one stage a rank");
    CHECK(refused({kI, 2, 4, 1}) ==
          "schedule = \"interleaved\" needs mesh.pp >= 2 and mesh.virtual_stages >= 2, got 2 and 1; with one stage a "
          "rank it is \"1f1b\"");
    CHECK(refused({kI, 4, 3, 2}) ==
          "schedule = \"interleaved\" takes micro-batches in groups of mesh.pp = 4, and a step has 3; nearest: 4");
    CHECK(refused({kI, 3, 7, 2}) ==
          "schedule = \"interleaved\" takes micro-batches in groups of mesh.pp = 3, and a step has 7; nearest: 6, 9");
  }
}
