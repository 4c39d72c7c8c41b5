#include <doctest/doctest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "converters/rewrite.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/foreign_folder.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

struct Layout {
  int64_t tp, pp, dp;
};

fs::path imported(const TempDir& temp, const std::string& fixture, Layout layout, const std::string& name = "run") {
  ckpt::PosixBackend io;
  ImportOptions options;
  options.mesh = {.tp = layout.tp, .pp = layout.pp, .dp = layout.dp};
  auto report = import_hf(io, golden(fixture), temp / name, options, encode);
  REQUIRE_OK(report);
  return report.value().dir;
}

Result<ExportReport> exported(const fs::path& checkpoint, const fs::path& to, const ExportOptions& options = {}) {
  ckpt::PosixBackend io;
  return export_hf(io, checkpoint, to, options, decode);
}

std::vector<std::string> names_in(const fs::path& dir) {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(dir)) out.push_back(entry.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

/// Every tensor's bytes by name, over all safetensors files of a folder but the reference.
std::map<std::string, std::string> tensors_in(const fs::path& dir) {
  std::map<std::string, std::string> out;
  for (const std::string& name : names_in(dir)) {
    if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
    auto file = SafetensorsFile::open(dir / name);
    REQUIRE(file.ok());
    for (const SafeTensor& tensor : file.value().header().tensors) {
      std::string bytes(tensor.end - tensor.begin, '\0');
      REQUIRE(file.value().read(tensor, 0, bytes.size(), reinterpret_cast<std::byte*>(bytes.data())).ok());
      REQUIRE(out.emplace(tensor.name, tensor.dtype + to_string(tensor.shape) + bytes).second);
    }
  }
  return out;
}

}  // namespace

TEST_SUITE("converters/round_trip") {
  TEST_CASE("import into any layout, then export, gives every file of the source byte for byte") {
    for (const std::string& name : fixture_names()) {
      std::vector<Layout> layouts = {{1, 1, 1}, {2, 2, 1}, {1, 3, 2}, {2, 1, 3}};
      if (name != "hf-llama-tied-bias") layouts.push_back({4, 3, 2});  // 2 key/value heads there
      for (const Layout& layout : layouts) {
        CAPTURE(name);
        CAPTURE(layout.tp);
        CAPTURE(layout.pp);
        CAPTURE(layout.dp);
        TempDir temp;
        auto report = exported(imported(temp, name, layout), temp / "out");
        REQUIRE_OK(report);
        CHECK(report.value().warnings.empty());
        std::vector<std::string> expected = names_in(golden(name));
        std::erase(expected, "reference.safetensors");
        std::vector<std::string> found = names_in(temp / "out");
        std::erase(found, "README.md");  // the card
        CHECK(found == expected);
        for (const std::string& file : expected) {
          if (file == "config.json") continue;  // ours, in the form that 4.x and 5.x read
          CAPTURE(file);
          CHECK(slurp(temp / "out" / file) == slurp(golden(name) / file));
        }
        CHECK(fs::exists(temp / "run" / "step-00000000" / "manifest.json"));
      }
    }
  }

  TEST_CASE("an exported folder opens again as the same model, and gives the reference logits") {
    for (const std::string& name : fixture_names()) {
      TempDir temp;
      REQUIRE(exported(imported(temp, name, {2, 3, 1}), temp / "out").ok());
      auto again = HfFolder::open(temp / "out");
      REQUIRE_OK(again);
      CHECK(logit_difference(again.value()->model(), weights_of(*again.value()), reference_of(name)) <= kLogitGate);
      const auto before = nlohmann::json::parse(slurp(golden(name) / "config.json"));
      const auto after = nlohmann::json::parse(slurp(temp / "out" / "config.json"));
      for (const auto& [key, value] : after.items()) {
        if (!before.contains(key) || key == "transformers_version") continue;
        CAPTURE(key);
        CHECK(value == before[key]);
        CHECK(value.type_name() == before[key].type_name());
      }
    }
  }

  TEST_CASE("checkpoints of all layouts hold the same weights, readable by any rows") {
    TempDir temp;
    ckpt::PosixBackend io;
    auto one = CheckpointWeights::open(io, imported(temp, "hf-gpt2-erf-untied", {1, 1, 1}, "one"), decode);
    auto many = CheckpointWeights::open(io, imported(temp, "hf-gpt2-erf-untied", {4, 3, 2}, "many"), decode);
    REQUIRE(one.ok());
    REQUIRE(many.ok());
    const Weights weights = weights_of(*one.value());
    CHECK(weights == weights_of(*many.value()));
    for (size_t k = 0; k < weights.size(); ++k) {
      const Shape& shape = one.value()->tensors()[k].shape;
      const int64_t columns = count_elems(shape) / shape[0], first = shape[0] / 3, end = shape[0] - 1;
      std::vector<float> part((end - first) * columns);
      REQUIRE(many.value()->read_rows(static_cast<int64_t>(k), first, end, part).ok());
      CHECK(std::equal(part.begin(), part.end(), weights[k].begin() + first * columns));
    }
    CHECK(many.value()->imported_dtype() == DType::kF32);
  }

  TEST_CASE("rows of a folder's tensors are the rows of the whole, transposed or not") {
    for (const std::string& name : fixture_names()) {
      auto folder = HfFolder::open(golden(name));
      REQUIRE(folder.ok());
      const Weights weights = weights_of(*folder.value());
      for (size_t k = 0; k < weights.size(); ++k) {
        const Shape& shape = folder.value()->tensors()[k].shape;
        const int64_t columns = count_elems(shape) / shape[0], first = 1, end = shape[0] - 2;
        std::vector<float> part((end - first) * columns);
        REQUIRE(folder.value()->read_rows(static_cast<int64_t>(k), first, end, part).ok());
        CHECK(std::equal(part.begin(), part.end(), weights[k].begin() + first * columns));
      }
    }
  }

  TEST_CASE("an export in another dtype and split keeps every value that the dtype can hold") {
    TempDir temp;
    const fs::path checkpoint = imported(temp, "hf-llama-gqa-sharded", {2, 2, 1});
    auto report = exported(checkpoint, temp / "bf16", {.dtype = DType::kBf16, .max_shard_bytes = 20000});
    REQUIRE(report.ok());
    CHECK(report.value().shards > 3);
    REQUIRE(exported(checkpoint, temp / "one", {.max_shard_bytes = kDefaultShardBytes}).ok());
    CHECK(fs::exists(temp / "one" / "model.safetensors"));
    CHECK(!fs::exists(temp / "one" / "model.safetensors.index.json"));
    CHECK(tensors_in(temp / "one") == tensors_in(golden("hf-llama-gqa-sharded")));
    auto source = HfFolder::open(golden("hf-llama-gqa-sharded"));
    auto rounded = HfFolder::open(temp / "bf16");
    REQUIRE_OK(rounded);
    CHECK(rounded.value()->dtype() == DType::kBf16);
    const Weights exact = weights_of(*source.value()), half = weights_of(*rounded.value());
    for (size_t k = 0; k < exact.size(); ++k) {
      for (size_t n = 0; n < exact[k].size(); ++n) REQUIRE(half[k][n] == to_f32(to_bf16(exact[k][n])));
    }
    // And bf16 in, bf16 out: the default is what was imported.
    ckpt::PosixBackend io;
    ImportOptions options;
    options.mesh = {.tp = 4, .pp = 1, .dp = 2};
    auto again = import_hf(io, temp / "bf16", temp / "again", options, encode);
    REQUIRE(again.ok());
    REQUIRE(exported(again.value().dir, temp / "bf16-again").ok());
    CHECK(tensors_in(temp / "bf16-again") == tensors_in(temp / "bf16"));
  }

  TEST_CASE(
      "a folder of several dtypes leaves as it came, in one dtype when told to, but biases of the choice in f32") {
    TempDir temp;
    const auto floats = [](const RawTensor& tensor) {
      RawTensor out{"F32", tensor.shape, ""};
      for (size_t at = 0; at < tensor.bytes.size(); at += 2)
        out.bytes += std::string(2, '\0') + tensor.bytes.substr(at, 2);
      return out;
    };
    RawTensors tensors = raw_tensors(golden("hf-glm4_moe-dense"));
    const std::string norm = "model.layers.1.input_layernorm.weight",
                      bias = "model.layers.1.mlp.gate.e_score_correction_bias";
    REQUIRE(tensors.at(norm).dtype == "BF16");
    REQUIRE(tensors.at(bias).dtype == "F32");
    tensors[norm] = floats(tensors.at(norm));
    write_folder(temp / "mixed", golden("hf-glm4_moe-dense"), Format::kSafetensors, tensors);
    const auto folder = HfFolder::open(temp / "mixed");
    REQUIRE_OK(folder);
    CHECK(folder.value()->dtype() == DType::kBf16);
    REQUIRE(folder.value()->warnings().size() == 1);
    CHECK(folder.value()->warnings()[0].find("the weights have several dtypes: 1 tensors of") == 0);
    ckpt::PosixBackend io;
    const auto run = import_hf(io, temp / "mixed", temp / "run", {}, encode);
    REQUIRE_OK(run);
    REQUIRE_OK(exported(run.value().dir, temp / "out"));
    CHECK(tensors_in(temp / "out") == tensors_in(temp / "mixed"));
    REQUIRE_OK(rewrite_hf(temp / "mixed", temp / "copy", {}));
    CHECK(tensors_in(temp / "copy") == tensors_in(temp / "mixed"));
    REQUIRE_OK(exported(run.value().dir, temp / "one", {.dtype = DType::kBf16}));
    RewriteOptions one;
    one.to.dtype = DType::kBf16;
    REQUIRE_OK(rewrite_hf(temp / "mixed", temp / "one copy", one));
    for (const char* made : {"one", "one copy"}) {
      for (const auto& [name, tensor] : raw_tensors(temp / made)) {
        CAPTURE(name);
        CHECK(tensor.dtype == (name == bias ? "F32" : "BF16"));
        CHECK((name == norm || tensor.bytes == tensors.at(name).bytes));
      }
    }
  }

  TEST_CASE("layers behind the model's own are left out, and their number told") {
    TempDir temp;
    RawTensors tensors = raw_tensors(golden("hf-glm4_moe-dense"));
    const RawTensor square{"BF16", {2, 2}, std::string(8, '\1')};
    for (const char* name : {"model.layers.2.eh_proj.weight", "model.layers.2.shared_head.head.weight",
                             "model.layers.13.mlp.experts.0.up_proj.weight"}) {
      tensors[name] = square;
    }
    write_folder(temp / "x", golden("hf-glm4_moe-dense"), Format::kSafetensors, tensors);
    const auto folder = HfFolder::open(temp / "x");
    REQUIRE_OK(folder);
    REQUIRE(folder.value()->warnings().size() == 1);
    CHECK(folder.value()->warnings()[0] ==
          "3 tensors of layers from model.layers.2 on are left out: they predict further tokens, and config.json does "
          "not say so");
    CHECK(weights_of(*folder.value()) == weights_of(*HfFolder::open(golden("hf-glm4_moe-dense")).value()));
    tensors["model.layers.1.eh_proj.weight"] = square;  // of the model's own layers none is unknown
    write_folder(temp / "y", golden("hf-glm4_moe-dense"), Format::kSafetensors, tensors);
    CHECK_FALSE(HfFolder::open(temp / "y").ok());
  }

  TEST_CASE("a target that is not empty is refused, and replaced without touching other files when told to") {
    TempDir temp;
    const fs::path checkpoint = imported(temp, "hf-gpt2-tied", {1, 1, 1});
    fs::create_directory(temp / "out");
    REQUIRE(exported(checkpoint, temp / "out").ok());  // an empty folder is fine
    spit(temp / "out" / "README.md", "mine");
    spit(temp / "out" / "model-00001-of-00002.safetensors", "an older shard");
    const auto refused = exported(checkpoint, temp / "out");
    REQUIRE(!refused.ok());
    CHECK(refused.error().code == ErrorCode::kInvalidInput);
    CHECK(refused.error().message.find("is not empty") != std::string::npos);
    REQUIRE(exported(checkpoint, temp / "out", {.dtype = DType::kBf16, .overwrite = true}).ok());
    CHECK(slurp(temp / "out" / "README.md") == "mine");
    CHECK(!fs::exists(temp / "out" / "model-00001-of-00002.safetensors"));
    auto opened = HfFolder::open(temp / "out");
    REQUIRE(opened.ok());
    CHECK(opened.value()->dtype() == DType::kBf16);
    CHECK(names_in(temp.path) == std::vector<std::string>{"out", "run"});  // nothing temporary is left
  }

  TEST_CASE("an export that fails leaves the target as it was and nothing beside it") {
    TempDir temp;
    const fs::path checkpoint = imported(temp, "hf-gpt2-tied", {1, 1, 1});
    std::string shard = slurp(checkpoint / "shard-00000-of-00001.h5");
    ckpt::PosixBackend io;
    const auto manifest = ckpt::read_manifest(io, checkpoint);
    REQUIRE(manifest.ok());
    shard[manifest.value().shards[3].offset + 5] ^= 0x10;  // one bit of one weight
    spit(checkpoint / "shard-00000-of-00001.h5", shard);
    const auto failed = exported(checkpoint, temp / "out");
    REQUIRE(!failed.ok());
    CHECK(failed.error().code == ErrorCode::kCorrupt);
    CHECK(failed.error().message.find("layers.0.attn_norm.bias") != std::string::npos);
    CHECK(names_in(temp.path) == std::vector<std::string>{"run"});
  }

  TEST_CASE("a layout that does not fit the model is refused before anything is written") {
    TempDir temp;
    ckpt::PosixBackend io;
    ImportOptions options;
    options.mesh = {.tp = 3, .pp = 1, .dp = 1};
    const auto refused = import_hf(io, golden("hf-llama-gqa-sharded"), temp / "run", options, encode);
    REQUIRE(!refused.ok());
    CHECK(refused.error().message.find("kv_heads") != std::string::npos);
    CHECK(!fs::exists(temp / "run"));
  }

  TEST_CASE("sizes are decimal") {
    CHECK(parse_size("5GB").value() == 5'000'000'000);
    CHECK(parse_size("60KB").value() == 60'000);
    CHECK(parse_size("17").value() == 17);
    for (const char* wrong : {"", "GB", "0GB", "-1", "5 GB", "5GiB", "99999999999TB"}) CHECK(!parse_size(wrong).ok());
  }
}
