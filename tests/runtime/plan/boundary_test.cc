// What a rank sends of a boundary tensor.
#include "runtime/plan/boundary.h"

#include <doctest/doctest.h>

#include "runtime/plan/communication.h"

using namespace cairn;

namespace {

Recipe piped(int64_t tp, bool sequence_parallel) {
  Recipe r;
  r.name = "boundary";
  r.stop = {Span::Unit::kSteps, 10};
  r.model = {
      .layers = 4, .width = 48, .heads = 4, .kv_heads = 4, .head_dim = 12, .ffn = 64, .context = 16, .vocab = 64};
  r.batch = {.samples = 6, .micro = 2};
  r.mesh = {.tp = tp, .pp = 2, .sequence_parallel = sequence_parallel};
  return r;
}

Plan plan_of(const Recipe& recipe) { return make_plan(recipe, recipe.mesh.tp * recipe.mesh.pp).value(); }

Volume of(const Plan& plan, std::string_view group, int64_t rank, Volume Traffic::*kind) {
  for (const GroupTraffic& told : step_traffic(plan, plan.rank(rank))) {
    if (told.group == group) return told.traffic.*kind;
  }
  return {};
}

}  // namespace

TEST_SUITE("runtime/plan/boundary") {
  TEST_CASE("parts are equal, of whole cache lines, and cover the tensor") {
    for (const int64_t bytes : {1, 63, 64, 65, 128, 1000, 4096, 6000, 1 << 20}) {
      for (const int64_t parts : {1, 2, 3, 4, 7, 8, 64}) {
        CAPTURE(bytes);
        CAPTURE(parts);
        const BoundaryTensor tensor = cut_boundary(bytes, parts);
        CHECK(tensor.bytes == bytes);
        CHECK((tensor.parts == parts || tensor.parts == 1));
        CHECK(tensor.parts * tensor.part_bytes >= bytes);
        CHECK(tensor.room_bytes() == tensor.parts * tensor.part_bytes);
        CHECK((tensor.parts > 1) == (parts > 1 && bytes > kBoundaryPartAlign));
        if (tensor.parts > 1) {
          CHECK(tensor.part_bytes % kBoundaryPartAlign == 0);
          CHECK(tensor.part_bytes < bytes);
          CHECK(tensor.part_bytes - (bytes + parts - 1) / parts < kBoundaryPartAlign);
        }
        CHECK(tensor.sent_bytes(true) == bytes);
        CHECK(tensor.sent_bytes(false) == tensor.part_bytes);
      }
    }
  }

  TEST_CASE("without sequence parallelism a tp rank sends its part; with it its own rows, all of them") {
    const int64_t rows_bytes = 2 * 16 * 48 * 4;
    for (const int64_t tp : {1, 2, 4}) {
      CAPTURE(tp);
      const Plan alike = plan_of(piped(tp, false));
      CHECK(boundary_tensor(alike).bytes == rows_bytes);
      CHECK(boundary_tensor(alike).part_bytes == rows_bytes / tp);
      CHECK(of(alike, kForwardGroup, 0, &Traffic::send) == Volume{3 * rows_bytes / tp, 3});
      CHECK(of(alike, kBackwardGroup, alike.mesh.world() - 1, &Traffic::send) == Volume{3 * rows_bytes / tp, 3});
      if (tp == 1) continue;
      const Plan divided = plan_of(piped(tp, true));
      CHECK(boundary_tensor(divided).parts == 1);
      CHECK(boundary_tensor(divided).bytes == rows_bytes / tp);
      CHECK(of(divided, kForwardGroup, 0, &Traffic::send) == of(alike, kForwardGroup, 0, &Traffic::send));
      // One all-gather for each tensor that comes; nothing else is gathered here.
      CHECK(of(alike, kTpGroup, 0, &Traffic::all_gather) == Volume{3 * rows_bytes / tp, 3});
    }
  }

  TEST_CASE("what does not divide evenly has room for the rest, and what stays on a rank is not gathered") {
    Recipe recipe = piped(2, false);
    recipe.model.activation = Activation::kSwiGlu;
    recipe.model.moe = {.experts = 6, .top_k = 2, .aux_loss = 0.1, .aux_scope = AuxScope::kModel};
    recipe.schedule = PipelineKind::kZbV;
    recipe.mesh.virtual_stages = 2;
    const Plan plan = plan_of(recipe);
    const BoundaryTensor tensor = boundary_tensor(plan);
    CHECK(tensor.bytes == 2 * 16 * 48 * 4 + 6 * 4);  // with the choices of each expert
    CHECK(tensor.part_bytes == 3136);                // of 3084
    CHECK(plan.boundary_buffers_bytes() == boundary_buffers(plan.schedule()).total() * 2 * 3136);
    // Rank 0: stages 0 and 3; rank 1, behind it, 1 and 2, whose boundary does not leave it.
    const int64_t last = plan.mesh.rank({.tp = 1, .pp = 1});
    CHECK(of(plan, kForwardGroup, 0, &Traffic::send) == Volume{3 * tensor.part_bytes, 3});
    CHECK(of(plan, kForwardGroup, last, &Traffic::send) == Volume{3 * (tensor.part_bytes + tensor.bytes), 6});
    CHECK(of(plan, kTpGroup, last, &Traffic::all_gather) == Volume{6 * tensor.part_bytes, 6});
  }
}
