#include "runtime/plan/plan.h"

#include <doctest/doctest.h>

#include <map>

using namespace cairn;

namespace {

Recipe small_recipe() {
  Recipe r;
  r.stop = {Span::Unit::kSteps, 10};
  r.model = {.layers = 6, .width = 24, .heads = 4, .kv_heads = 4, .head_dim = 6, .ffn = 40, .context = 8, .vocab = 65};
  r.batch = {.samples = 8, .micro = 1};
  return r;
}

}  // namespace

TEST_SUITE("runtime/plan/plan") {
  TEST_CASE("over any mesh the primary pieces tile every logical tensor exactly once") {
    for (const bool tied : {true, false}) {
      for (const auto& [zero, shard, bucket] : std::vector<std::tuple<int, int64_t, int64_t>>{
               {0, 0, 0}, {1, 0, 0}, {1, 0, 1000}, {0, 0, 1000}, {2, 0, 1000}, {3, 0, 0}, {1, 2, 0}, {3, 2, 500}}) {
        for (const int64_t tp : {1, 2, 4}) {
          for (const int64_t pp : {1, 2, 4}) {
            for (const int64_t dp : {1, 2, 4}) {
              Recipe recipe = small_recipe();
              recipe.model.tied_embeddings = tied;
              if (shard > 0 && dp == 1) continue;
              recipe.optimizer.zero = zero;
              recipe.optimizer.bucket = bucket;
              recipe.mesh.shard = shard;
              recipe.mesh.tp = tp;
              recipe.mesh.pp = pp;
              const Plan plan = make_plan(recipe, tp * pp * dp).value();
              std::vector<std::vector<int>> seen;
              for (const TensorSpec& tensor : plan.tensors) seen.emplace_back(count_elems(tensor.shape), 0);
              for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
                const RankPlan mine = plan.rank(rank);
                int64_t covered = 0;
                for (const Bucket& b : mine.buckets) {
                  REQUIRE(b.range.begin == covered);
                  REQUIRE(b.range.size() <= plan.bucket_elems());
                  REQUIRE(b.shard.size() * plan.shard_size() == b.range.size());
                  REQUIRE(b.share.size() * dp == b.range.size());
                  REQUIRE(b.share.begin >= b.shard.begin);
                  REQUIRE(b.share.end <= b.shard.end);
                  covered += b.range.size();
                }
                REQUIRE(covered == mine.flat_elems);
                REQUIRE(mine.shard_elems * plan.shard_size() == mine.flat_elems);
                // Every element held has state exactly once: saved pieces in a bank, all other in private memory.
                std::vector<int> in_bank(mine.saved_elems, 0), in_private(mine.private_elems, 0), flat(mine.flat_elems);
                for (const StatePiece& piece : mine.pieces) {
                  auto& home = piece.primary ? in_bank : in_private;
                  for (int64_t k = 0; k < piece.count_elems(); ++k) ++home.at(piece.state_offset + k);
                  for (int64_t k = 0; k < piece.count_elems(); ++k) ++flat.at(piece.flat_offset + k);
                }
                for (const ReplicaRun& replica : mine.replicas) {
                  for (int64_t k = 0; k < replica.count; ++k) ++in_private.at(replica.state_offset + k);
                  for (int64_t k = 0; k < replica.count; ++k) ++flat.at(replica.flat_offset + k);
                }
                for (const auto* home : {&in_bank, &in_private}) {
                  for (const int count : *home) REQUIRE(count == 1);
                }
                int64_t held = 0, updated = 0;
                for (const LocalTensor& tensor : mine.tensors) held += tensor.box.count_elems();
                for (const int count : flat) {
                  REQUIRE(count <= 1);
                  updated += count;
                }
                if (zero == 0 || dp == 1) {
                  REQUIRE(updated == held);
                }
                if ((zero > 0 && shard == 0) || shard == dp || dp == 1) {
                  REQUIRE(mine.replicas.empty());
                }
                REQUIRE(mine.optimizer_bytes == 12 * updated);
                for (const StatePiece& piece : mine.pieces) {
                  if (!piece.primary) continue;
                  const Shape& shape = plan.tensors[piece.tensor].shape;
                  const int64_t at = flat_offset(shape, piece.box.lo);
                  // Rows of a column-cut box are apart in the logical tensor: walk them.
                  const int64_t width = piece.box.extent(piece.box.dims() - 1);
                  const int64_t row = shape.back();
                  for (int64_t k = 0; k < piece.count_elems(); ++k)
                    ++seen[piece.tensor][at + k / width * row + k % width];
                }
              }
              for (const auto& tensor : seen) {
                for (const int count : tensor) REQUIRE(count == 1);
              }
            }
          }
        }
      }
    }
  }

  TEST_CASE("uneven stages keep the long ones in the middle, or follow the recipe") {
    ModelConfig model{.layers = 6};
    std::vector<int64_t> counts;
    for (const Stage& stage : plan_stages(model, MeshConfig{.pp = 4}).value())
      counts.push_back(stage.end_layer - stage.first_layer);
    CHECK(counts == std::vector<int64_t>{1, 2, 2, 1});
    CHECK(plan_stages(model, MeshConfig{.pp = 2, .stages = {1, 5}}).value()[1].first_layer == 1);
    CHECK(plan_stages(model, MeshConfig{.pp = 2, .stages = {1, 4}}).error().message ==
          "mesh.stages sum to 5 layers, model.layers = 6");
  }

  TEST_CASE("a batch that micro x dp does not divide is refused with the nearest ones") {
    Recipe recipe = small_recipe();
    recipe.batch = {.samples = 10, .micro = 2};
    const auto plan = make_plan(recipe, 2);
    REQUIRE_FALSE(plan.ok());
    CHECK(plan.error().message ==
          "batch.samples = 10 cannot be cut: micro 2 x dp 2 = 4 does not divide it; nearest batches: 8, 12");
  }

  TEST_CASE("GPT-2 124M has 124,439,808 parameters") {
    const ModelConfig gpt2{.layers = 12,
                           .width = 768,
                           .heads = 12,
                           .kv_heads = 12,
                           .head_dim = 64,
                           .ffn = 3072,
                           .context = 1024,
                           .vocab = 50257};
    CHECK(count_parameters(gpt2) == 124439808);
  }
}
