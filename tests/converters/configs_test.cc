// The tests read what published and hostile config.json say, and what exports say back.

#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "converters/block_fp8.h"
#include "converters/config_keys.h"
#include "converters/model_compare.h"
#include "converters/quantisation.h"
#include "converters/rewrite.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/foreign_folder.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

using Config = nlohmann::json;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Config config_in(const fs::path& dir) { return Config::parse(slurp(dir / "config.json")); }

/// A value of each type of JSON, with the numbers at which arithmetic ends.
const std::vector<Config>& strange_values() {
  static const std::vector<Config> kValues = {nullptr,
                                              true,
                                              false,
                                              0,
                                              1,
                                              -1,
                                              3,
                                              0.5,
                                              -2.5,
                                              1e300,
                                              NAN,
                                              INFINITY,
                                              INT64_MAX,
                                              INT64_MIN,
                                              UINT64_MAX,
                                              "",
                                              "full_attention",
                                              Config::array(),
                                              Config::array({nullptr}),
                                              Config::array({1, "a", {{"b", 2}}}),
                                              Config::object(),
                                              Config{{"a", 1}},
                                              Config{{"rope_type", 3}, {"factor", "x"}, {"full_attention", 1}}};
  return kValues;
}

/// check(config) with each value of `config`, and of the objects in it, replaced by each strange one.
template <class Check>
void with_strange_values(const Config& config, const Check& check) {
  std::vector<Config::json_pointer> places;
  for (const auto& [key, value] : config.items()) {
    const Config::json_pointer place = Config::json_pointer() / key;
    places.push_back(place);
    if (!value.is_structured()) continue;
    for (const auto& [inner, nothing] : value.items()) {
      if (value.is_array() && inner != "0") break;
      places.push_back(value.is_array() ? place / size_t{0} : place / inner);
    }
  }
  for (const Config::json_pointer& place : places) {
    for (const Config& value : strange_values()) {
      Config changed = config;
      changed[place] = value;
      try {
        check(changed);
      } catch (const std::exception& error) {
        FAIL_CHECK(place.to_string() << " = " << value.dump() << ": " << error.what());
      }
    }
  }
}

/// A folder of the model that config.json says, its numbers all different.
void write_model(const fs::path& dir, const Config& config) {
  fs::create_directories(dir);
  spit(dir / "config.json", config.dump(2));
  const auto model = model_from_config(config);
  REQUIRE_OK(model);
  RawTensors tensors;
  float next = 1;
  for (const Mapping& mapping :
       tensor_map(find_family(config["model_type"].get<std::string>()).value(), model.value())) {
    if (tensors.contains(mapping.stored)) continue;
    std::vector<float> values(static_cast<size_t>(count_elems(mapping.shape)));
    for (float& value : values) value = next++;
    tensors[mapping.stored] = {
        "F32", mapping.shape, std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float))};
  }
  write_safetensors_file(dir / "model.safetensors", tensors);
}

ExportReport there_and_back(const fs::path& source, const fs::path& target) {
  TempDir temp;
  ckpt::PosixBackend io;
  const auto imported = import_hf(io, source, temp / "run", {}, encode);
  REQUIRE_OK(imported);
  auto exported = export_hf(io, imported.value().dir, target, {.overwrite = true}, decode);
  REQUIRE_OK(exported);
  return std::move(exported).value();
}

/// The config.json that an export of this one has, and its warnings.
std::pair<Config, std::vector<std::string>> exported_config(const Config& config) {
  TempDir temp;
  write_model(temp / "in", config);
  const ExportReport report = there_and_back(temp / "in", temp / "out");
  return {config_in(temp / "out"), report.warnings};
}

Config small(const char* type, const Config& more = Config::object()) {
  Config out = {{"model_type", type},
                {"vocab_size", 16},
                {"hidden_size", 16},
                {"intermediate_size", 24},
                {"num_hidden_layers", 2},
                {"num_attention_heads", 4},
                {"num_key_value_heads", 2},
                {"head_dim", 4},
                {"max_position_embeddings", 64},
                {"tie_word_embeddings", false},
                {"transformers_version", "5.24.0"}};
  out.update(more);
  return out;
}

std::string refusal(const Config& config) {
  const auto model = model_from_config(config);
  return model.ok() ? "" : model.error().message;
}

}  // namespace

TEST_SUITE("converters/configs") {
  TEST_CASE("a value of another type in config.json is read or refused, whatever it is") {
    int64_t read = 0, refused = 0;
    const auto check = [&](const Config& changed) {
      std::vector<std::string> notes;
      const auto model = model_from_config(changed, &notes);
      if (!model.ok()) {
        ++refused;
        CHECK_FALSE(model.error().message.empty());
        return;
      }
      ++read;
      const Family family = find_family(changed["model_type"].get<std::string>()).value();
      if (read % 8 == 0 && !family.architecture.empty())  // the slow half: some of each kind are enough
        config_from_model(family, model.value(), DType::kF32, changed);
    };
    std::map<std::string, int> seen;
    for_each_fixture([&](const std::string& name) {
      const Config source = config_in(golden(name));
      if (++seen[source["model_type"].get<std::string>()] == 1) with_strange_values(source, check);
    });
    for (const char* type : {"megatron_gpt", "glm130b", "codegeex"}) {
      with_strange_values({{"model_type", type},
                           {"checkpoint_version", 3.0},
                           {"vocab_size", 64},
                           {"hidden_size", 16},
                           {"num_layers", 2},
                           {"num_attention_heads", 4},
                           {"group_query_attention", true},
                           {"num_query_groups", 2},
                           {"kv_channels", 4},
                           {"ffn_hidden_size", 32},
                           {"position_embedding_type", "rope"},
                           {"max_position_embeddings", 16}},
                          check);
    }
    for (const Config& value : strange_values()) CHECK_NOTHROW(model_from_config(value));
    for (const char* key : {"rms_norm_eps", "rope_theta", "initializer_range"}) {
      CHECK(has(refusal({{"model_type", "llama"}, {key, NAN}}), fmt::format("{} = nan must be a finite number", key)));
    }
    CHECK(has(refusal({{"model_type", "llama"}, {"vocab_size", UINT64_MAX}}), "vocab_size must be a whole number"));
    for (const auto& [type, key, value] : {std::tuple("llama", "rope_theta", 0),
                                           {"llama", "rope_theta", -1},
                                           {"gpt_neox", "rotary_emb_base", 0},
                                           {"gemma3_text", "rope_local_base_freq", 0},
                                           {"llama", "rms_norm_eps", -1},
                                           {"gpt2", "layer_norm_epsilon", 0}}) {
      CHECK(has(refusal({{"model_type", type}, {key, value}}), fmt::format("{} = {} must be above 0", key, value)));
    }
    const auto scaled = [](const Config& scaling) { return refusal(small("llama", {{"rope_scaling", scaling}})); };
    CHECK(has(scaled({{"rope_type", "linear"}, {"factor", 0}}), "rope_scaling.factor = 0 must be at least 1"));
    CHECK(has(scaled({{"rope_type", "yarn"}, {"factor", 4}, {"beta_slow", 0}}), "rope_scaling.beta_slow = 0 must be"));
    CHECK(
        has(scaled({{"rope_type", "yarn"}, {"factor", 4}, {"truncate", 1}}), "rope_scaling.truncate must be true or"));
    MESSAGE(read, " read, ", refused, " refused");
  }

  TEST_CASE("a value of another type beside the weights' description is read or refused, whatever it is") {
    const Config fp8 = {{"quantization_config",
                         {{"quant_method", "fp8"},
                          {"weight_block_size", {128, 128}},
                          {"scale_fmt", "ue8m0"},
                          {"expert_dtype", "fp8"},
                          {"modules_to_not_convert", {"lm_head"}}}}};
    const Config compressed = {{"quantization_config",
                                {{"quant_method", "compressed-tensors"},
                                 {"format", "float-quantized"},
                                 {"config_groups", {{"group_0", {{"weights", {{"block_structure", {8, 8}}}}}}}}}}};
    for (const Config& config : {fp8, compressed}) {
      with_strange_values(config, [](const Config& changed) {
        std::vector<FolderTensor> none;
        ignore(join_quantised(changed, none), "either way");
        BlockFp8::like(changed);
      });
    }
    with_strange_values({{"metadata", {{"total_size", 8}}}, {"weight_map", {{"a", "model.safetensors"}}}},
                        [](const Config& changed) {
                          int64_t size = 0;
                          CHECK_NOTHROW(static_cast<void>(parse_index(changed.dump(), &size).ok()));
                        });
    with_strange_values({{"model_type", "another"},
                         {"layer_types", {"mamba"}},
                         {"rope_parameters", {{"llama_4_scaling_beta", 0.1}}},
                         {"text_config", {{"layer_types", {"conv"}}}}},
                        [](const Config& changed) { CHECK_FALSE(model_from_config(changed).ok()); });
  }

  TEST_CASE("q, k and v that are fused by heads of one channel are exported byte for byte") {
    TempDir temp;
    const Config sizes = {{"vocab_size", 16}, {"hidden_size", 8}, {"num_hidden_layers", 2}, {"num_attention_heads", 8}};
    const auto with = [&](const Config& more) {
      Config out = sizes;
      out.update(more);
      return out;
    };
    for (const Config& config :
         {Config{{"model_type", "bloom"}, {"vocab_size", 16}, {"hidden_size", 8}, {"n_layer", 2}, {"n_head", 8}},
          Config{{"model_type", "gpt_bigcode"},
                 {"vocab_size", 16},
                 {"n_embd", 8},
                 {"n_layer", 2},
                 {"n_head", 8},
                 {"multi_query", false}},
          with({{"model_type", "falcon"}, {"alibi", true}, {"multi_query", false}, {"bias", true}}),
          with({{"model_type", "falcon"}, {"alibi", true}, {"new_decoder_architecture", true}, {"num_kv_heads", 4}}),
          with({{"model_type", "falcon"}, {"alibi", true}, {"new_decoder_architecture", true}, {"num_kv_heads", 8}})}) {
      CAPTURE(config.dump());
      write_model(temp / "in", config);
      there_and_back(temp / "in", temp / "out");
      const RawTensors source = raw_tensors(temp / "in"), written = raw_tensors(temp / "out");
      REQUIRE(written.size() == source.size());
      for (const auto& [name, tensor] : source) {
        CAPTURE(name);
        CHECK(written.at(name).bytes == tensor.bytes);
      }
    }
  }

  TEST_CASE("falcon with slopes takes heads of any size, whatever the rotary keys say") {
    Config config = {{"model_type", "falcon"}, {"hidden_size", 7}, {"num_attention_heads", 7}, {"alibi", true}};
    for (const Config& rope : {Config(), Config{{"rope_type", "yarn"}}, Config{{"type", "linear"}, {"factor", 2.0}}}) {
      config["rope_scaling"] = rope;
      const auto model = model_from_config(config);
      REQUIRE_OK(model);
      CHECK(model.value().positions == Positions::kAlibi);
      CHECK(model.value().rope.scaling == RopeScaling::kNone);
    }
    config["alibi"] = false;
    config["rope_scaling"] = nullptr;
    CHECK(has(refusal(config), "no pair"));
  }

  TEST_CASE("published switches pass where they say what the family computes") {
    for (const auto& [type, keys] :
         {std::pair("qwen3_moe", Config{{"use_qk_norm", true},
                                        {"qkv_bias", false},
                                        {"shared_expert_intermediate_size", 0},
                                        {"layer_types", nullptr}}),
          {"qwen3", Config{{"use_qk_norm", true}, {"num_experts", 0}, {"is_causal", true}}},
          {"qwen2", Config{{"qkv_bias", true}, {"attention_bias", true}, {"use_mrope", false}}},
          {"cohere", Config{{"use_parallel_block", true},
                            {"use_gated_activation", true},
                            {"use_embedding_sharing", true},
                            {"use_parallel_embedding", true},
                            {"position_embedding_type", "rope_gptj"},
                            {"rotary_pct", 1.0},
                            {"rope_theta", 10000.0}}},
          {"cohere2", Config{{"use_parallel_block", true}, {"use_parallel_embedding", true}, {"rotary_pct", 1.0}}},
          {"ernie4_5_moe", Config{{"moe_use_aux_free", true},
                                  {"moe_gate", "topk"},
                                  {"moe_capacity", {64, 64, 64}},
                                  {"num_nextn_predict_layers", 1},
                                  {"use_rmsnorm", true},
                                  {"fuse_rope", true}}},
          {"opt", Config{{"learned_embeddings", true}, {"scale_embeddings", false}, {"activation_dropout", 0.0}}},
          {"falcon", Config{{"ff_factor", 4}, {"activation", "gelu"}}},
          {"gpt2",
           Config{
               {"output_past", true}, {"predict_special_tokens", true}, {"_num_labels", 1}, {"xla_device", nullptr}}},
          {"baichuan", Config{{"_from_model_config", true}}},
          {"bloom", Config{{"alibi", true}, {"offset_alibi", 100}}},
          {"gptj", Config{{"rotary", true}, {"parallel_attn", true}}},
          {"phi", Config{{"qkv_bias", true}, {"lm_head_bias", true}, {"rotary_dim", 32}}},
          {"nemotron", Config{{"rope_percent", 0.5}}},
          {"stablelm", Config{{"rotary_scaling_factor", 1.0}, {"norm_eps", 1e-5}}},
          {"smollm3", Config{{"max_window_layers", 28}, {"layer_types", nullptr}}},
          {"mistral", Config{{"use_sliding_window", true}}},
          {"mixtral", Config{{"norm_topk_prob", true}, {"moe_intermediate_size", 14336}}},
          {"minimax_m2", Config{{"norm_topk_prob", true}, {"use_rope", true}}},
          {"gemma3_text", Config{{"use_qk_norm", true}, {"scale_embedding", true}}},
          {"llama", Config{{"trust_remote_code", true},
                           {"rope_interleaved", false},
                           {"num_local_experts", 0},
                           {"q_lora_rank", 0},
                           {"no_rope_layer_interval", 0},
                           {"final_logit_softcapping", 0.0},
                           {"no_bias", true},
                           {"causal", true},
                           {"use_parallel_residual", false}}}}) {
      CAPTURE(type);
      Config config = keys;
      config["model_type"] = type;
      const auto model = model_from_config(config);
      REQUIRE_OK(model);
      const auto unread = unread_keys(find_family(type).value(), model.value(), config).not_read;
      CHECK_MESSAGE(unread.empty(), fmt::format("{}", fmt::join(unread, ", ")));
    }
  }

  TEST_CASE("a list of layer types passes where it names the layers that have a window") {
    Config config =
        small("mistral", {{"sliding_window", 16}, {"layer_types", {"sliding_attention", "sliding_attention"}}});
    CHECK(refusal(config) == "");
    config["layer_types"] = {"full_attention", "sliding_attention"};
    CHECK(has(refusal(config), "layer_types = "));
    config["layer_types"] = {"sliding_attention"};
    CHECK(has(refusal(config), "layer_types = "));
    config["sliding_window"] = nullptr;
    config["layer_types"] = {"full_attention", "full_attention"};
    CHECK(refusal(config) == "");
  }

  TEST_CASE("layer_types says on export which layers have a window where no other key can") {
    for (const char* type : {"qwen2", "qwen3"}) {
      const Config types = {"sliding_attention", "full_attention"};
      const Config config = small(
          type,
          {{"use_sliding_window", true}, {"sliding_window", 16}, {"max_window_layers", 1}, {"layer_types", types}});
      const auto model = model_from_config(config);
      REQUIRE_OK(model);
      CHECK(model.value().window_layers == std::vector<int64_t>{0});
      const auto family = family_for(model.value(), type);
      REQUIRE_OK(family);
      const Config written = config_from_model(family.value(), model.value(), DType::kF32, Config());
      CHECK(written["layer_types"] == types);
      CHECK(differing_fields(model_from_config(written).value(), model.value()).empty());
    }
  }

  TEST_CASE("published switches are refused where the family computes something else") {
    for (const auto& [type, key, value] : {std::tuple("qwen2", "is_causal", Config(false)),
                                           {"qwen3", "qkv_bias", Config(true)},
                                           {"qwen2", "use_qk_norm", Config(true)},
                                           {"qwen3_moe", "moe_use_aux_free", Config(true)},
                                           {"cohere", "use_parallel_block", Config(false)},
                                           {"cohere2", "use_gated_activation", Config(false)},
                                           {"cohere", "position_embedding_type", Config("rope")},
                                           {"ernie4_5_moe", "use_rmsnorm", Config(false)},
                                           {"opt", "scale_embeddings", Config(true)},
                                           {"opt", "learned_embeddings", Config(1)},
                                           {"llama", "rope_interleaved", Config(true)},
                                           {"llama", "num_local_experts", Config(8)},
                                           {"qwen3_moe", "num_experts_shared", Config(true)},
                                           {"phi", "rotary_dim", Config(16)},
                                           {"nemotron", "rope_percent", Config(0.25)},
                                           {"stablelm", "rotary_scaling_factor", Config(2.0)},
                                           {"llama", "use_rope", Config(false)},
                                           {"gptj", "parallel_attn", Config(false)},
                                           {"qwen2", "use_qk_norm", Config(1)},
                                           {"gptj", "parallel_attn", Config(0)},
                                           {"mistral", "no_bias", Config(false)}}) {
      CAPTURE(type);
      CAPTURE(key);
      Config config = {{"model_type", type}, {key, value}, {"transformers_version", "4.57.6"}};
      if (std::string_view(key) == "no_bias" ||
          std::string_view(key) == "learned_embeddings") {  // says nothing that could be another model
        CHECK(refusal(config) == "");
        continue;
      }
      CHECK(has(refusal(config), fmt::format("{} = ", key)));
    }
  }

  TEST_CASE("tensors that transformers passes over by name are left out with a word, other unknown ones are problems") {
    TempDir temp;
    const std::string name = "hf-ernie4_5_moe-later";
    RawTensors tensors = raw_tensors(golden(name));
    const auto plain = opened_folder(golden(name));
    const RawTensor norm = tensors.at("model.norm.weight");
    for (const char* more : {"model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight",
                             "model.mtp_block.0.input_layernorm.weight", "model.mtp_linear_proj.0.weight"})
      tensors[more] = norm;
    for (const auto& [format, what] : kFormats) {
      CAPTURE(what);
      write_folder(temp / "x", golden(name), format, tensors);
      const auto folder = opened_folder(temp / "x");
      CHECK(weights_of(*folder) == weights_of(*plain));
      REQUIRE(folder->warnings().size() == plain->warnings().size() + 1);
      CHECK(has(folder->warnings().back(), "4 tensors with \"mtp\" in the name left out"));
    }
    tensors["model.more_norm.weight"] = norm;
    write_folder(temp / "x", golden(name), Format::kSafetensors, tensors);
    CHECK(has(refusal_of(temp / "x"), "model.more_norm.weight: unexpected"));
    RawTensors others = raw_tensors(golden("hf-llama-tied-bias"));
    others["model.mtp_emb_norm.0.weight"] = others.at("model.norm.weight");
    write_folder(temp / "x", golden("hf-llama-tied-bias"), Format::kSafetensors, others);
    CHECK(has(refusal_of(temp / "x"), "model.mtp_emb_norm.0.weight: unexpected"));
  }

  TEST_CASE("experts are counted in the layers that have them, and a number that no file supports is refused") {
    TempDir temp;
    Config config = small("qwen3_moe", {{"num_hidden_layers", 8},
                                        {"num_experts", 64},
                                        {"num_experts_per_tok", 2},
                                        {"moe_intermediate_size", 2},
                                        {"mlp_only_layers", {0, 1, 2, 3, 4, 5, 6}}});
    write_model(temp / "in", config);
    CHECK(refusal_of(temp / "in") == "");
    config["mlp_only_layers"] = {0, 1, 2};
    spit(temp / "in" / "config.json", config.dump());
    CHECK(has(refusal_of(temp / "in"), "it says 8 layers, 5 of 64 experts, and the weights beside it are"));
    config["num_hidden_layers"] = 90'000;
    spit(temp / "in" / "config.json", config.dump());
    CHECK(has(refusal_of(temp / "in"), "it says 90000 layers, 89997 of 64 experts"));
  }

  TEST_CASE("exaone is read by the names that it has in transformers 5's memory, its head stored or tied") {
    TempDir temp;
    for (const char* name : {"hf-exaone-plain", "hf-exaone-llama3", "hf-exaone-tied"}) {
      CAPTURE(name);
      const auto published = opened_folder(golden(name));
      RawTensors memory = renamed(raw_tensors(golden(name)), [](std::string stored) {
        for (const auto& [from, to] : {std::pair("transformer.wte.", "model.embed_tokens."),
                                       {"transformer.h.", "model.layers."},
                                       {"transformer.ln_f.", "model.norm."},
                                       {".attn.attention.", ".self_attn."},
                                       {".self_attn.out_proj.", ".self_attn.o_proj."},
                                       {".ln_1.", ".input_layernorm."},
                                       {".ln_2.", ".post_attention_layernorm."},
                                       {".c_fc_0.", ".gate_proj."},
                                       {".c_fc_1.", ".up_proj."},
                                       {".mlp.c_proj.", ".mlp.down_proj."}}) {
          const size_t at = stored.find(from);
          if (at != std::string::npos) stored.replace(at, std::string_view(from).size(), to);
        }
        return stored;
      });
      if (published->model().tied_embeddings) memory["lm_head.weight"] = memory.at("model.embed_tokens.weight");
      for (const bool prefixed : {true, false}) {
        write_folder(temp / "x", golden(name), Format::kSafetensors,
                     prefixed ? memory : renamed(memory, [](const std::string& stored) {
                       return stored.starts_with("model.") ? stored.substr(6) : stored;
                     }));
        const auto folder = opened_folder(temp / "x");
        CHECK(weights_of(*folder) == weights_of(*published));
        CHECK(folder->model().tied_embeddings == published->model().tied_embeddings);
      }
      const auto rewritten = rewrite_hf(temp / "x", temp / "out", {.to = {.overwrite = true}});
      REQUIRE_OK(rewritten);
      CHECK(raw_tensors(temp / "out").size() == raw_tensors(golden(name)).size());
      const auto again = opened_folder(temp / "out");
      CHECK(weights_of(*again) == weights_of(*published));
      memory["transformer.ln_f.weight"] = memory.at("model.norm.weight");
      write_folder(temp / "x", golden(name), Format::kSafetensors, memory);
      CHECK(has(refusal_of(temp / "x"), "there twice"));
    }
  }

  TEST_CASE("type and rope_type that disagree are read as the line that wrote them reads them, with a note") {
    std::vector<std::string> notes;
    const auto read = [&](const char* type, const char* version, const Config& scaling) {
      Config config = small(type, {{"rope_scaling", scaling}, {"transformers_version", version}});
      return model_from_config(config, &notes);
    };
    const Config both = {{"type", "linear"}, {"rope_type", "dynamic"}, {"factor", 2.0}};
    for (const char* type : {"llama", "qwen2", "qwen3", "deepseek_v3", "gpt_neox"}) {  // 4.x copies type over rope_type
      CAPTURE(type);
      Config config = small(type, {{"rope_scaling", both}, {"rope_theta", 10000.0}});
      if (std::string_view(type) == "gpt_neox") config["rotary_pct"] = 1.0;
      if (std::string_view(type) == "deepseek_v3") {
        config.erase("head_dim");
        config.update({{"num_key_value_heads", 4}, {"first_k_dense_replace", 1}});
      }
      for (const auto& [version, scaling] :
           {std::pair("5.24.0", RopeScaling::kDynamic), {"4.57.6", RopeScaling::kLinear}}) {
        config["transformers_version"] = version;
        const auto model = model_from_config(config, &notes);
        REQUIRE_OK(model);
        CHECK(model.value().rope.scaling == scaling);
        REQUIRE(notes.size() == 1);
        CHECK(
            has(notes[0], "rope_type and rope_scaling.type disagree: transformers 5 reads dynamic, 4.x reads linear"));
      }
      config.erase("transformers_version");
      CHECK(has(refusal(config), "transformers_version, which would say who wrote this, is missing"));
    }
    for (const char* type : {"mistral", "granite", "helium"}) {  // both lines read rope_type
      CAPTURE(type);
      for (const char* version : {"5.24.0", "4.57.6", ""}) {
        const auto model = read(type, version, both);
        REQUIRE_OK(model);
        CHECK(model.value().rope.scaling == RopeScaling::kDynamic);
        REQUIRE(notes.size() == 1);
        CHECK(has(notes[0], "transformers reads rope_type"));
      }
    }
    REQUIRE_OK(read("llama", "", {{"type", "linear"}, {"rope_type", "linear"}, {"factor", 2.0}}));
    CHECK(notes.empty());
    const Config su = {{"type", "su"}, {"rope_type", "longrope"}, {"short_factor", {1, 1}}, {"long_factor", {2, 2}}};
    REQUIRE_OK(read("phi3", "5.24.0", su));
    CHECK(notes.empty());
    CHECK(has(read("llama", "5.24.0", {{"type", 3}, {"rope_type", "linear"}}).error().message, "must be a string"));
  }

  TEST_CASE("an export says a scaling in the one spelling that the line it names opens") {
    for (const char* type : {"olmo", "olmo2"}) {
      CAPTURE(type);
      for (const Config& scaling : {Config{{"rope_type", "linear"}, {"factor", 2}},
                                    Config{{"rope_type", "dynamic"}, {"factor", 2.5}, {"rope_theta", 10000.0}}}) {
        const auto [config, warnings] =
            exported_config(small(type, {{"rope_theta", 10000.0}, {"rope_scaling", scaling}}));
        CHECK(config["transformers_version"] == "4.57.6");
        CHECK(config["rope_scaling"] == Config{{"type", scaling["rope_type"]}, {"factor", scaling["factor"]}});
        CHECK(config["rope_scaling"]["factor"].is_number_float());
        CHECK(warnings.empty());
      }
      const auto [plain, none] = exported_config(small(type, {{"rope_scaling", {{"rope_type", "default"}}}}));
      CHECK(plain["rope_scaling"].is_null());
      CHECK(plain["transformers_version"] == "4.57.6");
    }
    const Config longrope = {{"rope_type", "longrope"},
                             {"short_factor", {1.5, 1}},
                             {"long_factor", {2, 3}},
                             {"original_max_position_embeddings", 16}};
    const Config phi3 = small("phi3", {{"original_max_position_embeddings", 16}, {"rope_scaling", longrope}});
    const auto [config, warnings] = exported_config(phi3);
    CHECK(config["transformers_version"] == "4.57.6");
    CHECK(config["rope_scaling"].size() == 3);
    CHECK(config["rope_scaling"]["type"] == "longrope");
    for (const char* type : {"deepseek_v3", "llama", "glm"}) {  // of 4.x some ask a scaling for its factor, or its type
      CAPTURE(type);
      Config source = small(type);
      if (std::string_view(type) == "deepseek_v3") {
        source.erase("head_dim");
        source.update({{"num_key_value_heads", 4},
                       {"n_routed_experts", 4},
                       {"n_group", 2},
                       {"topk_group", 1},
                       {"num_experts_per_tok", 2},
                       {"first_k_dense_replace", 1},
                       {"num_nextn_predict_layers", 0},
                       {"qk_nope_head_dim", 4},
                       {"qk_rope_head_dim", 4},
                       {"v_head_dim", 4},
                       {"kv_lora_rank", 4},
                       {"q_lora_rank", nullptr},
                       {"moe_intermediate_size", 4}});
      }
      for (const Config& scaling : {Config{{"rope_type", "default"}}, Config{{"factor", 2.0}}, Config::object()}) {
        source["rope_scaling"] = scaling;
        CHECK(exported_config(source).first["rope_scaling"].is_null());
      }
      source["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};  // a spelling that both lines read stays
      CHECK(exported_config(source).first["rope_scaling"] == source["rope_scaling"]);
    }
  }

  TEST_CASE("a null of the source is written as the number that it stands for") {
    const auto [config, warnings] = exported_config(small("qwen3_moe", {{"num_key_value_heads", nullptr},
                                                                        {"rope_theta", nullptr},
                                                                        {"norm_topk_prob", nullptr},
                                                                        {"num_experts", 2},
                                                                        {"num_experts_per_tok", 1},
                                                                        {"moe_intermediate_size", 4}}));
    CHECK(config["num_key_value_heads"] == 4);
    CHECK(config["rope_theta"] == 10000.0);
    CHECK(config["norm_topk_prob"] == false);
  }

  TEST_CASE("an export names transformers 5 where transformers 4 has no class or computes otherwise") {
    for (const char* name : {"hf-exaone-plain", "hf-internlm3-bias", "hf-minimax_m2-half", "hf-ministral3-tied"}) {
      CAPTURE(name);
      TempDir temp;
      const ExportReport report = there_and_back(golden(name), temp / "out");
      CHECK(report.warnings.empty());
      CHECK(config_in(temp / "out")["transformers_version"] == "5.24.0");
      const auto again = opened_folder(temp / "out");
      CHECK(differing_fields(again->model(), opened_folder(golden(name))->model()).empty());
    }
    const Config llama4 = small("llama4_text", {{"intermediate_size_mlp", 24},
                                                {"num_local_experts", 2},
                                                {"no_rope_layers", {1, 0}},
                                                {"rope_scaling", {{"rope_type", "linear"}, {"factor", 4.0}}}});
    const Config olmo3 = small("olmo3", {{"sliding_window", 16},
                                         {"rope_parameters",
                                          {{"full_attention", {{"rope_type", "default"}, {"rope_theta", 1e6}}},
                                           {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}}}});
    const Config gpt_oss = small("gpt_oss", {{"swiglu_limit", 5.0}, {"num_local_experts", 4}});
    const Config olmo = small("olmo", {{"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 1.0}}}});
    const Config phi3 = small(
        "phi3",
        {{"head_dim", 8},
         {"original_max_position_embeddings", 16},
         {"rope_scaling", {{"type", "longrope"}, {"short_factor", {1, 1, 1, 1}}, {"long_factor", {2, 2, 2, 2}}}}});
    for (const auto& [source, says] :
         {std::pair(llama4, "4.x takes any rope_scaling of this family for llama3"),
          {olmo3, "4.x turns layers with a window by rope_theta = 1000000 too, not by 10000"},
          {gpt_oss, "4.x computes gates with 1.702 and 7"},
          {olmo, "4.x takes a rope_scaling.factor above 1"},
          {phi3, "4.x counts longrope's factors for heads of 4 channels"}}) {
      const auto [config, warnings] = exported_config(source);
      CAPTURE(says);
      CHECK(config["transformers_version"] == "5.24.0");
      REQUIRE(warnings.size() == 1);
      CHECK(has(warnings[0], says));
      TempDir temp;
      write_model(temp / "in", source);
      const auto rewritten = rewrite_hf(temp / "in", temp / "out", {});
      REQUIRE_OK(rewritten);
      CHECK(config_in(temp / "out")["transformers_version"] == "5.24.0");
      CHECK(has(rewritten.value().warnings.back(), says));
    }
    Config plain = llama4;
    plain["rope_scaling"] = {{"type", "llama3"},
                             {"factor", 8.0},
                             {"low_freq_factor", 1.0},
                             {"high_freq_factor", 4.0},
                             {"original_max_position_embeddings", 32}};
    CHECK(exported_config(plain).first["transformers_version"] == "4.57.6");
    const Config gemma = small("gemma", {{"hidden_act", "gelu"}, {"tie_word_embeddings", true}});
    CHECK(exported_config(gemma).first["hidden_act"] == "gelu_pytorch_tanh");  // which 4.x reads as it is meant
  }
}
