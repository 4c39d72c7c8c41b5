#include "runtime/plan/activations.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

using namespace cairn;

namespace {

Recipe llama_like() {
  Recipe r;
  r.stop = {Span::Unit::kSteps, 1};
  r.model = {.layers = 4,
             .width = 64,
             .heads = 8,
             .kv_heads = 4,
             .head_dim = 16,
             .ffn = 96,
             .context = 32,
             .vocab = 1000,
             .positions = Positions::kRotary,
             .norm = NormKind::kRmsNorm,
             .activation = Activation::kSwiGlu,
             .bias = false,
             .tied_embeddings = false};
  r.batch = {.samples = 8, .micro = 2};
  return r;
}

Plan plan_of(const Recipe& recipe) { return make_plan(recipe, recipe.mesh.tp * recipe.mesh.pp).value(); }

int64_t bytes_under(const std::vector<BufferSpec>& buffers, std::string_view prefix) {
  int64_t bytes = 0;
  for (const BufferSpec& buffer : buffers) {
    if (buffer.name.starts_with(prefix)) bytes += buffer.bytes();
  }
  return bytes;
}

bool has(const std::vector<BufferSpec>& buffers, std::string_view name) {
  return std::any_of(buffers.begin(), buffers.end(), [&](const BufferSpec& b) { return b.name == name; });
}

}  // namespace

TEST_SUITE("runtime/plan/activations") {
  TEST_CASE("a layer saves what the formula says, cut by tp, its residual stream only by sequence parallelism") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      for (const int64_t tp : {1, 2, 4}) {
        for (const bool sequence_parallel : {false, true}) {
          Recipe recipe = llama_like();
          recipe.precision = precision;
          recipe.mesh.tp = tp;
          recipe.mesh.sequence_parallel = sequence_parallel;
          const Plan plan = plan_of(recipe);
          const int64_t c = precision == Precision::kBf16 ? 2 : 4;
          const int64_t T = 2 * 32, R = sequence_parallel ? T / tp : T;
          const int64_t wanted = c * (2 * R * 64 + T * ((8 + 2 * 4) * 16 + 8 * 16 + 2 * 96) / tp) + 4 * T * 8 / tp;
          for (int64_t rank = 0; rank < tp; ++rank) {
            CHECK(bytes_under(stage_buffers(plan, plan.rank(rank)), "layers.3.") == wanted);
          }
        }
      }
    }
  }

  TEST_CASE("the total counts saved buffers once for each micro-batch in flight, in whole cache lines") {
    Recipe recipe = llama_like();
    recipe.model.width = 60;  // nothing is a multiple of 64 bytes
    recipe.model.context = 31;
    recipe.mesh.pp = 2;
    for (const PipelineKind schedule : {PipelineKind::kGpipe, PipelineKind::k1F1B}) {
      recipe.schedule = schedule;
      const Plan plan = plan_of(recipe);
      for (int64_t stage = 0; stage < 2; ++stage) {
        const RankPlan rank = plan.rank(stage);
        int64_t wanted = 0;
        std::set<std::string> names;
        for (const BufferSpec& buffer : stage_buffers(plan, rank)) {
          CHECK(names.insert(buffer.name).second);
          CHECK(buffer.elems > 0);
          CHECK(buffer.bytes() % 64 == 0);
          CHECK(buffer.bytes() - buffer.elems * dtype_size_bytes(buffer.dtype) < 64);
          wanted += buffer.bytes() * buffer.copies;
        }
        CHECK(stage_buffers_bytes(plan, rank) == wanted);
        CHECK(rank.chunks[0].in_flight == (schedule == PipelineKind::kGpipe ? 4 : 2 - stage));
        CHECK(names.contains("layers.0.mlp.pre") == (stage == 0));
        CHECK(names.contains("layers.3.mlp.pre") == (stage == 1));
        CHECK(names.contains("head.logits") == (stage == 1));
      }
    }
  }

  TEST_CASE("buffers exist only for the parts that the model has") {
    Recipe recipe = llama_like();
    const Plan llama = plan_of(recipe);
    const auto without = stage_buffers(llama, llama.rank(0));
    CHECK(has(without, "rotary.table"));
    CHECK(!has(without, "scratch.mean"));
    CHECK(!has(without, "scratch.dbias"));
    CHECK(!has(without, "head.local_max"));
    recipe.model.positions = Positions::kLearned;
    recipe.model.norm = NormKind::kLayerNorm;
    recipe.model.bias = true;
    recipe.mesh.tp = 2;
    const Plan gpt2 = plan_of(recipe);
    const auto with = stage_buffers(gpt2, gpt2.rank(0));
    CHECK(!has(with, "rotary.table"));
    CHECK(has(with, "scratch.mean"));
    CHECK(has(with, "scratch.dbias"));
    CHECK(has(with, "head.local_max"));
  }

  TEST_CASE("logits keep all rows while they fit the limit, and as many as fit beyond it") {
    Recipe recipe = llama_like();
    recipe.model.vocab = 50257;
    recipe.model.context = 1024;
    CHECK(stage_dims(plan_of(recipe), plan_of(recipe).rank(0)).logit_rows == 2048);  // 2048 x 50304 x 4 = 412 MB
    recipe.batch.micro = 8;
    const Plan plan = plan_of(recipe);
    const StageDims dims = stage_dims(plan, plan.rank(0));
    CHECK(dims.vocab == 50304);
    CHECK(dims.logit_rows == (512 << 20) / (50304 * 4));
    recipe.mesh.tp = 4;  // a quarter of the vocabulary each: all rows fit again
    const Plan cut = plan_of(recipe);
    CHECK(stage_dims(cut, cut.rank(3)).logit_rows == 8192);
  }
}
