#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "dsl/schema.h"
#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

namespace {

/// A recipe in which every member differs from Recipe{}'s. A new member without a line here fails the test below only
/// if it is in the schema; one that is in neither is caught by the sizes.
Recipe everything_changed() {
  Recipe r;
  r.name = "n";
  r.seed = 18446744073709551615ull;
  r.stop = {Span::Unit::kTokens, 5};
  r.model = {.layers = 1,
             .width = 2,
             .heads = 3,
             .kv_heads = 4,
             .head_dim = 5,
             .ffn = 6,
             .context = 7,
             .vocab = 8,
             .positions = Positions::kRotary,
             .alibi = AlibiForm::kRounded,
             .position_offset = 10,
             .rope_theta = 9,
             .rope = {.dims = 1,
                      .pairs = RotaryPairs::kInterleaved,
                      .scaling = RopeScaling::kYarn,
                      .factor = 2,
                      .original_context = 3,
                      .low_freq_factor = 4,
                      .high_freq_factor = 5,
                      .beta_fast = 6,
                      .beta_slow = 7,
                      .attention_factor = 8,
                      .mscale = 9,
                      .mscale_all_dim = 10,
                      .truncate = false,
                      .short_factor = {11},
                      .long_factor = {12, 13}},
             .embed_dim = 11,
             .embedding_norm = true,
             .embedding_scale = 1.5,
             .block = BlockKind::kDeepNorm,
             .residual_scale = 12,
             .branch_scale = 2.5,
             .norm = NormKind::kRmsNorm,
             .norm_weight = false,
             .norm_bias = false,
             .norm_plus_one = true,
             .norm_eps = 0.5,
             .final_norm = false,
             .activation = Activation::kSwiGlu,
             .swiglu_alpha = 1.25,
             .swiglu_limit = 7.5,
             .bias = false,
             .qkv_bias = true,
             .out_bias = false,
             .mlp_bias = true,
             .head_bias = true,
             .clip_qkv = 3.5,
             .qk_norm = QkNorm::kHead,
             .mask = Mask::kPrefix,
             .sliding_window = 13,
             .window_layers = {0},
             .window_rope_theta = 4.5,
             .nope_layers = {1},
             .attention_chunk = 29,
             .chunk_layers = {2},
             .temperature_scale = 0.75,
             .temperature_floor = 30,
             .temperature_form = TemperatureForm::kMinistral3,
             .attention_sinks = true,
             .attention_scale = 14,
             .attention_scale_by_layer = true,
             .score_cap = 5.5,
             .logit_scale = 15,
             .logit_cap = 6.5,
             .top_query = true,
             .mla = {.kv_rank = 24, .q_rank = 25, .nope_dim = 26, .rope_dim = 27, .value_dim = 28},
             .moe = {.experts = 16,
                     .top_k = 17,
                     .renormalise = false,
                     .aux_loss = 18,
                     .router = RouterKind::kSigmoid,
                     .z_loss = 0.5,
                     .shared_experts = 19,
                     .ffn = 22,
                     .dense_layers = {0},
                     .shared_ffn = 23,
                     .shared_gate = true,
                     .router_bias = true,
                     .scale_input = true,
                     .groups = 20,
                     .groups_per_token = 21,
                     .scale = 2.5,
                     .choice_bias = true,
                     .bias_rate = 0.25,
                     .aux_scope = AuxScope::kModel},
             .mtp = {.depth = 16, .loss = 0.75},
             .tied_embeddings = false,
             .embedding_dropout = 0.5,
             .attention_dropout = 0.25,
             .residual_dropout = 0.75,
             .init_std = 0.125,
             .init = WeightInit::kDeepNorm};
  r.tokenizer = {TokenizerConfig::Kind::kSentencePiece, "p"};
  r.data.sources = {{DataSource::Kind::kTokenFile,
                     "a",
                     "b",
                     "c",
                     "uint16",
                     2.5,
                     7,
                     {1, 2},
                     DataSource::Overlong::kDrop,
                     DataSource::Weigh::kSample}};
  r.data.seed = 3;
  r.data.mask_repeats = {39, 40};
  r.objective = {ObjectiveConfig::Kind::kInfill, 1, false, false, true, 2, 3, 4, 5, 0.5, 6};
  r.batch = {4,    5,       6, {7, 8, {Span::Unit::kSamples, 9}}, {{{Span::Unit::kTokens, 10}, 11, 12, 13, 14.5}},
             true, {"5..6"}};
  r.optimizer = {.kind = OptimizerKind::kLamb,
                 .peak_lr = 0.1,
                 .lr = {{LrStage::Kind::kCosine, {Span::Unit::kSamples, 6}, 0.25}},
                 .lr_from = LrFrom::kStage,
                 .beta1 = 0.5,
                 .beta2 = 0.25,
                 .eps = 0.125,
                 .decay_power = 0.625,
                 .update_clip = 2,
                 .scale_parameter = false,
                 .least_scale = 0.0625,
                 .weight_decay = 0.75,
                 .groups = {{"g", 0.5, 0.25}},
                 .clip = 3,
                 .z_loss = 0.5,
                 .embedding_gradient = 0.25,
                 .ema = 0.375,
                 .qk_clip = 33,
                 .offload = "o",
                 .zero = 1,
                 .bucket = 17,
                 .overlap = false,
                 .keep_after_forward = true};
  r.device = DeviceChoice::kCuda;
  r.precision = Precision::kBf16;
  r.loss_scale = {2, 3, 4, 5};
  r.deterministic = Deterministic::kLayout;
  r.sums = Sums::kNccl;
  r.watch = {.window = 34,
             .proof = 35,
             .forensics = true,
             .on_outlier = {GuardAction::kRecompute, GuardAction::kSkip},
             .on_divergence = {GuardAction::kStop},
             .on_drop = {GuardAction::kRollBack},
             .on_not_finite = {GuardAction::kStop, GuardAction::kRollBack},
             .on_sdc = {GuardAction::kStop},
             .roll_back = {36, 37, 38},
             .skip = {41, 42},
             .lower_lr = {0.25, 43, 44, 45, 46},
             .recompute = {47, 48},
             .early_stop = {"m", 54, 0.5},
             .skip_steps = {49},
             .lowered_rates = {{50, 0.75, 51, 52}},
             .audit_steps = 53,
             .replica_steps = 59};
  r.mesh = {.tp = 2,
            .pp = 3,
            .dp = 4,
            .order = {MeshAxis::kDp, MeshAxis::kPp, MeshAxis::kTp},
            .ep = 7,
            .cp = 8,
            .shard = 6,
            .sequence_parallel = true,
            .virtual_stages = 5,
            .stages = {1, 2, 3},
            .embedding_weight = 0.5,
            .head_weight = 1.5,
            .micro_batch_group = 6};
  r.schedule = PipelineKind::kZbV;
  r.recompute = {.mode = RecomputeMode::kFull, .layers = 3, .distribute = true};
  r.checkpoint = {.save = {{7, 0.5}}, .snapshot_steps = 8, .direct_io = false};
  r.checkpoint.keep = {{Keep::Kind::kBest, "valid_loss", 9, 10, 0.5, {11}}};
  r.checkpoint.on_failure = OnSaveFailure::kStop;
  r.checkpoint.space = SpaceCheck::kWarn;
  r.checkpoint.snapshot_by = SnapshotBy::kCopy;
  r.checkpoint.compress = Compress::kZstd;
  r.checkpoint.incremental = true;
  r.checkpoint.in_flight = 3;
  r.checkpoint.replicate_steps = 4;
  r.init = {"p", true, {"o"}, {"e"}, {"m"}, {"x"}};
  r.checkpoint.copy_to = {{"s3://b/p", 1, 2, 3, 4.5, false, "http://e", "r", 5.5, 6.5, "/c"}};
  r.eval = {10, 11, {{"f", 2, 3, 4, {"shuffle"}}}, 12, 0.5};
  r.log = {12, false, {{Tracker::Kind::kOtlp, "http://h", "p", "e", {"t"}, 19.5}}};
  r.restart = {13, 14.5, 15.5};
  r.hooks = {{{"saved", "best"}, {"upload", "{dir}"}, 16.5, 17, 18.5}};
  r.stages = {{{Span::Unit::kFraction, 0.5}, R"({"batch.micro":9,"optimizer.lr_from":"stage"})"}};
  return r;
}

void leaves(const nlohmann::json& json, const std::string& path, std::map<std::string, std::string>& out) {
  if (json.is_structured() && !json.empty()) {
    for (const auto& [key, value] : json.items()) leaves(value, path + "." + key, out);
  } else {
    out[path] = json.dump();
  }
}

std::string error_of(const nlohmann::json& json) {
  const Result<Recipe> result = decode_recipe(json.dump());
  return result.ok() ? "" : result.error().message;
}

}  // namespace

TEST_SUITE("dsl/codec") {
  TEST_CASE("every member of the Recipe struct is in the JSON") {
    std::map<std::string, std::string> plain, changed;
    leaves(nlohmann::json::parse(encode_recipe(Recipe{})), "", plain);
    leaves(nlohmann::json::parse(encode_recipe(everything_changed())), "", changed);
    for (const auto& [path, value] : plain) {
      CAPTURE(path);
      if (changed.count(path) != 0) CHECK(changed[path] != value);
    }
    CHECK(changed.size() == 299);
    // A member that is added to a struct changes its size: add it to dsl/schema.cc and to everything_changed().
    CHECK(sizeof(ModelConfig) == 768);
    CHECK(sizeof(RopeConfig) == 144);
    CHECK(sizeof(MoeConfig) == 152);
    CHECK(sizeof(DataSource) == 184);
    CHECK(sizeof(OptimizerConfig) == 232);
    CHECK(sizeof(RecipeStage) == 48);
    CHECK(sizeof(BatchConfig) == 112);
    CHECK(sizeof(BatchPhase) == 48);
    CHECK(sizeof(ParameterGroup) == 48);
    CHECK(sizeof(LossScaleConfig) == 32);
    CHECK(sizeof(MeshConfig) == 136);
    CHECK(sizeof(RecomputeConfig) == 24);
    CHECK(sizeof(CheckpointConfig) == 120);
    CHECK(sizeof(Keep) == 88);
    CHECK(sizeof(InitConfig) == 136);
    CHECK(sizeof(CopyTo) == 184);
    CHECK(sizeof(RestartConfig) == 24);
    CHECK(sizeof(EvalConfig) == 56);
    CHECK(sizeof(LogConfig) == 40);
    CHECK(sizeof(Tracker) == 136);
    CHECK(sizeof(Hook) == 72);
    CHECK(sizeof(WatchConfig) == 352);
  }

  TEST_CASE("an option that has its default is not in the JSON, and absent it has that default") {
    const Recipe plain;
    const std::string json = encode_recipe(plain);
    for (const char* key : {"rope\"", "qkv_bias", "block", "sliding_window", "mla", "moe"}) {
      CHECK(json.find(std::string("\"") + key) == std::string::npos);
    }
    // The struct's own initial values are what an absent key means: they must be the schema's defaults.
    const auto walk = [&](const auto& self, const Block& block, void* object) -> void {
      for (const Field& field : block.fields) {
        CAPTURE(field.key);
        if (field.member) {
          self(self, *field.block, field.member(object));
        } else if (field.silent && field.size) {
          CHECK(field.size(object) == 0);
        } else if (field.silent) {
          CHECK(field.load(object) == field.fallback);
        }
      }
    };
    Recipe copy = plain;
    walk(walk, recipe_block(), &copy);
  }

  TEST_CASE("decode gives back what was encoded, every member of it") {
    const std::string json = encode_recipe(everything_changed());
    const Result<Recipe> back = decode_recipe(json);
    INFO((back.ok() ? "" : back.error().message));
    REQUIRE(back.ok());
    CHECK(encode_recipe(back.value()) == json);
    CHECK(back.value().seed == 18446744073709551615ull);
    CHECK(back.value().mesh.order[0] == MeshAxis::kDp);
    CHECK(back.value().optimizer.lr[0].over.unit == Span::Unit::kSamples);
    const LoadResult loaded = load_text(kBase);
    CHECK(encode_recipe(decode_recipe(loaded.loaded.canonical_json).value()) == loaded.loaded.canonical_json);
  }

  TEST_CASE("the JSON is canonical: sorted keys, no spaces, doubles with a point, shortest digits") {
    Recipe r = everything_changed();
    r.optimizer.peak_lr = 0.1 + 0.2;
    const std::string json = encode_recipe(r);
    CHECK(json.find("\"peak_lr\":0.30000000000000004") != std::string::npos);
    CHECK(json.find("\"clip\":3.0") != std::string::npos);
    CHECK(json.find("{\"batch\":{\"micro\":5,\"phases\":[{\"at\":{\"unit\":\"tokens\",\"value\":10.0},\"micro\":12,"
                    "\"rope_theta\":14.5,") == 0);
    CHECK(json.find("\"samples\":4,\"skip\":[\"5..6\"],\"tokens\":6,\"uneven\":true},\"checkpoint\":{\"compress\":"
                    "\"zstd\",\"copy_to\":[{"
                    "\"ca_file\":\"/c\",\"endpoint\":\"http://e\",") != std::string::npos);
    CHECK(json.find("],\"direct_io\":false,\"in_flight\":3,\"incremental\":true,\"keep\":[{\"at\":[11],\"count\":9,"
                    "\"kind\":\"best\",\"metric\":\"valid_loss\",\"seconds\":0.5,\"steps\":10}],") !=
          std::string::npos);
    CHECK(json.find_first_of(" \n") == std::string::npos);
  }

  TEST_CASE("the hash is XXH3-128 of the text") {
    // xxhash 0.8: printf '' | xxh128sum
    CHECK(recipe_hash("") == "99aa06d3014798d86001c324468d497f");
    CHECK(recipe_hash("a") != recipe_hash("b"));
  }

  TEST_CASE("decode is strict and names the path") {
    const nlohmann::json good = nlohmann::json::parse(encode_recipe(load_good(kBase)));
    REQUIRE(error_of(good).empty());
    // Each leaf and each block, missing or of another type.
    int64_t tried = 0;
    const std::function<void(const nlohmann::json::json_pointer&, const nlohmann::json&)> walk =
        [&](const nlohmann::json::json_pointer& at, const nlohmann::json& value) {
          if (value.is_object()) {
            for (const auto& [key, inner] : value.items()) {
              nlohmann::json missing = good;
              (at.empty() ? missing : missing[at]).erase(key);
              CAPTURE((at / key).to_string());
              // A span is one value: its parts are told by its own name.
              const bool part = !at.empty() && (at.back() == "stop" || at.back() == "over");
              if ((at / key).to_string() == "/init" || key == "on_failure" || key == "space" || key == "copy_to" ||
                  key == "compress" || key == "incremental" || key == "virtual_stages" || key == "embedding_weight" ||
                  key == "head_weight" || key == "micro_batch_group" || (at / key).to_string() == "/recompute") {
                CHECK(error_of(missing).empty());  // newer than the first recipes that were stored
                CHECK(encode_recipe(decode_recipe(missing.dump()).value()) == good.dump());
              } else {
                CHECK(error_of(missing).find(part ? at.back() : key) != std::string::npos);
              }
              nlohmann::json other = good;
              other[at / key] = nlohmann::json{{"a", nullptr}};
              CHECK(error_of(other).find("recipe JSON: ") == 0);
              nlohmann::json more = good;
              (at.empty() ? more : more[at])["extra_" + key] = 1;
              CHECK(error_of(more).find("extra_" + key) != std::string::npos);
              walk(at / key, inner);
              ++tried;
            }
          }
        };
    walk(nlohmann::json::json_pointer(), good);
    CHECK(tried > 60);
    nlohmann::json bad = good;
    bad["model"]["layers"] = 2.5;
    CHECK(error_of(bad) == "recipe JSON: model.layers must be an integer from 1 to 100000, got 2.5");
    bad["model"]["layers"] = "2";
    CHECK(error_of(bad) == "recipe JSON: model.layers must be an integer from 1 to 100000, got \"2\"");
    bad = good;
    bad["data"]["sources"][0]["weight"] = -1;
    CHECK(error_of(bad) == "recipe JSON: data.sources[1].weight must be a number >= 0, got -1");
    bad = good;
    bad["optimizer"]["lr"][0]["kind"] = "cosin";
    CHECK(error_of(bad).find("optimizer.lr[1].kind: \"cosin\" is not one of") != std::string::npos);
    bad = good;
    bad["modle"] = bad["model"];
    CHECK(error_of(bad) == "recipe JSON: modle: no such field; did you mean model?");
  }

  TEST_CASE("a recipe stored before there were rules of retention keeps what it kept") {
    nlohmann::json old = nlohmann::json::parse(encode_recipe(load_good(kBase)));
    const std::string now = old.dump();
    for (const char* key : {"keep", "on_failure", "space", "compress", "incremental"}) old["checkpoint"].erase(key);
    old.erase("init");
    old["checkpoint"]["keep_last"] = 3;
    CHECK(error_of(old) == "");
    CHECK(encode_recipe(decode_recipe(old.dump()).value()) == now);
    old["checkpoint"]["keep_last"] = 0;
    CHECK(decode_recipe(old.dump()).value().checkpoint.keep.empty());
    old["checkpoint"]["keep_last"] = "3";
    CHECK(error_of(old) == "recipe JSON: checkpoint.keep[1].count must be an integer >= 0, got \"3\"");
    old["checkpoint"]["keep"] = nlohmann::json::array();
    CHECK(error_of(old).find("checkpoint.keep_last: no such field") != std::string::npos);
  }

  TEST_CASE("bytes that are no recipe give an error, never a crash") {
    const std::string good = encode_recipe(load_good(kBase));
    for (size_t length = 0; length < good.size(); ++length) CHECK(!decode_recipe(good.substr(0, length)).ok());
    for (const char* text : {"null", "[]", "3", "\"x\"", "{}", "{\"name\":1e999}", "\xff\xfe", "[[[[[[[["})
      CHECK(!decode_recipe(text).ok());
    uint64_t state = 1;
    for (int i = 0; i < 3000; ++i) {  // one byte changed: either refused or a valid recipe, which encodes again
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      std::string text = good;
      text[(state >> 33) % text.size()] = static_cast<char>(state >> 24);
      const Result<Recipe> result = decode_recipe(text);
      if (result.ok()) CHECK(decode_recipe(encode_recipe(result.value())).ok());
    }
  }
}
