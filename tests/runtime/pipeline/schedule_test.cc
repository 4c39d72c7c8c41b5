#include "runtime/pipeline/schedule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

using namespace cairn;
using namespace cairn::pipeline;

namespace {

std::string spelled(PipelineKind kind, int64_t stage, int64_t pp, int64_t m) {
  std::string out;
  for (const Action& a : schedule_actions(kind, stage, pp, m)) {
    out += (a.kind == ActionKind::kForward ? "F" : "B") + std::to_string(a.micro_batch) + " ";
  }
  return out;
}

// Runs all stages with one-deep rendezvous-free channels; returns total time with forward 1 and backward 2 units, or -1
// on deadlock.
int64_t simulate(PipelineKind kind, int64_t pp, int64_t m) {
  std::vector<std::vector<Action>> lists;
  for (int64_t s = 0; s < pp; ++s) lists.push_back(schedule_actions(kind, s, pp, m));
  std::vector<std::vector<int64_t>> forward_end(pp, std::vector<int64_t>(m, -1)), backward_end = forward_end;
  std::vector<size_t> next(pp, 0);
  std::vector<int64_t> now(pp, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t s = 0; s < pp; ++s) {
      while (next[s] < lists[s].size()) {
        const Action& a = lists[s][next[s]];
        int64_t ready = 0;
        if (a.kind == ActionKind::kForward && s > 0) ready = forward_end[s - 1][a.micro_batch];
        if (a.kind == ActionKind::kBackward)
          ready = s + 1 < pp ? backward_end[s + 1][a.micro_batch] : forward_end[s][a.micro_batch];
        if (ready < 0) break;
        now[s] = std::max(now[s], ready) + (a.kind == ActionKind::kForward ? 1 : 2);
        (a.kind == ActionKind::kForward ? forward_end : backward_end)[s][a.micro_batch] = now[s];
        ++next[s];
        moved = true;
      }
    }
  }
  for (int64_t s = 0; s < pp; ++s) {
    if (next[s] != lists[s].size()) return -1;
  }
  return *std::max_element(now.begin(), now.end());
}

}  // namespace

TEST_SUITE("runtime/pipeline/schedule") {
  TEST_CASE("1F1B on four stages is the published table") {
    CHECK(spelled(PipelineKind::k1F1B, 0, 4, 6) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5 ");
    CHECK(spelled(PipelineKind::k1F1B, 2, 4, 6) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5 ");
    CHECK(spelled(PipelineKind::k1F1B, 3, 4, 3) == "F0 B0 F1 B1 F2 B2 ");
    CHECK(spelled(PipelineKind::kGpipe, 1, 2, 3) == "F0 F1 F2 B0 B1 B2 ");
  }

  TEST_CASE("every schedule finishes, in the time of the bubble formula, and never reuses a live slot") {
    for (const PipelineKind kind : {PipelineKind::kGpipe, PipelineKind::k1F1B}) {
      for (int64_t pp = 1; pp <= 8; ++pp) {
        for (int64_t m = 1; m <= 17; ++m) {
          CAPTURE(pp);
          CAPTURE(m);
          CHECK(simulate(kind, pp, m) == 3 * (m + pp - 1));  // ideal 3m, bubble 3(p - 1)
          for (int64_t s = 0; s < pp; ++s) {
            std::vector<int64_t> held(m, -1);
            for (const Action& a : schedule_actions(kind, s, pp, m)) {
              if (a.kind == ActionKind::kForward) {
                REQUIRE(held[a.slot] == -1);
                held[a.slot] = a.micro_batch;
              } else {
                REQUIRE(held[a.slot] == a.micro_batch);
                held[a.slot] = -1;
              }
            }
          }
        }
      }
    }
  }
}
