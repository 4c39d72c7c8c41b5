// Names of transformers 5's memory: the experts of a layer stacked into one tensor. What save_pretrained writes has the
// published names; a trainer that saves model.state_dict() by itself writes these.

#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "converters/model_compare.h"
#include "converters/rewrite.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/foreign_folder.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

const std::vector<std::string> kMixtures = {"hf-mixtral-top2",       "hf-mixtral-top3",    "hf-mixtral-window",
                                            "hf-qwen3_moe-balanced", "hf-qwen3_moe-plain", "hf-qwen3_moe-window",
                                            "hf-qwen2_moe-gated",    "hf-glm4_moe-dense",  "hf-glm4_moe-groups",
                                            "hf-ernie4_5_moe-later", "hf-minimax_m2-half", "hf-deepseek_v2-groups",
                                            "hf-deepseek_v3-yarn"};

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// The state dict of the class in transformers 5: gate rows first, then up, of each expert. Source: transformers 5.24
/// conversion_mapping.py, models/mixtral/modeling_mixtral.py.
RawTensors in_memory(const fs::path& fixture) {
  const nlohmann::json config = nlohmann::json::parse(slurp(fixture / "config.json"));
  RawTensors out = raw_tensors(fixture);
  const auto take = [&](const std::string& name) {
    REQUIRE(out.contains(name));
    return std::move(out.extract(name).mapped());
  };
  for (int64_t layer = 0; layer < config["num_hidden_layers"]; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer);
    const bool mixtral = config["model_type"] == "mixtral" || config["model_type"] == "minimax_m2";
    const std::string block = mixtral ? ".block_sparse_moe" : ".mlp";
    if (!out.contains(at + block + ".gate.weight")) continue;  // a dense layer
    int64_t experts = 0;
    for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}) {
      experts = std::max(experts, config.value(key, int64_t{0}));
    }
    std::vector<RawTensor> gate_up, down;
    for (int64_t expert = 0; expert < experts; ++expert) {
      const std::string of = at + block + ".experts." + std::to_string(expert);
      const RawTensor gate = take(of + (mixtral ? ".w1.weight" : ".gate_proj.weight"));
      const RawTensor up = take(of + (mixtral ? ".w3.weight" : ".up_proj.weight"));
      gate_up.push_back(joined(gate, up));
      down.push_back(take(of + (mixtral ? ".w2.weight" : ".down_proj.weight")));
    }
    out[at + ".mlp.experts.gate_up_proj"] = stacked(gate_up);
    out[at + ".mlp.experts.down_proj"] = stacked(down);
    const RawTensor router = take(at + block + ".gate.weight");
    out[at + ".mlp.gate.weight"] = router;
    const std::string correction = ".e_score_correction_bias";
    if (config["model_type"] == "minimax_m2") out[at + ".mlp" + correction] = take(at + block + correction);
    if (config["model_type"] == "ernie4_5_moe") {
      out[at + ".mlp.gate.moe_statics" + correction] = take(at + ".mlp.moe_statics" + correction);
    }
  }
  return out;
}

}  // namespace

TEST_SUITE("converters/stacks") {
  TEST_CASE("stacked experts of transformers 5's memory are the published model, in each format of weights") {
    TempDir temp;
    for (const std::string& name : kMixtures) {
      CAPTURE(name);
      const auto published = opened_folder(golden(name));
      const Weights expected = weights_of(*published);
      for (const auto& [format, what] : kFormats) {
        CAPTURE(what);
        write_folder(temp / "x", golden(name), format, in_memory(golden(name)));
        const auto folder = HfFolder::open(temp / "x");
        REQUIRE_OK(folder);
        CHECK(folder.value()->warnings().empty());
        CHECK(folder.value()->ignored().empty());
        CHECK(weights_of(*folder.value()) == expected);
        CHECK(folder.value()->dtype() == published->dtype());
      }
    }
  }

  TEST_CASE("logits of stacked experts are those of transformers, and those of exchanged halves are not") {
    TempDir temp;
    const std::string name = "hf-mixtral-top2";
    write_folder(temp / "x", golden(name), Format::kSafetensors, in_memory(golden(name)));
    const auto folder = opened_folder(temp / "x");
    CHECK(logit_difference(folder->model(), weights_of(*folder), reference_of(name)) <= kLogitGate);
    RawTensors wrong = in_memory(golden(name));
    for (auto& [tensor, raw] : wrong) {
      if (!tensor.ends_with(".gate_up_proj")) continue;
      const size_t expert = raw.bytes.size() / static_cast<size_t>(raw.shape[0]);
      for (size_t at = 0; at < raw.bytes.size(); at += expert)
        std::rotate(raw.bytes.begin() + at, raw.bytes.begin() + at + expert / 2, raw.bytes.begin() + at + expert);
    }
    write_folder(temp / "y", golden(name), Format::kSafetensors, wrong);
    const auto exchanged = opened_folder(temp / "y");
    CHECK(logit_difference(exchanged->model(), weights_of(*exchanged), reference_of(name)) > 100 * kLogitGate);
  }

  TEST_CASE("a box of an expert in a stack is a box of its own tensor") {
    TempDir temp;
    write_folder(temp / "x", golden("hf-mixtral-top2"), Format::kSafetensors, in_memory(golden("hf-mixtral-top2")));
    const auto folder = opened_folder(temp / "x");
    for (const char* name : {"layers.1.moe.experts.3.up.weight", "layers.0.moe.experts.4.down.weight"}) {
      const auto index = static_cast<int64_t>(tensor_index(*folder, name));
      const Shape& shape = folder->tensors()[index].shape;
      std::vector<float> whole(static_cast<size_t>(count_elems(shape)));
      REQUIRE(folder->read(index, whole).ok());
      const Box box{{2, 3}, {shape[0] - 1, shape[1] - 2}};
      std::vector<float> part(static_cast<size_t>(box.count_elems())), cut(part.size());
      copy_box_out(whole.data(), shape, box, cut.data());
      REQUIRE(folder->read_box(index, box, part).ok());
      CHECK(part == cut);
    }
  }

  TEST_CASE("stacked experts go out under the published names, through a checkpoint and from folder to folder") {
    for (const std::string& name : kMixtures) {
      CAPTURE(name);
      TempDir temp;
      write_folder(temp / "x", golden(name), Format::kSafetensors, in_memory(golden(name)));
      ckpt::PosixBackend io;
      ImportOptions options;
      options.mesh = {.tp = tp_of(opened_folder(golden(name))->model()), .pp = 2, .dp = 1};
      const auto imported = import_hf(io, temp / "x", temp / "run", options, encode);
      REQUIRE_OK(imported);
      const auto exported = export_hf(io, imported.value().dir, temp / "out", {}, decode);
      REQUIRE_OK(exported);
      CHECK(slurp(temp / "out" / "model.safetensors") == slurp(golden(name) / "model.safetensors"));
      const auto direct = rewrite_hf(temp / "x", temp / "direct", {});
      REQUIRE_OK(direct);
      CHECK(slurp(temp / "direct" / "model.safetensors") == slurp(golden(name) / "model.safetensors"));
      const auto wider = rewrite_hf(temp / "x", temp / "wider", {.to = {.dtype = DType::kF32}});
      REQUIRE_OK(wider);
      CHECK(weights_of(*opened_folder(temp / "wider")) == weights_of(*opened_folder(golden(name))));
    }
  }

  TEST_CASE("a layer may have its experts stacked and another each of its own") {
    TempDir temp;
    RawTensors mixed = in_memory(golden("hf-mixtral-top2"));
    std::erase_if(mixed, [](const auto& item) { return item.first.starts_with("model.layers.1."); });
    for (const auto& [name, tensor] : raw_tensors(golden("hf-mixtral-top2"))) {
      if (name.starts_with("model.layers.1.")) mixed[name] = tensor;
    }
    write_folder(temp / "x", golden("hf-mixtral-top2"), Format::kSafetensors, mixed);
    CHECK(weights_of(*opened_folder(temp / "x")) == weights_of(*opened_folder(golden("hf-mixtral-top2"))));
  }

  TEST_CASE("a stack that is missing, of another shape, or beside its own experts is reported by its name") {
    TempDir temp;
    const fs::path fixture = golden("hf-mixtral-top2");
    const auto refusal = [&](const std::function<void(RawTensors&)>& change) {
      RawTensors tensors = in_memory(fixture);
      change(tensors);
      write_folder(temp / "x", fixture, Format::kSafetensors, tensors);
      return refusal_of(temp / "x");
    };
    const std::string gate_up = "model.layers.1.mlp.experts.gate_up_proj",
                      down = "model.layers.1.mlp.experts.down_proj";
    CHECK(refusal([](RawTensors&) {}).empty());
    std::string told = refusal([&](RawTensors& t) { t.erase(gate_up); });
    CAPTURE(told);
    CHECK(has(told, gate_up + ": missing, expected [5, 20, 18]"));
    CHECK_FALSE(has(told, "block_sparse_moe"));
    told = refusal([&](RawTensors& t) { std::swap(t.at(gate_up).shape[1], t.at(gate_up).shape[2]); });
    CHECK(has(told, gate_up + ": shape [5, 18, 20], expected [5, 20, 18]"));
    told = refusal([&](RawTensors& t) { t.at(gate_up).shape = {100, 18}; });
    CHECK(has(told, gate_up + ": shape [100, 18], expected [5, 20, 18]"));
    const std::string own = "model.layers.1.block_sparse_moe.experts.2.w2.weight";
    told = refusal([&](RawTensors& t) { t[own] = raw_tensors(fixture).at(own); });
    CHECK(has(told, down + ": there twice, as " + own + " and as " + down));
    told = refusal([&](RawTensors& t) { t.at(gate_up).dtype = "I16"; });
    CHECK(has(told, gate_up + ": dtype I16"));
  }

  TEST_CASE("as many experts as the stacks hold, and no more, are looked for") {
    TempDir temp;
    const fs::path fixture = golden("hf-mixtral-top2");
    write_folder(temp / "x", fixture, Format::kSafetensors, in_memory(fixture));
    nlohmann::json config = nlohmann::json::parse(slurp(temp / "x" / "config.json"));
    config["num_local_experts"] = 60000;
    spit(temp / "x" / "config.json", config.dump());
    CHECK(has(refusal_of(temp / "x"), "it says 2 layers of 60000 experts, and the weights beside it are"));
    // Many experts in few tensors: a folder that is one.
    RawTensors many;
    for (const auto& [name, tensor] : in_memory(fixture)) {
      std::vector<RawTensor> copies;
      const int64_t rows = tensor.shape[0];
      for (int k = 0; k < 8 && name.find(".mlp.") != std::string::npos; ++k) {
        for (int64_t row = 0; row < rows; ++row) copies.push_back(rows_of(tensor, row, 1));
      }
      if (copies.empty()) {
        many[name] = tensor;
        continue;
      }
      RawTensor& wide = many[name] = tensor;
      wide.shape[0] = static_cast<int64_t>(copies.size());
      wide.bytes.clear();
      for (const RawTensor& copy : copies) wide.bytes += copy.bytes;
    }
    write_folder(temp / "x", fixture, Format::kSafetensors, many);
    config["num_local_experts"] = 40;
    spit(temp / "x" / "config.json", config.dump());
    const auto folder = HfFolder::open(temp / "x");
    REQUIRE_OK(folder);
    CHECK(folder.value()->model().moe.experts == 40);
  }
}
