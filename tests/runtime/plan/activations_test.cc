#include "runtime/plan/activations.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

using namespace cairn;

namespace {

Recipe llama_like() {
  Recipe r;
  r.name = "llama";
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
          if (tp == 1 && sequence_parallel) continue;
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
            CHECK(kept_norms_bytes(plan, rank) == 4 * (2 * c * R * 64 + 2 * 4 * R));  // of 4 layers
          }
        }
      }
    }
  }

  TEST_CASE("the published formulae, term by term: what is kept, and why what is not is not") {
    // Korthikanti et al. 2022, section 4: bytes a layer of 16-bit activations, b samples of s tokens, width h, a heads,
    // tensor parallel t. `everywhere`: on each tp rank whole, unless sequence parallelism splits it too.
    struct Term {
      const char* what;
      double sbh;   // bytes, of s b h
      double aSsb;  // bytes, of a s^2 b
      bool everywhere;
      const char* ours;  // our buffer of that size; null: not kept
    };
    const Term terms[] = {
        {"input of the attention norm", 2, 0, true, "attn.input"},
        {"its output, input of q, k, v", 2, 0, true, nullptr},  // computed again from the input
        {"q, k, v", 6, 0, false, "attn.qkv"},
        {"softmax, its dropout's mask and output", 0, 5, false, nullptr},  // never made: attention goes block by block
        {"input of the output projection", 2, 0, false, "attn.out"},
        {"mask of the attention's dropout", 1, 0, true, nullptr},  // none, or made again from its counter
        {"input of the MLP's norm", 2, 0, true, "mlp.input"},
        {"its output, input of the MLP", 2, 0, true, nullptr},  // computed again from the input
        {"input of the activation", 8, 0, false, "mlp.pre"},
        {"input of the second projection", 8, 0, false, nullptr},  // computed again from the activation's input
        {"mask of the MLP's dropout", 1, 0, true, nullptr}};
    constexpr int64_t h = 64, a = 8, s = 32, b = 2, sbh = s * b * h;
    Recipe recipe = llama_like();
    recipe.model = {.layers = 4,
                    .width = h,
                    .heads = a,
                    .kv_heads = a,
                    .head_dim = h / a,
                    .ffn = 4 * h,
                    .context = s,
                    .vocab = 1000};
    recipe.batch = {.samples = 8, .micro = b};
    recipe.precision = Precision::kBf16;
    for (const int64_t t : {1, 2, 4}) {
      for (const bool sequence_parallel : {false, true}) {
        if (t == 1 && sequence_parallel) continue;
        CAPTURE(t);
        CAPTURE(sequence_parallel);
        recipe.mesh.tp = t;
        recipe.mesh.sequence_parallel = sequence_parallel;
        recipe.recompute = {};
        const Plan plan = plan_of(recipe);
        const std::vector<BufferSpec> buffers = stage_buffers(plan, plan.rank(t - 1));
        double published = 0, kept = 0;
        for (const Term& term : terms) {
          CAPTURE(term.what);
          const double cut = term.everywhere && !sequence_parallel ? 1 : static_cast<double>(t);
          const double bytes = (term.sbh * sbh + term.aSsb * static_cast<double>(a * s * s * b)) / cut;
          published += bytes;
          if (term.ours == nullptr) continue;
          kept += bytes;
          CHECK(static_cast<double>(bytes_under(buffers, std::string("layers.1.") + term.ours)) == bytes);
        }
        const auto T = static_cast<double>(t), scores = 5.0 * a * s / h;
        CHECK(published == doctest::Approx(sbh * (sequence_parallel ? (34 + scores) / T : 10 + 24 / T + scores / T)));
        // Instead of the scores: the log-sum-exp, a float for each row and head.
        const double logsumexp = 4.0 * a * s * b / T;
        CHECK(static_cast<double>(bytes_under(buffers, "layers.1.")) == kept + logsumexp);

        // Recomputing the attention core leaves 34 s b h / t of theirs: without the scores, which we never keep. Ours
        // computes the core's output again as well.
        recipe.recompute = {RecomputeMode::kSelective};
        const Plan selective = plan_of(recipe);
        CHECK(static_cast<double>(bytes_under(stage_buffers(selective, selective.rank(0)), "layers.1.")) ==
              kept - 2.0 * sbh / T);
        // Full: 2 s b h, and 2 s b h / t where sequence parallelism or `distribute` splits it: theirs exactly.
        recipe.recompute = {RecomputeMode::kFull};
        const Plan full = plan_of(recipe);
        CHECK(bytes_under(stage_buffers(full, full.rank(0)), "layers.1.") == 2 * sbh / (sequence_parallel ? t : 1));
        if (sequence_parallel) continue;
        recipe.recompute.distribute = true;
        const Plan distributed = plan_of(recipe);
        CHECK(bytes_under(stage_buffers(distributed, distributed.rank(0)), "layers.1.") == 2 * sbh / t);
      }
    }
  }

  TEST_CASE("the first pipeline rank holds L layers' worth under 1F1B, whatever pp") {
    for (const int64_t pp : {1, 2, 4}) {
      Recipe recipe = llama_like();
      recipe.mesh.pp = pp;
      const Plan plan = plan_of(recipe);
      int64_t bytes = 0;
      for (const BufferSpec& buffer : stage_buffers(plan, plan.rank(0))) {
        if (buffer.name.starts_with("layers.")) bytes += buffer.bytes() * buffer.copies;
      }
      const std::vector<BufferSpec> buffers = stage_buffers(plan, plan.rank(0));
      CHECK(bytes == 4 * bytes_under(buffers, "layers.0."));  // p micro-batches of L / p layers
    }
  }

  TEST_CASE("recomputed buffers have one place for all layers, or one for each micro-batch between its backwards") {
    Recipe recipe = llama_like();
    recipe.mesh.pp = 2;
    recipe.recompute = {RecomputeMode::kFull, 1};
    const auto copies = [&](std::string_view name) {
      const Plan plan = plan_of(recipe);
      for (const BufferSpec& buffer : stage_buffers(plan, plan.rank(1))) {
        if (buffer.name == name) return buffer.copies;
      }
      return int64_t{0};
    };
    CHECK(copies("layers.2.attn.input") == 1);  // recomputed: the first layer of the stage
    CHECK(copies("layers.2.mlp.pre") == 0);
    CHECK(copies("layers.3.mlp.pre") == 1);
    CHECK(copies("shared.mlp.pre") == 1);
    CHECK(copies("layers.3.mlp.dpre") == 0);
    recipe.schedule = PipelineKind::kZbH1;  // rank 1 of 2: two in flight, both between their backwards at times
    CHECK(copies("layers.2.attn.input") == 2);
    CHECK(copies("layers.2.mlp.pre") == 2);
    CHECK(copies("layers.2.attn.logsumexp") == 0);  // the second half does not read it
    CHECK(copies("layers.3.mlp.pre") == 2);
    CHECK(copies("layers.3.attn.logsumexp") == 2);
    CHECK(copies("layers.3.mlp.dpre") == 2);
    CHECK(copies("layers.3.attn.dout") == 2);
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
    CHECK(!has(without, "scratch.dbranch"));
    CHECK(!has(without, "window_rotary.table"));
    Recipe options = recipe;
    options.model.branch_scale = 0.5;
    options.model.sliding_window = 3;
    options.model.window_rope_theta = 100;
    const Plan scaled = plan_of(options);
    CHECK(has(stage_buffers(scaled, scaled.rank(0)), "scratch.dbranch"));
    CHECK(has(stage_buffers(scaled, scaled.rank(0)), "window_rotary.table"));
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
    recipe.device = DeviceChoice::kCuda;  // 1.6 GB: they fit there
    CHECK(stage_dims(plan_of(recipe), plan_of(recipe).rank(0)).logit_rows == 8192);
    recipe.batch.samples = 176;
    recipe.batch.micro = 16;  // two parts of the same size
    CHECK(stage_dims(plan_of(recipe), plan_of(recipe).rank(0)).logit_rows == 8192);
    recipe.batch.micro = 11;
    CHECK(stage_dims(plan_of(recipe), plan_of(recipe).rank(0)).logit_rows == 5632);
    recipe.batch.micro = 8;
    recipe.device = DeviceChoice::kCpu;
    recipe.mesh.tp = 4;  // a quarter of the vocabulary each: all rows fit again
    const Plan cut = plan_of(recipe);
    CHECK(stage_dims(cut, cut.rank(3)).logit_rows == 8192);
  }
}
