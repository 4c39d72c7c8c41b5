// Training states of Megatron-Core's torch_dist, imported: tests/golden/megatron-dist, which megatron-core 0.16.1
// saved. The optimizer's forms of one run are written by different code of Megatron's, and hold the same state. The
// losses that follow an import: tests/e2e/megatron_test.py.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "ckpt/position.h"
#include "converters/import.h"
#include "converters/megatron_args.h"
#include "converters/megatron_buckets.h"
#include "converters/megatron_state.h"
#include "runtime/json/json.h"
#include "tests/converters/dist_folder.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/foreign_folder.h"
#include "tests/converters/training_states.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

const char* const kForms[] = {"dense-dp", "bf16-dp", "tp-dp", "tp-fully", "experts-dp", "experts-fully", "plain-plain"};

fs::path state_at(const std::string& name) { return golden("megatron-dist") / name; }

Result<ForeignState> opened(const fs::path& dir, bool weights_only = false) {
  RT_TRY_SET(TrainingState state, looked(dir));
  return open_megatron_state(std::move(state), weights_only, nlohmann::json());
}

RawTensor raw(const std::vector<float>& values, const Shape& shape) { return {"F32", shape, bytes_of(values)}; }

/// A copy of a form, which a test changes.
fs::path copied(const TempDir& temp, const std::string& name) {
  const fs::path to = temp / "from";
  fs::remove_all(to);
  fs::copy(state_at(name), to, fs::copy_options::recursive);
  return to;
}

}  // namespace

TEST_SUITE("converters/megatron_state") {
  TEST_CASE("buckets without names hold what the same run saved by name, with ranks that divide rows and experts") {
    for (const std::string run : {"tp", "experts"}) {
      CAPTURE(run);
      const auto buckets = opened(state_at(run + "-dp")), named = opened(state_at(run + "-fully"));
      REQUIRE_OK(buckets);
      REQUIRE_OK(named);
      CHECK(crc_of(*buckets.value().weights) == crc_of(*named.value().weights));
      CHECK(crc_of(*buckets.value().exp_avg) == crc_of(*named.value().exp_avg));
      CHECK(crc_of(*buckets.value().exp_avg_sq) == crc_of(*named.value().exp_avg_sq));
      CHECK(crc_of(*named.value().exp_avg) != crc_of(*named.value().exp_avg_sq));
    }
  }

  TEST_CASE("in every form the masters round to the weights") {
    for (const std::string name : kForms) {
      CAPTURE(name);
      const auto state = opened(state_at(name));
      REQUIRE_OK(state);
      CHECK_OK(check_masters(state.value()));
      CHECK_OK(verify_archives(state.value()));
      CHECK(state.value().weights->tensors().size() == state.value().model_copy->tensors().size());
      CHECK(state.value().about.dtype == (name.starts_with("bf16") || name.starts_with("plain") ? "BF16" : "F32"));
    }
  }

  TEST_CASE("an import has the model of the arguments, three kinds of state and the position") {
    for (const std::string name : kForms) {
      CAPTURE(name);
      TempDir temp;
      const auto report = imported(state_at(name), temp / "to", {.config = state_at(name)});
      REQUIRE_OK(report);
      CHECK(report.value().dir.filename() == "step-00000003");
      CHECK(report.value().adam_step == 3);
      const ModelConfig& model = report.value().recipe.model;
      CHECK(model.vocab == 40);  // padded: Megatron's softmax runs over these rows too
      CHECK(model.qk_norm == QkNorm::kHead);
      CHECK(model.tied_embeddings == name.starts_with("bf16"));
      CHECK(model.moe.experts == (name.starts_with("experts") ? 4 : 0));
      const trainer::TrainPosition position = position_in(report.value().dir);
      CHECK(position.step == 3);
      CHECK(position.samples == 12);
      CHECK(position.tokens == 12 * 16);
      CHECK(position.lr == doctest::Approx(0.005));
      const OptimizerConfig& optimizer = report.value().recipe.optimizer;
      CHECK(optimizer.beta2 == 0.95);
      CHECK(optimizer.eps == 1e-6);
      CHECK(optimizer.weight_decay == 0.1);
      const nlohmann::json foreign = foreign_in(report.value().dir);
      CHECK(foreign["program"] == "Megatron-LM");
      CHECK(foreign["args"]["global_batch_size"] == 4);
      CHECK(foreign["opt_param_scheduler"]["num_steps"] == 12);
    }
  }

  TEST_CASE("a state that megatron-core 0.16.1 has shifted is refused, and its weights are taken without it") {
    TempDir temp;
    const std::string text = message_of(state_at("bf16-fully"), temp / "to");
    CHECK_MESSAGE(has(text, "does not round to the model's weight"), text);
    CHECK_MESSAGE(has(text, "--weights-only"), text);
    const auto weights =
        imported(state_at("bf16-fully"), temp / "to", {.weights_only = true, .config = state_at("bf16-fully")});
    REQUIRE_OK(weights);
    CHECK(weights.value().dir.filename() == "step-00000000");
  }

  TEST_CASE("a config.json of the family wins over the arguments, and cuts the vocabulary in weights and moments") {
    TempDir temp;
    const auto args = opened(state_at("dense-dp"));
    REQUIRE_OK(args);
    nlohmann::json config = json_or_nothing(args.value().config);
    config["vocab_size"] = 37;
    fs::create_directories(temp / "config");
    spit(temp / "config" / "config.json", json_text(config));
    const auto report = imported(state_at("dense-dp"), temp / "to", {.config = temp / "config"});
    REQUIRE_OK(report);
    CHECK(report.value().recipe.model.vocab == 37);
    CHECK(state_in(report.value().dir).at("exp_avg embed.tokens").size() == 37 * 12);
    CHECK(has(fmt::format("{}", fmt::join(report.value().warnings, "\n")),
              "3 of 40 rows of the vocabulary are left out"));
  }

  TEST_CASE("a grid of blocks with flat elements is the tensor that was cut so") {
    TempDir temp;
    const fs::path from = copied(temp, "plain-plain") / "iter_0000003";  // its common.pt has the count of updates
    DistState state;
    const Shape shape = {4, 6};
    std::vector<float> values(24);
    std::iota(values.begin(), values.end(), 1.0f);
    std::vector<float> blocks;
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < 2; ++j) {
        for (int64_t row = 0; row < 2; ++row) {
          for (int64_t column = 0; column < 3; ++column) blocks.push_back(values[(i * 2 + row) * 6 + j * 3 + column]);
        }
      }
    }
    const std::string key = "embedding.word_embeddings.weight";
    state.parts[{}][key] = raw(values, shape);
    for (const char* kind : {"fp32_param", "exp_avg", "exp_avg_sq"}) {
      state.parts[{}][fmt::format("optimizer.state.{}.{}", kind, key)] = raw(blocks, {2, 2, 6});
    }
    state.cut = [](const Shape& of) {  // a grid's last dim is cut where data-parallel ranks part
      if (of.size() < 3) return std::vector<std::pair<Box, int>>{{Box::whole(of), 0}};
      std::vector<std::pair<Box, int>> out;
      for (int64_t i = 0; i < of[0]; ++i) {
        for (int64_t j = 0; j < of[1]; ++j) {
          out.push_back({Box{{i, j, 0}, {i + 1, j + 1, 4}}, 0});
          out.push_back({Box{{i, j, 4}, {i + 1, j + 1, 6}}, 1});
        }
      }
      return out;
    };
    for (const auto& entry : fs::directory_iterator(from)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(".distcp") || name == ".metadata") fs::remove(entry.path());
    }
    write_dist(from, state);
    const auto open = opened(temp / "from");
    REQUIRE_OK(open);
    CHECK_OK(check_masters(open.value()));
    for (const FlatTensors* kind :
         {open.value().weights.get(), open.value().exp_avg.get(), open.value().exp_avg_sq.get()}) {
      REQUIRE(kind->tensors().size() == 1);
      CHECK(elements(*kind, kind->tensors().front()) == values);
    }
  }

  TEST_CASE("parameters lie in reverse, at multiples of 64, and buckets end where one of them does") {
    const std::map<std::string, Shape> shapes = {{"embedding.word_embeddings.weight", {8, 10}},
                                                 {"decoder.layers.mlp.linear_fc1.weight", {2, 12, 10}},
                                                 {"decoder.layers.mlp.linear_fc2.weight", {2, 10, 6}},
                                                 {"decoder.final_layernorm.weight", {10}}};
    const MegatronRanks ranks{.tp = 2, .layers = 2, .gated = true};
    const auto made = rank_parameters(shapes, ranks, 1, 0, 0, false);
    REQUIRE_OK(made);
    REQUIRE(made.value().size() == 6);
    const RankParameter& gated = made.value()[1];  // gate rows, then up rows
    CHECK(gated.boxes[0].offsets == Shape{0, 3, 0});
    CHECK(gated.boxes[1].offsets == Shape{0, 9, 0});
    CHECK(gated.elems == 60);
    CHECK(made.value()[2].boxes[0].offsets == Shape{0, 0, 3});  // columns
    CHECK(made.value()[5].copy);                                // the norm
    const auto places = place_in_buckets(made.value(), {94, 100});
    CHECK_FALSE(places.ok());
    const auto fits = place_in_buckets(made.value(), {94, 94, 104});
    REQUIRE_OK(fits);
    CHECK(fits.value()[5].begin == 0);
    CHECK(fits.value()[4].begin == 64);  // behind 10 elements and padding
    CHECK(fits.value()[3].bucket == 1);
    CHECK(fits.value()[0].begin == 64);
  }

  TEST_CASE("states that cannot be taken are refused: what was found, what was expected, what to do") {
    TempDir temp;
    const auto refused = [&](const std::string& name, const std::string& says, const auto& change) {
      CAPTURE(says);
      const fs::path from = copied(temp, name);
      change(from / "iter_0000003");
      const std::string text = message_of(from, temp / "to");
      CHECK_MESSAGE(has(text, says), text);
      CHECK_MESSAGE(has(text, "expected"), text);
    };
    refused("dense-dp", "__1_1.distcp: is missing", [](const fs::path& at) { fs::remove(at / "__1_1.distcp"); });
    refused("dense-dp", "common.pt: is missing", [](const fs::path& at) { fs::remove(at / "common.pt"); });
    refused("tp-fully", "of a form that is not known here", [](const fs::path& at) {
      std::string text = slurp(at / ".metadata");
      for (size_t k = text.find("exp_avg_sq"); k != text.npos; k = text.find("exp_avg_sq", k))
        text.replace(k, 10, "momentum_x");
      spit(at / ".metadata", text);
    });
  }

  TEST_CASE("arguments of a model that is not computed here are refused by name") {
    const nlohmann::json plain = {{"hidden_size", 12},       {"num_layers", 2},  {"num_attention_heads", 4},
                                  {"padded_vocab_size", 40}, {"seq_length", 16}, {"num_query_groups", 2}};
    const auto config = config_from_args(plain);
    REQUIRE_OK(config);
    CHECK(config.value()["vocab_size"] == 40);
    CHECK(config.value()["max_position_embeddings"] == 16);
    CHECK(config.value()["group_query_attention"] == true);
    for (const char* name :
         {"mtp_num_layers", "hybrid_override_pattern", "window_size", "softmax_type", "activation_func_clamp_value"}) {
      nlohmann::json other = plain;
      other[name] = name == std::string("mtp_num_layers") ? nlohmann::json(1) : nlohmann::json("M-");
      const auto refused = config_from_args(other);
      REQUIRE_FALSE(refused.ok());
      CHECK(has(refused.error().message, name));
      other[name] = nullptr;
      CHECK_OK(config_from_args(other));
    }
  }

  TEST_CASE("mutated metadata, archives and arguments give an error and no crash") {
    std::mt19937 random(51);
    TempDir temp;
    for (const std::string name : {"dense-dp", "tp-fully"}) {
      const fs::path at = copied(temp, name) / "iter_0000003";
      for (const char* file : {".metadata", "common.pt", "__0_0.distcp"}) {
        const std::string whole = slurp(at / file);
        for (int k = 0; k < 40; ++k) {
          spit(at / file, mutated(whole, random));
          const auto state = looked(temp / "from");
          const auto open = state.ok() ? open_megatron_state(state.value(), random() % 4 == 0, nlohmann::json())
                                       : Result<ForeignState>(state.error());
          if (open.ok()) {
            read_all(open.value());
          } else {
            CHECK(open.error().message.size() > 10);
          }
        }
        spit(at / file, whole);
      }
    }
  }
}
