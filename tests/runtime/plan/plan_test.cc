#include "runtime/plan/plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <map>

using namespace cairn;

namespace {

Recipe small_recipe() {
  Recipe r;
  r.name = "small";
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
                for (const int count : in_private) REQUIRE(count == 1);
                for (const int count : in_bank) REQUIRE(count <= 1);
                REQUIRE(mine.saved_elems * 4 % kPageBytes == 0);
                REQUIRE(std::is_sorted(mine.pieces.begin(), mine.pieces.end(),
                                       [](const auto& a, const auto& b) { return a.flat_offset < b.flat_offset; }));
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
                  for (const Bucket& b : mine.buckets) REQUIRE(b.share.size() == b.shard.size());
                }
                const auto gaps = std::ranges::count(in_bank, 0);
                REQUIRE(mine.optimizer_bytes == 12 * (updated + gaps) + RankPlan::kStepNumbersBytes);
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
    for (const Stage& stage : plan_stages(model, MeshConfig{.pp = 4}))
      counts.push_back(stage.end_layer - stage.first_layer);
    CHECK(counts == std::vector<int64_t>{1, 2, 2, 1});
    CHECK(plan_stages(model, MeshConfig{.pp = 2, .stages = {1, 5}})[1].first_layer == 1);
  }

  TEST_CASE("stages that cannot be are refused with the nearest ones") {
    const auto refused = [](const MeshConfig& mesh) {
      Recipe recipe = small_recipe();  // 6 layers
      recipe.mesh = mesh;
      if (mesh.virtual_stages > 1) recipe.schedule = PipelineKind::kInterleaved;
      return make_plan(recipe, mesh.pp).error().message;
    };
    CHECK(
        refused({.pp = 2, .stages = {1, 4}}) ==
        "mesh.stages = { 1, 4 } sums to 5, but model.layers = 6; accepted: 2 entries that sum to 6, such as { 2, 4 }");
    CHECK(refused({.pp = 3, .stages = {1, 5}}) ==
          "mesh.stages has 2 entries, but mesh.pp = 3; accepted: 3 entries that sum to 6, such as { 2, 2, 2 }");
    CHECK(
        refused({.pp = 3, .stages = {0, 5, 1}}) ==
        "mesh.stages[1] = 0: a stage needs at least one layer; accepted: 3 entries that sum to 6, such as { 1, 4, 1 }");
    CHECK(refused({.pp = 4, .virtual_stages = 2}) ==
          "mesh.pp = 4 x mesh.virtual_stages = 2 is 8 stages, more than model.layers = 6: each stage needs a layer; "
          "accepted: virtual_stages from 1 to 1");
  }

  TEST_CASE("embedding and head weigh as many layers as the recipe says when stages are balanced") {
    const auto counts = [](int64_t layers, const MeshConfig& mesh) {
      std::vector<int64_t> out;
      for (const Stage& stage : plan_stages(ModelConfig{.layers = layers}, mesh)) {
        out.push_back(stage.end_layer - stage.first_layer);
      }
      return out;
    };
    // BLOOM-176B: 70 layers and the two on 12 stages; Llama-3 405B: 126 layers on 16.
    CHECK(counts(70, {.pp = 12, .embedding_weight = 1, .head_weight = 1}) ==
          std::vector<int64_t>{5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5});
    std::vector<int64_t> llama(16, 8);
    llama.front() = llama.back() = 7;
    CHECK(counts(126, {.pp = 16, .embedding_weight = 1, .head_weight = 1}) == llama);
    CHECK(counts(8, {.pp = 2, .head_weight = 2.5}) == std::vector<int64_t>{5, 3});
    CHECK(counts(8, {.pp = 2, .virtual_stages = 2, .embedding_weight = 1, .head_weight = 3}) ==
          std::vector<int64_t>{1, 3, 3, 1});
    CHECK(counts(4, {.pp = 4, .head_weight = 100}) == std::vector<int64_t>{1, 1, 1, 1});  // each has at least one
  }

  TEST_CASE("gradients that are added up micro-batch by micro-batch do not go with backwards in two halves") {
    Recipe recipe = small_recipe();
    recipe.mesh.pp = 2;
    recipe.schedule = PipelineKind::kZbH1;
    recipe.optimizer.zero = 1;
    CHECK(make_plan(recipe, 4).ok());
    recipe.optimizer.zero = 2;
    CHECK(make_plan(recipe, 4).error().message.find("accepted: optimizer.zero = 1, or schedule = \"1f1b\"") !=
          std::string::npos);
  }

  TEST_CASE("a V puts the first and the last stage on rank 0, where a tied embedding is there once") {
    Recipe recipe = small_recipe();
    recipe.model.layers = 4;
    recipe.model.tied_embeddings = true;
    recipe.mesh.tp = 1;
    recipe.mesh.pp = 2;
    recipe.mesh.virtual_stages = 2;
    recipe.schedule = PipelineKind::kZbV;
    const Plan plan = make_plan(recipe, 2).value();
    CHECK(!plan.has_table_copy());
    const RankPlan first = plan.rank(0), second = plan.rank(1);
    CHECK((first.embedding() && first.head() && !second.embedding() && !second.head()));
    CHECK((first.chunks[0].stage.first_layer == 0 && first.chunks[1].stage.first_layer == 3));
    CHECK((second.chunks[0].stage.first_layer == 1 && second.chunks[1].stage.first_layer == 2));
    for (const LocalTensor& tensor : first.tensors) CHECK(!tensor.table_copy);
    recipe.schedule = PipelineKind::kInterleaved;
    CHECK(make_plan(recipe, 2).value().has_table_copy());
  }

  TEST_CASE("a batch that micro x dp does not divide is refused with the nearest ones") {
    Recipe recipe = small_recipe();
    recipe.batch = {.samples = 10, .micro = 2};
    const auto plan = make_plan(recipe, 2);
    REQUIRE_FALSE(plan.ok());
    CHECK(plan.error().message ==
          "batch.samples = 10 cannot be cut: micro 2 x dp 2 = 4 does not divide it (dp = world 2 / (tp 1 x pp 1) = 2); "
          "accepted: micro 1 or 5; or samples 8 or 12; or batch.uneven = true");
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

  TEST_CASE("experts over ranks: each is on one part, in buckets of its own that the part's replicas divide") {
    Recipe recipe = small_recipe();
    recipe.model.activation = Activation::kSwiGlu;
    recipe.model.bias = false;
    recipe.model.moe = {.experts = 4, .top_k = 2, .shared_experts = 1};
    recipe.optimizer.zero = 2;
    recipe.mesh.ep = 2;
    for (const Deterministic deterministic : {Deterministic::kLayout, Deterministic::kRun}) {
      recipe.deterministic = deterministic;
      recipe.mesh.tp = deterministic == Deterministic::kRun ? 2 : 1;  // the other mode does not cut experts
      const Plan plan = make_plan(recipe, 4 * recipe.mesh.tp).value();
      std::vector<std::vector<int>> seen;
      for (const TensorSpec& tensor : plan.tensors) seen.emplace_back(count_elems(tensor.shape), 0);
      for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
        const RankPlan mine = plan.rank(rank);
        for (const LocalTensor& local : mine.tensors) {
          const int64_t expert = plan.tensors[local.tensor].expert;
          REQUIRE((expert < 0 || expert / 2 == mine.expert_part));
          const auto in = std::find_if(mine.buckets.begin(), mine.buckets.end(),
                                       [&](const Bucket& b) { return local.offset < b.range.end; });
          REQUIRE(in->experts == (expert >= 0));
        }
        for (const Bucket& bucket : mine.buckets) {
          REQUIRE(bucket.shard.size() * (bucket.experts ? 2 : 4) == bucket.range.size());
          REQUIRE(bucket.share.size() == bucket.shard.size());
        }
        for (const Unit& unit : mine.units) {
          const int64_t apart = plan.expert_sources() > 1 ? unit.experts.size() : 0;
          REQUIRE((unit.layer >= 0) == (unit.experts.size() > 0));
          for (const LocalTensor& local : mine.tensors) {
            if (plan.tensors[local.tensor].expert < 0 || plan.tensors[local.tensor].layer != unit.layer) continue;
            if (apart == 0) continue;
            REQUIRE(mine.grad_at(local, 1) == unit.source_grads_at + local.offset - unit.experts.begin);
            REQUIRE(mine.grad_at(local, 1) + count_elems(local.shape) <= unit.source_grads_at + apart);
          }
        }
        for (const StatePiece& piece : mine.pieces) {
          if (!piece.primary) continue;
          const Shape& shape = plan.tensors[piece.tensor].shape;
          std::vector<int64_t> index = piece.box.lo;
          const int64_t width = piece.box.extent(piece.box.dims() - 1);
          for (int64_t done = 0; done < piece.count_elems(); done += width, ++index[0]) {
            const int64_t flat = flat_offset(shape, index);
            for (int64_t c = 0; c < width; ++c) ++seen[piece.tensor][flat + c];
          }
        }
      }
      for (const std::vector<int>& tensor : seen) {
        REQUIRE(std::all_of(tensor.begin(), tensor.end(), [](int n) { return n == 1; }));
      }
    }
    const auto refused = [&](const std::function<void(Recipe&)>& change, int64_t world) {
      Recipe other = recipe;
      other.deterministic = Deterministic::kRun;
      change(other);
      const auto plan = make_plan(other, world);
      REQUIRE_FALSE(plan.ok());
      return plan.error().message;
    };
    CHECK(refused([](Recipe& r) { r.model.moe.experts = 0; }, 8) ==
          "mesh.ep = 2 divides experts, and the model has none; accepted: ep 1, or model.moe");
    CHECK(refused([](Recipe& r) { r.model.moe.experts = 5; }, 8) ==
          "mesh.ep = 2 does not divide model.moe.experts = 5; accepted: ep 1 or 5");
    CHECK(refused(
              [](Recipe& r) {
                r.batch.samples = 12;
                r.mesh.shard = 4;
                r.mesh.tp = 1;
              },
              12) ==
          "mesh.shard = 4 cuts the 6 replicas that hold the same experts with mesh.ep = 2 (dp = world 12 / (tp 1 x pp "
          "1) = 12); accepted: shard 3 or 6");
  }

  TEST_CASE("of a run under way, a schedule of rates has what was left where it began") {
    Recipe r = small_recipe();  // of 8 samples a step
    r.stop = {Span::Unit::kSamples, 800};
    const auto over = [&](double steps) {
      r.optimizer.lr = {{LrStage::Kind::kLinear, {Span::Unit::kSteps, steps}, 0}};
    };
    const auto refusal = [&](const RunPast& past) {
      const Result<Plan> plan = make_plan(r, 1, past);
      return plan.ok() ? "" : plan.error().message;
    };
    const RunPast at_60{.lr_step = 60};
    over(41);
    CHECK(refusal(at_60).empty());  // optimizer.lr_from = "start"
    r.optimizer.lr_from = LrFrom::kStage;
    CHECK(refusal({}).empty());
    CHECK(refusal(at_60) ==
          "optimizer.lr: its stages take 41 steps, but the run stops after 40 more (stop = 800 samples); accepted: "
          "stages that sum to at most stop; leave out `over` of one to fill the rest");
    r.optimizer.lr.push_back({LrStage::Kind::kHold, {}, 0});
    CHECK(refusal(at_60).find("optimizer.lr[2] has no time left") == 0);
    over(40);
    CHECK(refusal(at_60).empty());
    r.optimizer.lr.push_back({LrStage::Kind::kHold, {Span::Unit::kFraction, 0.1}, 0});  // 4 of the 40
    CHECK(refusal(at_60).find("its stages take 44 steps, but the run stops after 40 more") != std::string::npos);
    CHECK(refusal({.lr_step = 100}).empty());  // over before it begins

    // Where the past had another batch, the run does not end where 8 samples a step would end it.
    r.optimizer.lr_from = LrFrom::kStart;
    const RunPast of_four{.points = {{50, 200, 200 * 8}}};
    over(125);
    CHECK(refusal({}).find("its stages take 125 steps, but the run stops after 100 (stop") != std::string::npos);
    REQUIRE(refusal(of_four).empty());
    CHECK(make_plan(r, 1, of_four).value().steps == 125);
  }
}
