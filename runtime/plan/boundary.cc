#include "runtime/plan/boundary.h"

namespace cairn {

BoundaryTensor cut_boundary(int64_t bytes, int64_t parts) {
  const int64_t lines = (bytes + kBoundaryPartAlign - 1) / kBoundaryPartAlign;
  const int64_t part_bytes = (lines + parts - 1) / parts * kBoundaryPartAlign;
  if (parts == 1 || part_bytes >= bytes) return {.bytes = bytes, .part_bytes = bytes};
  return {.bytes = bytes, .parts = parts, .part_bytes = part_bytes};
}

BoundaryTensor boundary_tensor(const Plan& plan, int64_t micro) {
  const Recipe& recipe = plan.recipe;
  const bool divided = recipe.mesh.sequence_parallel;
  const int64_t tp = plan.mesh.tp();
  const int64_t rows = micro * recipe.model.context / plan.mesh.cp() / (divided ? tp : 1);
  const int64_t choices = balances_over_layers(recipe.model) ? recipe.model.moe.experts * 4 : 0;
  return cut_boundary(rows * recipe.model.width * dtype_size_bytes(plan.compute_dtype()) + choices, divided ? 1 : tp);
}

BoundaryTensor boundary_tensor(const Plan& plan) { return boundary_tensor(plan, plan.recipe.batch.micro); }

bool passes_to_itself(const ScheduleShape& shape, int64_t stage) {
  return stage >= 0 && stage + 1 < shape.pp * shape.chunks &&
         place_of(shape, stage).rank == place_of(shape, stage + 1).rank;
}

}  // namespace cairn
