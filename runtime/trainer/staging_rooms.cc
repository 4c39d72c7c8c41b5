// An operation's room is all that it moves through the host's memory: of a gather the bytes of all members, of a
// reduction that adds to what is there the sum too (runtime/cuda/staged/staged_engine.cc). Legend of
// runtime/plan/activations.h; c bytes of the compute type.
#include "runtime/trainer/staging_rooms.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "runtime/plan/activations.h"
#include "runtime/plan/communication.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/schedule.h"

namespace cairn::trainer {
namespace {

class Rooms {
 public:
  Rooms(const Plan& plan, const RankPlan& rank)
      : plan_(plan), rank_(rank), d_(stage_dims(plan, rank)), elem_(dtype_size_bytes(plan.compute_dtype())) {}

  StagingRooms all() && {
    const Mesh& mesh = plan_.mesh;
    if (mesh.tp() > 1) tensor_parallel();
    if (plan_.kv_copies() > 1) own(rank_.partial_elems * 4);
    if (mesh.cp() > 1) context_parallel();
    if (mesh.ep() > 1 && d_.experts > 0) experts();
    if (mesh.pp() > 1) pipeline();
    factors();
    if (mesh.world() > 1) own(std::max({kNormNumbers * 8, rank_.tensor_norms * 8, rank_.head_numbers * 4}));
    buckets();
    return out_;
  }

 private:
  void own(int64_t bytes) { out_.own_bytes = std::max(out_.own_bytes, bytes); }
  void lane(int64_t bytes) { out_.lane_bytes = std::max(out_.lane_bytes, bytes); }

  void tensor_parallel() {
    const ModelConfig& m = plan_.recipe.model;
    const int64_t sums = d_.all_parts > 1 ? 4 : elem_;  // parts are added before they are rounded
    // Rows of the stream and of the embedding, summed or gathered; norms over all heads; maxima and sums of logits.
    own(d_.rows * std::max(d_.width, d_.embed) * sums);
    own(d_.rows * d_.latent() * elem_);
    if (m.qk_norm == QkNorm::kWhole) own(4 * d_.rows * 4);
    if (d_.all_token_parts > 1) own(2 * d_.held.parts * shared_norm_sums(m) * d_.head_dim * 4);
    if (rank_.head()) own(2 * d_.rows * 4);
    if (d_.experts > 0) own(d_.rows * (d_.choices + (m.moe.shared_gate ? 1 : 0)) * 4);
    own(rank_.partial_elems * 4);
    own(rank_.tp_work.size() * 8);
  }

  void context_parallel() {
    const int64_t kv = d_.cp * d_.rows * 2 * d_.kv_heads * d_.head_dim;
    own(kv * (d_.all_token_parts > 1 ? 4 : elem_));
    own(d_.experts * 4);
  }

  void experts() {
    own(d_.ep * d_.experts * 4);  // how many rows for whom
    own((d_.rows * d_.choices + d_.expert_rows) * std::max(d_.width * elem_, int64_t{4}));
  }

  void pipeline() {
    const ScheduleShape shape = plan_.schedule();
    const BoundaryBuffers buffers = boundary_buffers(shape);
    std::set<int64_t> before, after;  // ranks that messages go to
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      const int64_t stage = stage_at(shape, rank_.at.pp, chunk);
      if (stage > 0) before.insert(place_of(shape, stage - 1).rank);
      if (stage + 1 < shape.pp * shape.chunks) after.insert(place_of(shape, stage + 1).rank);
    }
    out_.messages = std::ssize(after) * buffers.activations + std::ssize(before) * buffers.gradients;
    out_.message_bytes = plan_.boundary_bytes();
    own(plan_.boundary_bytes());  // what is received
    if (!plan_.has_table_copy() || !(rank_.embedding() || rank_.head())) return;
    const LocalTensor* const tied = rank_.find(plan_.tensors, "embed.tokens");
    for (const Bucket& bucket : rank_.buckets) {
      const bool of_table =
          bucket.range.begin >= tied->offset && bucket.range.begin < tied->offset + count_elems(tied->shape);
      if (of_table) own(bucket.shard.size() * 4);
    }
  }

  /// Adafactor's sums of squares over shards.
  void factors() {
    if (plan_.shard_size() > 1) own(rank_.dense_work * 8);
    if (plan_.mesh.ep() > 1 && plan_.shard_size(true) > 1) own(rank_.expert_work * 8);
  }

  void buckets() {
    for (const Bucket& bucket : rank_.buckets) {
      const int64_t shards = plan_.shard_size(bucket.experts), replicas = plan_.replicas(bucket.experts) / shards;
      if (shards > 1) lane(bucket.range.size() * 4 + (rank_.scattered_grads ? bucket.shard.size() * 4 : 0));
      if (replicas > 1) lane(bucket.shard.size() * 4);
    }
  }

  const Plan& plan_;
  const RankPlan& rank_;
  const StageDims d_;
  const int64_t elem_;
  StagingRooms out_;
};

}  // namespace

StagingRooms staging_rooms(const Plan& plan, int64_t rank) {
  StagingRooms out;
  std::set<std::tuple<int64_t, int64_t, int64_t, int64_t>> seen;  // most stages of a ramp are alike
  for (size_t k = 0; k < plan.step_stages.size(); ++k) {
    const StepStage& stage = plan.step_stages[k];
    const ScheduleShape shape = schedule_shape(plan.recipe, stage.micro_batches(plan.mesh.dp()));
    const BoundaryBuffers buffers = plan.mesh.pp() > 1 ? boundary_buffers(shape) : BoundaryBuffers{};
    if (!seen.insert({stage.micro, stage.tokens, buffers.activations, buffers.gradients}).second) continue;
    const Plan at = plan.at(k);
    const StagingRooms of = Rooms(at, at.rank(rank)).all();
    out.own_bytes = std::max(out.own_bytes, of.own_bytes);
    out.lane_bytes = std::max(out.lane_bytes, of.lane_bytes);
    out.messages = std::max(out.messages, of.messages);
    out.message_bytes = std::max(out.message_bytes, of.message_bytes);
  }
  return out;
}

}  // namespace cairn::trainer
