#include "tools/planner/memory.h"

#include <algorithm>
#include <numeric>

#include "runtime/plan/activations.h"
#include "runtime/plan/communication.h"

namespace cairn::tools {

int64_t StageMemory::layers() const {
  int64_t sum = 0;
  for (const Chunk& chunk : chunks) sum += chunk.stage.end_layer - chunk.stage.first_layer;
  return sum;
}

int64_t StageMemory::in_flight() const {
  int64_t sum = 0;
  for (const Chunk& chunk : chunks) sum += chunk.in_flight;
  return sum;
}

bool StageMemory::same_weights(const StageMemory& other) const {
  return layers() == other.layers() && parameters == other.parameters;
}

bool StageMemory::same_size(const StageMemory& other) const {
  return same_weights(other) && in_flight() == other.in_flight() && total() == other.total();
}

StageMemory stage_memory(const Plan& plan, int64_t pp, bool with_traffic) {
  const RankPlan rank = plan.rank(plan.mesh.rank({.tp = 0, .dp = 0, .pp = pp}));
  const int64_t on_disk = plan.recipe.optimizer.offload.empty() ? 0 : rank.bank_bytes();
  StageMemory out{.chunks = rank.chunks,
                  .weight_bytes = rank.weight_bytes,
                  .gathered_bytes = rank.gathered_bytes,
                  .grad_bytes = rank.grad_bytes,
                  .optimizer_bytes = rank.optimizer_bytes - on_disk,
                  .activation_bytes = largest_stage_buffers_bytes(plan, rank.rank),
                  .boundary_bytes = plan.boundary_buffers_bytes(),
                  .snapshot_bytes = rank.bank_bytes(),
                  .restored_bytes = rank.bank_bytes() + rank.private_bytes()};
  for (const LocalTensor& tensor : rank.tensors) out.parameters += tensor.box.count_elems();
  if (with_traffic) out.traffic = step_traffic(plan, rank);
  return out;
}

int64_t largest_rank_bytes(const Plan& plan) {
  std::vector<int64_t> stages = {0, std::min<int64_t>(1, plan.mesh.pp() - 1), plan.mesh.pp() - 1};
  if (plan.recipe.model.layers % (plan.mesh.pp() * plan.recipe.mesh.virtual_stages) != 0 ||
      !plan.recipe.mesh.stages.empty()) {
    stages.resize(static_cast<size_t>(plan.mesh.pp()));
    std::iota(stages.begin(), stages.end(), 0);
  }
  int64_t most = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (i > 0 && stages[i] == stages[i - 1]) continue;
    most = std::max(most, stage_memory(plan, stages[i], false).total());
  }
  return most;
}

}  // namespace cairn::tools
