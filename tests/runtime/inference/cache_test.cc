// Generation with a cache of keys and values against the whole text computed anew.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "runtime/inference/generate.h"
#include "runtime/inference/session.h"
#include "runtime/kernels/few_rows.h"
#include "tests/runtime/inference/drawn_session.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::inference;
using cairn::inference::testing::session_of;

namespace {

Recipe recipe_of(bool llama, Precision precision = Precision::kF32, int64_t context = 96) {
  Recipe r;
  r.name = "cache";
  r.seed = 5;
  r.stop = {Span::Unit::kSteps, 1};
  r.model = {.layers = 2,
             .width = 48,
             .heads = 6,
             .kv_heads = llama ? 2 : 6,
             .head_dim = 8,
             .ffn = 80,
             .context = context,
             .vocab = 61};
  if (llama) {
    r.model.positions = Positions::kRotary;
    r.model.norm = NormKind::kRmsNorm;
    r.model.activation = Activation::kSwiGlu;
    r.model.bias = false;
    r.model.tied_embeddings = false;
  }
  r.model.init_std = 0.3;  // so that tokens differ in their likelihood by more than rounding
  r.batch = {1, 1};
  r.optimizer.peak_lr = 1e-3;
  r.precision = precision;
  r.eval.steps = 1;
  return r;
}

std::vector<int32_t> random_tokens(size_t count, int seed, int32_t vocab = 61) {
  std::mt19937 draw(seed);
  std::vector<int32_t> out(count);
  for (int32_t& token : out) token = static_cast<int32_t>(draw() % static_cast<uint32_t>(vocab));
  return out;
}

std::vector<float> copy(const Result<std::span<const float>>& logits) {
  REQUIRE_OK(logits);
  return {logits.value().begin(), logits.value().end()};
}

double largest_difference(std::span<const float> a, std::span<const float> b) {
  REQUIRE(a.size() == b.size());
  double most = 0, scale = 1;
  for (size_t k = 0; k < a.size(); ++k) {
    most = std::max(most, std::abs(static_cast<double>(a[k]) - b[k]));
    scale = std::max(scale, std::abs(static_cast<double>(b[k])));
  }
  return most / scale;
}

std::vector<std::vector<int32_t>> generated(Session& session, const std::vector<std::vector<int32_t>>& prompts,
                                            const GenerateOptions& options) {
  std::vector<std::vector<int32_t>> out(prompts.size());
  const auto done = generate(session, prompts, options, [&](size_t k, int32_t token) {
    out[k].push_back(token);
    return true;
  });
  REQUIRE_OK(done);
  return out;
}

}  // namespace

TEST_SUITE("runtime/inference/cache") {
  TEST_CASE("logits with the cache are those of the whole text, for every length of prompt and of what follows") {
    for (const bool llama : {false, true}) {
      for (const Precision precision : {Precision::kF32, Precision::kBf16, Precision::kF16}) {
        CAPTURE(llama);
        CAPTURE(static_cast<int>(precision));
        // The sums run in another order. Float: measured 1e-6. bf16 rounds each activation to 8 bits, in two layers.
        const double gate = precision == Precision::kF32 ? 2e-5 : 4e-2;
        const std::unique_ptr<Session> session = session_of(recipe_of(llama, precision));
        const std::vector<int32_t> text = random_tokens(96, 3);
        for (const size_t prompt : {1, 7, 8, 9, 64, 75, 96}) {
          CAPTURE(prompt);
          REQUIRE(session->make_cache(2, 96).ok());
          const std::vector<int32_t> other = random_tokens(prompt == 96 ? 5 : prompt / 2 + 1, 4);
          REQUIRE(session->start(1, other).ok());
          std::vector<float> cached = copy(session->start(0, std::span(text).first(prompt)));
          for (size_t n = prompt;; ++n) {
            const std::vector<float> whole = copy(session->logits(std::span(text).first(n)));
            CHECK(largest_difference(cached, std::span(whole).last(61)) <= gate);
            if (n == std::min<size_t>(96, prompt + 6)) break;
            const std::vector<int32_t> next = {text[n], n % 2 == 0 ? 7 : -1};  // the other one advances at times
            cached = copy(session->next(next));
            cached.resize(61);
          }
        }
        REQUIRE(session->length(0) == 96);
        CHECK_FALSE(session->next(std::vector<int32_t>{1, -1}).ok());  // full
      }
    }
  }

  TEST_CASE("every option of the model computes the same with the cache") {
    struct Case {
      const char* name;
      bool llama;
      void (*set)(ModelConfig&);
    };
    const Case cases[] = {
        {"alibi", false, [](ModelConfig& m) { m.positions = Positions::kAlibi; }},
        {"rounded alibi", false,
         [](ModelConfig& m) {
           m.positions = Positions::kAlibi;
           m.alibi = AlibiForm::kRounded;
         }},
        {"no positions", false, [](ModelConfig& m) { m.positions = Positions::kNone; }},
        {"offset, norm of the embedding", false,
         [](ModelConfig& m) {
           m.position_offset = 2;
           m.embedding_norm = true;
         }},
        {"window", true, [](ModelConfig& m) { m.sliding_window = 5; }},
        {"window in one layer", true,
         [](ModelConfig& m) {
           m.sliding_window = 5;
           m.window_layers = {1};
         }},
        {"norms of q and k", true, [](ModelConfig& m) { m.qk_norm = QkNorm::kHead; }},
        {"partial, interleaved rotary", true,
         [](ModelConfig& m) {
           m.rope.dims = 4;
           m.rope.pairs = RotaryPairs::kInterleaved;
         }},
        {"parallel block", true, [](ModelConfig& m) { m.block = BlockKind::kParallel; }},
        {"sandwich block", true, [](ModelConfig& m) { m.block = BlockKind::kSandwich; }},
        {"norms behind the branches, of whole q and k", true,
         [](ModelConfig& m) {
           m.block = BlockKind::kOutNorm;
           m.qk_norm = QkNorm::kWhole;
         }},
        {"LayerNorm of each head, one layer that does not turn", true,
         [](ModelConfig& m) {
           m.qk_norm = QkNorm::kHeadLayerNorm;
           m.nope_layers = {1};
         }},
        {"LayerNorm of heads with a bias", true, [](ModelConfig& m) { m.qk_norm = QkNorm::kSharedLayerNorm; }},
        {"caps, clipped q, k and v, factors", true,
         [](ModelConfig& m) {
           m.score_cap = 0.5;
           m.logit_cap = 2;
           m.clip_qkv = 0.05;
           m.embedding_scale = 3;
           m.branch_scale = 0.4;
         }},
        {"a rotary base for the layer with a window", true,
         [](ModelConfig& m) {
           m.sliding_window = 5;
           m.window_layers = {0};
           m.window_rope_theta = 50;
         }},
        {"experts", true, [](ModelConfig& m) { m.moe.experts = 4; }},
        {"experts in one layer, a gated one for every token", true,
         [](ModelConfig& m) {
           m.moe = {.experts = 4, .ffn = 24, .dense_layers = {0}, .shared_ffn = 40, .shared_gate = true};
         }},
        {"sinks, windows, clamped experts with biases", true,
         [](ModelConfig& m) {
           m.attention_sinks = true;
           m.bias = true;
           m.activation = Activation::kSwiGluClamp;
           m.swiglu_limit = 0.5;
           m.sliding_window = 5;
           m.window_layers = {0};
           m.moe = {.experts = 4, .top_k = 2, .ffn = 20, .router_bias = true};
         }},
        {"chunks, warm queries, L2 norms, scaled inputs of experts", true,
         [](ModelConfig& m) {
           m.qk_norm = QkNorm::kL2;
           m.attention_chunk = 5;
           m.chunk_layers = {0};
           m.nope_layers = {1};
           m.temperature_scale = 0.6;
           m.temperature_floor = 3;
           m.moe = {.experts = 4,
                    .top_k = 1,
                    .renormalise = false,
                    .router = RouterKind::kSigmoid,
                    .shared_experts = 1,
                    .ffn = 20,
                    .dense_layers = {0},
                    .scale_input = true};
         }},
        {"warm queries in layers that turn", true,
         [](ModelConfig& m) {
           m.sliding_window = 7;
           m.temperature_scale = 0.6;
           m.temperature_floor = 3;
           m.temperature_form = TemperatureForm::kMinistral3;
         }},
        {"latent attention", true,
         [](ModelConfig& m) {
           m.kv_heads = m.heads;
           m.mla = {.kv_rank = 24, .q_rank = 20, .nope_dim = 10, .rope_dim = 6, .value_dim = 12};
           m.head_dim = 16;
         }},
        {"latent attention with a window, queries from the stream", true,
         [](ModelConfig& m) {
           m.kv_heads = m.heads;
           m.mla = {.kv_rank = 18, .nope_dim = 4, .rope_dim = 8, .value_dim = 12};
           m.head_dim = 12;
           m.sliding_window = 5;
         }},
        {"top query layer", false, [](ModelConfig& m) { m.top_query = true; }},
        {"top query layer, rotary, grouped heads", true, [](ModelConfig& m) { m.top_query = true; }},
    };
    for (const Case& option : cases) {
      CAPTURE(option.name);
      Recipe recipe = recipe_of(option.llama);
      option.set(recipe.model);
      const std::unique_ptr<Session> session = session_of(recipe);
      const std::vector<int32_t> text = random_tokens(20, 3);
      for (const size_t prompt : {1, 9}) {
        REQUIRE(session->make_cache(1, 96).ok());
        std::vector<float> cached = copy(session->start(0, std::span(text).first(prompt)));
        for (size_t n = prompt;; ++n) {
          CAPTURE(n);
          const std::vector<float> whole = copy(session->logits(std::span(text).first(n)));
          CHECK(largest_difference(cached, std::span(whole).last(61)) <= 2e-5);
          if (n == text.size()) break;
          cached = copy(session->next(std::vector<int32_t>{text[n]}));
        }
      }
    }
  }

  TEST_CASE("longrope: a text has the factors of its own length, a cache those of its capacity") {
    Recipe recipe = recipe_of(true);
    recipe.model.rope = {.scaling = RopeScaling::kLongRope,
                         .factor = 3,
                         .original_context = 32,
                         .short_factor = {1, 1.25, 1.5, 2},
                         .long_factor = {1.5, 3, 6, 12}};
    const std::unique_ptr<Session> session = session_of(recipe);
    recipe.model.rope.short_factor = recipe.model.rope.long_factor;
    const std::unique_ptr<Session> always_long = session_of(recipe);
    recipe.model.rope.short_factor = {1, 1.25, 1.5, 2};
    recipe.model.rope.long_factor = recipe.model.rope.short_factor;
    const std::unique_ptr<Session> always_short = session_of(recipe);
    const std::vector<int32_t> text = random_tokens(40, 3);
    for (const size_t n : {1, 31, 32, 33, 40}) {  // none of them a multiple of the rows of a pass
      CAPTURE(n);
      Session& wanted = n <= 32 ? *always_short : *always_long;
      Session& other = n <= 32 ? *always_long : *always_short;
      const std::vector<float> logits = copy(session->logits(std::span(text).first(n)));
      CHECK(logits == copy(wanted.logits(std::span(text).first(n))));
      CHECK((n == 1 || largest_difference(logits, copy(other.logits(std::span(text).first(n)))) > 1e-2));
    }
    for (const int64_t capacity : {32, 33}) {
      CAPTURE(capacity);
      Session& wanted = capacity <= 32 ? *always_short : *always_long;
      REQUIRE(session->make_cache(1, capacity).ok());
      std::vector<float> cached = copy(session->start(0, std::span(text).first(5)));
      for (size_t n = 5;; ++n) {
        CAPTURE(n);
        const std::vector<float> whole = copy(wanted.logits(std::span(text).first(n)));
        CHECK(largest_difference(cached, std::span(whole).last(61)) <= 2e-5);
        if (n == 32) break;
        cached = copy(session->next(std::vector<int32_t>{text[n]}));
      }
    }
  }

  TEST_CASE("dynamic scaling: a text has the base of its own length, a cache that of its capacity") {
    Recipe recipe = recipe_of(true);
    const double plain_base = recipe.model.rope_theta;
    recipe.model.rope = {.scaling = RopeScaling::kDynamic, .factor = 2, .original_context = 32};
    const std::unique_ptr<Session> session = session_of(recipe);
    recipe.model.rope = {};
    const std::vector<int32_t> text = random_tokens(96, 3);
    for (const int64_t length : {9, 32, 33, 70, 96}) {
      CAPTURE(length);
      const double over = 2.0 * static_cast<double>(std::max<int64_t>(length, 32)) / 32 - 1;
      recipe.model.rope_theta = plain_base * std::pow(over, 8.0 / 6);
      const std::unique_ptr<Session> wanted = session_of(recipe);
      const std::vector<float> whole = copy(session->logits(std::span(text).first(length)));
      CHECK(largest_difference(whole, copy(wanted->logits(std::span(text).first(length)))) <= 2e-5);
      REQUIRE(session->make_cache(1, length).ok());
      std::vector<float> cached = copy(session->start(0, std::span(text).first(7)));
      for (size_t n = 7;; ++n) {
        const std::vector<float> until = copy(wanted->logits(std::span(text).first(n)));
        CHECK(largest_difference(cached, std::span(until).last(61)) <= 2e-5);
        if (n == 9) break;
        cached = copy(session->next(std::vector<int32_t>{text[n]}));
      }
    }
  }

  TEST_CASE("a text does not depend on its neighbours where the length scales positions") {
    for (const RopeScaling scaling : {RopeScaling::kLongRope, RopeScaling::kDynamic}) {
      CAPTURE(static_cast<int>(scaling));
      Recipe recipe = recipe_of(true);
      recipe.model.rope = {.scaling = scaling,
                           .factor = 3,
                           .original_context = 32,
                           .short_factor = {1, 1.25, 1.5, 2},
                           .long_factor = {1.5, 3, 6, 12}};
      const std::unique_ptr<Session> session = session_of(recipe);
      std::vector<std::vector<int32_t>> prompts;
      for (const size_t length : {5, 60, 20, 21, 40, 95, 100}) {  // 20 and 12 more are within the original context
        prompts.push_back(random_tokens(length, static_cast<int>(length)));
      }
      GenerateOptions options{.max_tokens = 12, .sampling = {.temperature = 0}};
      std::vector<std::vector<int32_t>> alone;
      for (const auto& prompt : prompts) alone.push_back(generated(*session, {prompt}, options)[0]);
      for (const int64_t batch : {1, 3, 16}) {
        options.batch = batch;
        CHECK(generated(*session, prompts, options) == alone);
      }
    }
  }

  TEST_CASE("losses of parted rows are those of each document by itself") {
    for (const bool llama : {false, true}) {
      const std::unique_ptr<Session> session = session_of(recipe_of(llama));
      const std::vector<int32_t> text = random_tokens(50, 3);
      std::vector<int32_t> positions, starts;
      for (int32_t t = 0; t < 49; ++t) {
        starts.push_back(t < 20 ? 0 : 20);
        positions.push_back(t - starts.back());
      }
      const std::span<const int32_t> whole(text);
      std::vector<int32_t> targets(text.begin() + 1, text.end());
      targets[19] = kNoTarget;
      const auto parted = session->token_losses(whole.first(49), targets, {positions, starts, {}});
      REQUIRE_OK(parted);
      const std::vector<float> first = session->token_losses(whole.first(20)).value();
      const std::vector<float> second = session->token_losses(whole.subspan(20)).value();
      CHECK(largest_difference(std::span(parted.value()).first(19), first) <= 2e-5);
      CHECK(largest_difference(std::span(parted.value()).subspan(20), second) <= 2e-5);
    }
  }

  TEST_CASE("a prompt that sees itself, with a gap or without, computes the same with the cache") {
    for (const bool llama : {false, true}) {
      Recipe recipe = recipe_of(llama);
      recipe.model.mask = Mask::kPrefix;
      const std::unique_ptr<Session> session = session_of(recipe);
      const std::vector<int32_t> text = random_tokens(96, 3);
      for (const int64_t prefix : {1, 7, 64, 80, 96}) {
        for (const int64_t gap : {int64_t{-1}, prefix / 2}) {
          CAPTURE(llama);
          CAPTURE(prefix);
          CAPTURE(gap);
          const PromptShape shape{.prefix = prefix, .gap = gap};
          REQUIRE(session->make_cache(2, 96).ok());
          REQUIRE(session->start(1, random_tokens(11, 4)).ok());
          for (const auto prompt : {static_cast<size_t>(prefix), std::min<size_t>(96, prefix + 1)}) {
            std::vector<float> cached = copy(session->start(0, std::span(text).first(prompt), shape));
            for (size_t n = prompt;; ++n) {
              const std::vector<float> whole = copy(session->logits(std::span(text).first(n), shape));
              CHECK(largest_difference(cached, std::span(whole).last(61)) <= 2e-5);
              if (n == std::min<size_t>(96, prompt + 4)) break;
              cached = copy(session->next(std::vector<int32_t>{text[n], n % 2 == 0 ? 7 : -1}));
              cached.resize(61);
            }
          }
          // The shape does something: what the last token of the prefix sees is the same, what the others see is not.
          if (prefix < 7) continue;
          const std::vector<float> plain = copy(session->logits(std::span(text).first(prefix)));
          const std::vector<float> shaped = copy(session->logits(std::span(text).first(prefix), shape));
          CHECK(largest_difference(plain, shaped) > 1e-3);
        }
      }
      // A text begun anew is plain again.
      const std::vector<float> first = copy(session->start(0, std::span(text).first(20)));
      CHECK(largest_difference(
                first, std::span<const float>(copy(session->logits(std::span(text).first(20)))).last(61)) <= 2e-5);
      CHECK_FALSE(session->start(0, std::span(text).first(9), {.prefix = 10}).ok());
      CHECK_FALSE(session->start(0, std::span(text).first(9), {.prefix = 5, .gap = 5}).ok());
    }
    const std::unique_ptr<Session> causal = session_of(recipe_of(true));
    CHECK_FALSE(causal->logits(random_tokens(9, 1), {.prefix = 3}).ok());
    Recipe recipe = recipe_of(true);
    recipe.model.mask = Mask::kBidirectional;
    CHECK(Session::make(recipe).error().code == ErrorCode::kUnsupported);
  }

  TEST_CASE("how a model was trained does not matter to a session of it") {
    Recipe recipe = recipe_of(true);
    const std::vector<float> plain = copy(session_of(recipe)->logits(random_tokens(9, 1)));
    recipe.mesh = {.tp = 2, .pp = 2, .dp = 2, .sequence_parallel = true, .virtual_stages = 2};
    recipe.schedule = PipelineKind::kInterleaved;
    recipe.recompute = {.mode = RecomputeMode::kFull, .layers = 1};
    recipe.batch = {.samples = 32, .micro = 2};
    recipe.optimizer.zero = 1;
    recipe.checkpoint.keep = {{.kind = Keep::Kind::kBest, .metric = "valid_loss", .count = 1}};
    CHECK(copy(session_of(recipe)->logits(random_tokens(9, 1))) == plain);
  }

  TEST_CASE("texts behind prefixes are the same alone and in batches, and end where the context does") {
    Recipe recipe = recipe_of(true, Precision::kF32, 24);
    recipe.model.mask = Mask::kPrefix;
    const std::unique_ptr<Session> session = session_of(recipe);
    const std::vector<std::vector<int32_t>> prompts = {random_tokens(9, 1), random_tokens(14, 2), random_tokens(3, 5)};
    GenerateOptions options{.max_tokens = 60, .sampling = {.temperature = 0}};
    options.shapes = {{.prefix = 8, .gap = 4}, {.prefix = 14}, {.prefix = 2, .gap = -1}};
    const auto together = generated(*session, prompts, options);
    for (size_t k = 0; k < 3; ++k) {
      CHECK(together[k].size() == 24 - prompts[k].size() + 1);  // the last one is made from a full context
      GenerateOptions alone = options;
      alone.shapes = {options.shapes[k]};
      CHECK(generated(*session, {prompts[k]}, alone)[0] == together[k]);
      std::vector<int32_t> text = prompts[k];
      for (const int32_t token : together[k]) {
        const std::vector<float> logits = copy(session->logits(text, options.shapes[k]));
        REQUIRE(token == sample_token(std::span(logits).last(61), {.temperature = 0}, 0));
        text.push_back(token);
      }
    }
    options.shapes[1].prefix = 5;
    CHECK(generated(*session, prompts, options)[1] != together[1]);
    CHECK_FALSE(generate(*session, {random_tokens(25, 1)}, {.shapes = {{.prefix = 25}}}, [](size_t, int32_t) {
                  return true;
                }).ok());
  }

  TEST_CASE("greedy text equals that made without a cache, also when the context is full and slides") {
    for (const bool llama : {false, true}) {
      const std::unique_ptr<Session> session = session_of(recipe_of(llama, Precision::kF32, 24));
      std::vector<int32_t> text = random_tokens(10, 8);
      const auto made = generated(*session, {text}, {.max_tokens = 60, .sampling = {.temperature = 0}})[0];
      REQUIRE(made.size() == 60);
      // The rule: all tokens while they fit; when 24 are held, the last 12 and from there on.
      size_t begin = 0;
      for (const int32_t token : made) {
        if (text.size() - begin > 24) begin = text.size() - 12;
        const std::vector<float> logits = copy(session->logits(std::span(text).subspan(begin)));
        const std::span<const float> last = std::span(logits).last(61);
        REQUIRE(token == sample_token(last, {.temperature = 0}, 0));
        text.push_back(token);
      }
    }
  }

  TEST_CASE("a prompt's text is the same alone, among others and in batches of any size; a seed gives it again") {
    const std::unique_ptr<Session> session = session_of(recipe_of(true));
    std::vector<std::vector<int32_t>> prompts;
    for (int k = 0; k < 7; ++k) prompts.push_back(random_tokens(1 + 9 * static_cast<size_t>(k), k));
    for (const double temperature : {0.0, 1.0}) {
      GenerateOptions options{.max_tokens = 12, .sampling = {.temperature = temperature, .top_k = 20, .seed = 4}};
      options.batch = 7;
      const auto together = generated(*session, prompts, options);
      CHECK(generated(*session, prompts, options) == together);
      for (const int64_t batch : {1, 2, 3}) {
        options.batch = batch;
        CHECK(generated(*session, prompts, options) == together);
      }
      CHECK(generated(*session, {prompts[0]}, options)[0] == together[0]);
      options.sampling.seed = 5;
      CHECK((generated(*session, prompts, options) == together) == (temperature == 0.0));
    }
  }

  TEST_CASE("texts end at a stop id, where the caller says so, or at the length; one does not hold up the others") {
    const std::unique_ptr<Session> session = session_of(recipe_of(false));
    const std::vector<std::vector<int32_t>> prompts = {random_tokens(4, 1), random_tokens(5, 2), random_tokens(3, 9)};
    GenerateOptions options{.max_tokens = 20, .sampling = {.temperature = 1.0, .seed = 1}};
    const auto all = generated(*session, prompts, options);
    options.stop_ids = {all[0][6]};
    const size_t first = static_cast<size_t>(std::find(all[0].begin(), all[0].end(), all[0][6]) - all[0].begin());
    std::vector<std::vector<int32_t>> got(3);
    const auto done = generate(*session, prompts, options, [&](size_t k, int32_t token) {
      got[k].push_back(token);
      return k != 1 || got[1].size() < 2;
    });
    REQUIRE(done.ok());
    CHECK(done.value()[0] == Finish::kToken);
    CHECK(got[0] == std::vector<int32_t>(all[0].begin(), all[0].begin() + static_cast<ptrdiff_t>(first)));
    CHECK(got[1].size() <= 2);
    CHECK_FALSE(generate(*session, {{}}, options, [](size_t, int32_t) { return true; }).ok());
    CHECK_FALSE(generate(*session, {{61}}, options, [](size_t, int32_t) { return true; }).ok());
  }

  TEST_CASE("losses of short texts are those of the first tokens of long ones") {
    const std::unique_ptr<Session> session = session_of(recipe_of(true));
    const std::vector<int32_t> text = random_tokens(97, 6);
    const std::vector<float> all = session->token_losses(text).value();
    REQUIRE(all.size() == 96);
    for (const size_t n : {2, 3, 64, 65, 66}) {
      const std::vector<float> some = session->token_losses(std::span(text).first(n)).value();
      REQUIRE(some.size() == n - 1);
      CHECK(largest_difference(some, std::span(all).first(n - 1)) <= 2e-5);
    }
  }

  TEST_CASE("few rows times a matrix: a row's bits depend on no other row, and the values are right") {
    std::mt19937 draw(2);
    const auto random = [&](size_t n) {
      std::vector<float> out(n);
      for (float& x : out) x = static_cast<float>(draw() % 2001) / 1000.0f - 1.0f;
      return out;
    };
    for (const int64_t in : {1, 15, 64, 200}) {
      const int64_t out = 37, rows = 5;
      const std::vector<float> x = random(rows * in), w = random(out * in), bias = random(out);
      std::vector<float> y(rows * out), one(out);
      kernels::few_rows_matmul(x.data(), w.data(), bias.data(), y.data(), out, rows, out, in);
      for (int64_t r = 0; r < rows; ++r) {
        kernels::few_rows_matmul(x.data() + r * in, w.data(), bias.data(), one.data(), out, 1, out, in);
        for (int64_t j = 0; j < out; ++j) {
          CHECK(one[j] == y[r * out + j]);
          double sum = bias[j];
          for (int64_t i = 0; i < in; ++i) sum += static_cast<double>(x[r * in + i]) * w[j * in + i];
          CHECK(std::abs(sum - one[j]) < 1e-4);
        }
      }
    }
  }
}
