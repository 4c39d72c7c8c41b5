// What published and hostile config.json say, and what exports say back.

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <set>

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

std::string refusal(const Config& config) {
  const auto model = model_from_config(config);
  return model.ok() ? "" : model.error().message;
}

}  // namespace

TEST_SUITE("converters/configs") {
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
}
