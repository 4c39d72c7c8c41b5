#pragma once
// What a rank allocates, and what a step moves, counted by the communicators, against what the plan says.

#include <doctest/doctest.h>

#include <map>

#include "runtime/plan/activations.h"
#include "runtime/plan/communication.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/support/ok.h"

namespace cairn::test {

/// Every rank has allocated what the plan says, to the byte.
inline void check_allocated(const Plan& plan, const Trained& trained) {
  REQUIRE(std::ssize(trained.allocated_bytes) == plan.mesh.world());
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    const RankPlan mine = plan.rank(rank);
    CHECK(trained.allocated_bytes[rank] == mine.weight_bytes + mine.gathered_bytes + mine.grad_bytes +
                                               mine.optimizer_bytes + largest_stage_buffers_bytes(plan, rank) +
                                               plan.boundary_buffers_bytes());
  }
}

template <typename F>
Traffic combine(const Traffic& a, const Traffic& b, const F& f) {
  const auto volume = [&](const Volume& x, const Volume& y) {
    return Volume{f(x.bytes, y.bytes), f(x.calls, y.calls)};
  };
  return {volume(a.all_reduce, b.all_reduce),
          volume(a.reduce_scatter, b.reduce_scatter),
          volume(a.all_gather, b.all_gather),
          volume(a.broadcast, b.broadcast),
          volume(a.send, b.send),
          volume(a.all_to_all, b.all_to_all)};
}

inline std::string told(const GroupTraffic& g) {
  std::string out = fmt::format("{} of {}:", g.group, g.size);
  const Traffic& t = g.traffic;
  for (const auto& [name, volume] : {std::pair{"all_reduce", t.all_reduce},
                                     {"reduce_scatter", t.reduce_scatter},
                                     {"all_gather", t.all_gather},
                                     {"broadcast", t.broadcast},
                                     {"send", t.send},
                                     {"all_to_all", t.all_to_all}}) {
    out += fmt::format(" {} {}/{}", name, volume.bytes, volume.calls);
  }
  return out;
}

/// What the second step of a run moves is what the plan says, to the byte and the call, on every rank and in every
/// group; the bytes of an ep group's all_to_alls as the sum over its ranks, since routing divides them.
inline void check_step_traffic(Recipe recipe, int64_t world) {
  recipe.batch.samples = 8;
  recipe.optimizer.lr.clear();  // no rate moves a byte
  const Result<Plan> plan = make_plan(recipe, world);
  REQUIRE_OK(plan);
  const auto one_step = train_on_threads(recipe, world);
  recipe.stop.value = 2;
  const auto two_steps = train_on_threads(recipe, world);
  REQUIRE_OK(one_step);
  REQUIRE_OK(two_steps);
  std::map<std::vector<int64_t>, int64_t> owed;  // by ep group: bytes planned and not counted
  for (int64_t rank = 0; rank < world; ++rank) {
    std::vector<GroupTraffic> planned = step_traffic(plan.value(), plan.value().rank(rank));
    const auto& more = two_steps.value().traffic[rank];
    const auto& less = one_step.value().traffic[rank];
    std::vector<GroupTraffic> counted;
    for (size_t g = 0; g < more.size(); ++g) {
      GroupTraffic step{more[g].group, more[g].size,
                        combine(more[g].traffic, less[g].traffic, [](int64_t a, int64_t b) { return a - b; })};
      // Ends of the pipeline that have no embedding in common have a group for it, and never use it.
      if (step.group != kEmbeddingGroup || step.traffic != Traffic{}) counted.push_back(std::move(step));
    }
    for (std::vector<GroupTraffic>* groups : {&planned, &counted}) {
      for (GroupTraffic& group : *groups) {
        if (group.group != kExpertGroup) continue;
        owed[plan.value().mesh.expert_group(rank)] += (groups == &planned ? 1 : -1) * group.traffic.all_to_all.bytes;
        group.traffic.all_to_all.bytes = 0;
      }
    }
    REQUIRE(planned.size() == counted.size());
    for (size_t g = 0; g < planned.size(); ++g) CHECK(told(planned[g]) == told(counted[g]));
  }
  for (const auto& [group, bytes] : owed) CHECK(bytes == 0);
}

}  // namespace cairn::test
