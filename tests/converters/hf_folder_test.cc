// What a folder can have wrong, and that all of it is told at once.
#include <doctest/doctest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/converters/fixtures.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

/// A copy of a fixture that may be changed.
struct Copy {
  TempDir temp;
  fs::path dir = temp / "model";
  explicit Copy(const std::string& name) { fs::copy(golden(name), dir); }

  void edit_config(const std::function<void(nlohmann::json&)>& change) {
    auto config = nlohmann::json::parse(slurp(dir / "config.json"));
    change(config);
    spit(dir / "config.json", config.dump());
  }

  struct Tensor {
    std::string dtype;
    Shape shape;
    std::string bytes;
  };
  /// Rewrites a safetensors file of the folder.
  void edit_tensors(const std::function<void(std::map<std::string, Tensor>&)>& change,
                    const std::string& file = "model.safetensors") {
    std::map<std::string, Tensor> tensors;
    auto opened = SafetensorsFile::open(dir / file);
    REQUIRE(opened.ok());
    for (const SafeTensor& t : opened.value().header().tensors) {
      Tensor tensor{t.dtype, t.shape, std::string(t.end - t.begin, '\0')};
      REQUIRE(opened.value().read(t, 0, t.end - t.begin, reinterpret_cast<std::byte*>(tensor.bytes.data())).ok());
      tensors[t.name] = tensor;
    }
    change(tensors);
    std::vector<SafeTensor> list;
    for (const auto& [name, t] : tensors) list.push_back({.name = name, .dtype = t.dtype, .shape = t.shape});
    REQUIRE(write_safetensors(dir / file, list, {{"format", "pt"}}, [&](const SafeTensor& t, const ByteSink& sink) {
              const std::string& bytes = tensors[t.name].bytes;
              return sink(reinterpret_cast<const std::byte*>(bytes.data()), static_cast<int64_t>(bytes.size()));
            }).ok());
  }

  Result<std::unique_ptr<HfFolder>> open(const HfOptions& options = {}) const { return HfFolder::open(dir, options); }
  std::string refusal() const {
    const auto opened = open();
    return opened.ok() ? "accepted" : opened.error().message;
  }
};

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE("converters/hf_folder") {
  TEST_CASE("missing, unexpected, doubled, oddly shaped and oddly typed tensors are listed together") {
    Copy copy("hf-gpt2-tied");
    copy.edit_tensors([](auto& tensors) {
      tensors.erase("transformer.h.1.mlp.c_fc.weight");
      tensors["transformer.h.7.ln_1.weight"] = {"F32", {2}, std::string(8, 'x')};
      tensors["ln_f.bias"] = tensors["transformer.ln_f.bias"];
      std::swap(tensors["transformer.h.0.mlp.c_fc.weight"].shape[0],
                tensors["transformer.h.0.mlp.c_fc.weight"].shape[1]);
      tensors["transformer.h.2.ln_2.bias"] = {"I8", {36}, std::string(36, 'x')};
    });
    const std::string message = copy.refusal();
    CAPTURE(message);
    CHECK(has(message, copy.dir.string()));
    CHECK(has(message, "transformer.h.1.mlp.c_fc.weight: missing, expected [36, 44]"));
    CHECK(has(message, "transformer.h.7.ln_1.weight: unexpected, F32 [2]"));
    CHECK(has(message, "transformer.ln_f.bias: there twice"));
    CHECK(has(message, "transformer.h.0.mlp.c_fc.weight: shape [44, 36], expected [36, 44]"));
    CHECK(has(message, "transformer.h.2.ln_2.bias: dtype I8"));
  }

  TEST_CASE("the backbone's prefix may be missing, and old buffers are skipped by their whole name") {
    const Reference reference = reference_of("hf-gpt2-tied");
    Copy copy("hf-gpt2-tied");
    copy.edit_tensors([](auto& tensors) {
      std::map<std::string, Copy::Tensor> bare;
      for (auto& [name, tensor] : tensors) bare[name.substr(std::string("transformer.").size())] = tensor;
      bare["h.0.attn.bias"] = {"U8", {1, 1, 2, 2}, std::string(4, '\1')};
      bare["h.2.attn.masked_bias"] = {"F32", {}, std::string(4, '\0')};
      tensors = bare;
    });
    const auto folder = copy.open();
    REQUIRE_OK(folder);
    CHECK(logit_difference(folder.value()->model(), weights_of(*folder.value()), reference) <= kLogitGate);
    copy.edit_tensors([](auto& tensors) { tensors["h.0.crossattention.biases"] = {"U8", {1}, "x"}; });
    CHECK(has(copy.refusal(), "h.0.crossattention.biases: unexpected"));
  }

  TEST_CASE("a wrapper's prefix on every tensor gives the same model; one that nobody knows is named in few lines") {
    const auto prefixed = [](const std::string& prefix) {
      Copy copy("hf-llama-tied-bias");
      copy.edit_tensors([&](std::map<std::string, Copy::Tensor>& tensors) {
        std::map<std::string, Copy::Tensor> out;
        for (auto& [name, tensor] : tensors) out[prefix + name] = tensor;
        out["model.rotary_emb.inv_freq"] = {"F32", {2}, std::string(8, '\0')};
        tensors = out;
      });
      return copy.refusal();
    };
    for (const char* prefix : {"_orig_mod.", "module.", "app.", "model.", "module.model."})
      CHECK(prefixed(prefix) == "accepted");
    const std::string refused = prefixed("student.");
    CHECK(has(refused, "names of the model have \"student.\" before them"));
    CHECK(std::ranges::count(refused, '\n') == 1);
  }

  TEST_CASE("tokenizers, templates and terms of use are kept beside the weights") {
    Copy copy("hf-llama-tied-bias");
    const std::vector<std::string> kept = {"LICENSE.txt",        "USE_POLICY.md", "qwen.tiktoken",      "tekken.json",
                                           "tokenizer.model.v3", "vocab.txt",     "chat_template.jinja"};
    for (const std::string& name : kept) spit(copy.dir / name, "{}");
    spit(copy.dir / "training_args.bin", "x");
    const auto folder = copy.open();
    REQUIRE_OK(folder);
    const auto& found = folder.value()->kept_files();
    for (const std::string& name : kept) CHECK(std::ranges::find(found, name) != found.end());
    CHECK(std::ranges::find(found, "training_args.bin") == found.end());
  }

  TEST_CASE("no name that leaves a folder is that of a tokenizer's file or of terms of use") {
    for (const char* name : {"LICENSE", "x.jinja", "tokenizer.model.v3", "tekken.json"}) CHECK(is_passed_file(name));
    for (const char* name :
         {"../x.jinja", "/etc/x.jinja", "a/b.jinja", "LICENSE/../../x", "tokenizer.model/x", ".jinja", ""}) {
      CAPTURE(name);
      CHECK_FALSE(is_passed_file(name));
    }
    CHECK_FALSE(is_passed_file(std::string_view("LICENSE\0x", 9)));
  }

  TEST_CASE("tied embeddings: each of the cases has its answer") {
    const std::string embedding = "transformer.wte.weight", head = "lm_head.weight";
    SUBCASE("the head alone stands for both") {
      Copy copy("hf-gpt2-tied");
      copy.edit_tensors([&](auto& tensors) {
        tensors[head] = tensors[embedding];
        tensors.erase(embedding);
      });
      const auto folder = copy.open();
      REQUIRE_OK(folder);
      CHECK(logit_difference(folder.value()->model(), weights_of(*folder.value()), reference_of("hf-gpt2-tied")) <=
            kLogitGate);
    }
    SUBCASE("two equal copies are one") {
      Copy copy("hf-gpt2-tied");
      copy.edit_tensors([&](auto& tensors) { tensors[head] = tensors[embedding]; });
      const auto folder = copy.open();
      REQUIRE(folder.ok());
      CHECK(folder.value()->model().tied_embeddings);
    }
    SUBCASE("two different ones are refused, or kept when told to") {
      Copy copy("hf-gpt2-tied");
      copy.edit_tensors([&](auto& tensors) {
        tensors[head] = tensors[embedding];
        tensors[head].bytes[400] ^= 1;
      });
      CHECK(has(copy.refusal(), "transformer.wte.weight and lm_head.weight differ (first at element 100 of 4716)"));
      const auto folder = copy.open({.untie = true});
      REQUIRE_OK(folder);
      CHECK(!folder.value()->model().tied_embeddings);
      CHECK(folder.value()->warnings().size() == 1);
    }
    SUBCASE("untied without a head is refused: none is invented") {
      Copy copy("hf-gpt2-tied");
      copy.edit_config([](auto& config) { config["tie_word_embeddings"] = false; });
      const std::string message = copy.refusal();
      CHECK(has(message, "lm_head.weight: missing, expected [131, 36]"));
      CHECK(has(message, "tie_word_embeddings is false"));
    }
    SUBCASE("untied and equal stays untied") {
      Copy copy("hf-gpt2-erf-untied");
      copy.edit_tensors([&](auto& tensors) { tensors[head] = tensors[embedding]; });
      const auto folder = copy.open();
      REQUIRE(folder.ok());
      CHECK(!folder.value()->model().tied_embeddings);
    }
  }

  TEST_CASE("an index must fit its files") {
    const std::string index = "model.safetensors.index.json", second = "model-00002-of-00003.safetensors";
    const auto edit = [&](Copy& copy, const std::function<void(nlohmann::json&)>& change) {
      auto json = nlohmann::json::parse(slurp(copy.dir / index));
      change(json);
      spit(copy.dir / index, json.dump());
    };
    Copy copy("hf-llama-gqa-sharded");
    SUBCASE("a missing file") {
      fs::remove(copy.dir / second);
      CHECK(has(copy.refusal(), second + ": the file is missing"));
    }
    SUBCASE("a tensor in another file than it says, and one that is nowhere") {
      edit(copy, [&](auto& json) {
        json["weight_map"]["model.norm.weight"] = second;
        json["weight_map"]["nowhere"] = second;
      });
      const std::string message = copy.refusal();
      CAPTURE(message);
      CHECK(has(message, "model.norm.weight: is in model-00003-of-00003.safetensors, the index says " + second));
      CHECK(has(message, "nowhere: is not in " + second));
    }
    SUBCASE("a tensor of the model that it does not list") {
      edit(copy, [&](auto& json) { json["weight_map"].erase("lm_head.weight"); });
      CHECK(has(copy.refusal(),
                "lm_head.weight: missing, for the index does not list it in model-00003-of-00003.safetensors"));
    }
    SUBCASE("names that leave the folder") {
      for (const char* name : {"../model.safetensors", "/etc/passwd", "", ".."}) {
        edit(copy, [&](auto& json) { json["weight_map"]["model.norm.weight"] = name; });
        CHECK(has(copy.refusal(), "must be the name of a file in this folder"));
      }
    }
    SUBCASE("a wrong total and stray files are warnings") {
      edit(copy, [&](auto& json) { json["metadata"]["total_size"] = 5; });
      fs::copy(copy.dir / second, copy.dir / "model-00009-of-00009.safetensors");
      const auto folder = copy.open();
      REQUIRE(folder.ok());
      CHECK(folder.value()->warnings().size() == 2);
    }
    SUBCASE("a single file beside it wins") {
      fs::copy(golden("hf-gpt2-tied") / "model.safetensors", copy.dir / "model.safetensors");
      CHECK(has(copy.refusal(), "transformer.wte.weight: unexpected"));
    }
  }

  TEST_CASE("folders of other formats, families and switches that are not computed are refused in a sentence") {
    Copy copy("hf-llama-tied-bias");
    const auto with = [&](const std::string& key, const nlohmann::json& value) {
      Copy other("hf-llama-tied-bias");
      other.edit_config([&](auto& config) { config[key] = value; });
      return other.refusal();
    };
    CHECK(has(with("model_type", "mamba"), "model_type \"mamba\" is not known; known: "));
    CHECK(has(with("model_type", "mamba"), ", gptj, "));
    CHECK(has(with("rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}), "low_freq_factor is missing"));
    CHECK(has(with("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5.0}}), "disagree"));
    CHECK(has(with("hidden_act", "mish"), "hidden_act \"mish\": known are silu, swish, gelu"));
    CHECK(has(with("num_key_value_heads", 5), "5 key/value heads do not divide 6 heads"));
    CHECK(has(with("rms_norm_eps", "small"), "rms_norm_eps must be a number, got \"small\""));
    CHECK(has(with("quantization_config", {{"bits", 4}}), "must be an object with a quant_method"));
    CHECK(has(with("quantization_config", {{"quant_method", "gptq"}, {"bits", 4}}),
              "quant_method \"gptq\" (GPTQ, packed integers, 4 bits) cannot be read here; known: fp8"));
    CHECK(has(with("hidden_size", 1e300), "hidden_size must be a whole number"));
    for (const int64_t layers : {int64_t{-1}, int64_t{0}, int64_t{100001}, int64_t{1000000000}}) {
      const std::string told = with("num_hidden_layers", layers);
      CHECK(has(told, "config.json: num_hidden_layers = " + std::to_string(layers) + " is out of range, 1 to 100000"));
    }
    CHECK(has(with("num_hidden_layers", 100000), "config.json: it says 100000 layers, and the weights beside it are"));
    CHECK(has(with("vocab_size", 2000000000), "vocab_size = 2000000000 is out of range"));
    CHECK(has(with("hidden_size", 1 << 21), "hidden_size = 2097152 is out of range"));
    fs::remove(copy.dir / "model.safetensors");
    CHECK(has(copy.refusal(), "has weights by another name: reference.safetensors"));
    fs::remove(copy.dir / "reference.safetensors");
    CHECK(has(copy.refusal(), "has no weights; expected model.safetensors"));
    spit(copy.dir / "pytorch_model.bin", "PK");
    CHECK(has(copy.refusal(), "pytorch_model.bin: is no file of torch.save"));
    fs::remove(copy.dir / "config.json");
    CHECK(has(copy.refusal(), "has no config.json"));
    CHECK(has(HfFolder::open(copy.dir / "none").error().message, "is no folder"));
  }

  TEST_CASE("absent keys take the class default, not a derived value") {
    const auto model = [](const char* text) { return model_from_config(nlohmann::json::parse(text)); };
    const auto llama = model(R"({"model_type": "llama"})");
    REQUIRE(llama.ok());
    CHECK(llama.value().vocab == 32000);
    CHECK(llama.value().kv_heads == 32);
    CHECK(llama.value().head_dim == 128);
    CHECK(llama.value().norm_eps == 1e-6);
    CHECK(llama.value().rope_theta == 10000);
    CHECK(!llama.value().tied_embeddings);
    CHECK(!llama.value().bias);
    const auto gpt2 = model(R"({"model_type": "gpt2", "n_inner": null, "hidden_size": 96})");
    REQUIRE(gpt2.ok());
    CHECK(gpt2.value().ffn == 384);
    CHECK(gpt2.value().norm_eps == 1e-5);
    CHECK(gpt2.value().tied_embeddings);
    CHECK(gpt2.value().activation == Activation::kGeluTanh);
  }

  TEST_CASE("4.x and 5.x forms of one config are one model") {
    const char* old_form =
        R"({"model_type": "llama", "rope_theta": 370.0, "rope_scaling": null, "torch_dtype": "float32"})";
    const char* new_form =
        R"({"model_type": "llama", "rope_parameters": {"rope_theta": 370.0, "rope_type": "default"}, "dtype": "float32"})";
    for (const char* text : {old_form, new_form}) {
      const auto model = model_from_config(nlohmann::json::parse(text));
      REQUIRE(model.ok());
      CHECK(model.value().rope_theta == 370.0);
      const auto written = config_from_model(find_family("llama").value(), model.value(), DType::kBf16, nullptr);
      CHECK(written["rope_theta"] == 370.0);
      CHECK(written["torch_dtype"] == "bfloat16");
      CHECK(!written.contains("rope_parameters"));
    }
  }

  TEST_CASE("rows of Baichuan 2's head are divided by their lengths, whatever part is read") {
    constexpr int64_t kVocab = 125696;
    Copy copy("hf-baichuan-both");
    std::mt19937 random(6);
    int64_t width = 0;
    copy.edit_config([&](nlohmann::json& config) { config["vocab_size"] = kVocab; });
    copy.edit_tensors([&](auto& tensors) {
      width = tensors["lm_head.weight"].shape[1];
      for (const char* name : {"lm_head.weight", "model.embed_tokens.weight"}) {
        std::vector<float> values(static_cast<size_t>(kVocab * width));
        for (float& value : values) value = static_cast<float>(random() % 4001) / 1000 - 2;
        std::fill_n(values.begin() + 7 * width, width, 0.0f);  // has no length
        tensors[name] = {
            "F32", {kVocab, width}, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}};
      }
    });
    const auto folder = copy.open();
    REQUIRE_OK(folder);
    CHECK(std::ranges::count(folder.value()->warnings(),
                             "the rows of lm_head.weight are divided by their lengths, as the published code does with "
                             "125696 tokens") == 1);
    const auto read = [&](std::string_view name, const Box& box) {
      std::vector<float> out(static_cast<size_t>(box.count_elems()));
      REQUIRE(folder.value()->read_box(tensor_index(*folder.value(), name), box, out).ok());
      return out;
    };
    const Box whole{{0, 0}, {kVocab, width}};
    const std::vector<float> head = read("head.weight", whole);
    for (int64_t row = 0; row < kVocab; row += 13) {
      double squares = 0;
      for (int64_t c = 0; c < width; ++c) squares += std::pow(head[static_cast<size_t>(row * width + c)], 2);
      CHECK(squares == doctest::Approx(row == 7 ? 0 : 1).epsilon(1e-6));
    }
    for (int round = 0; round < 50; ++round) {
      const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
      const int64_t row = below(kVocab), column = below(width);
      const Box box{{row, column}, {row + 1 + below(kVocab - row), column + 1 + below(width - column)}};
      std::vector<float> cut(static_cast<size_t>(box.count_elems()));
      copy_box_out(head.data(), {kVocab, width}, box, cut.data());
      CHECK(read("head.weight", box) == cut);
    }
    // The embedding is as it is, and a row of the head points where it did.
    const std::vector<float> embedding = read("embed.tokens", whole);
    CHECK(embedding[0] != 0);
    CHECK(*std::ranges::max_element(embedding) > 1);
    CHECK(copy.refusal() == "accepted");
    copy.edit_config([](nlohmann::json& config) { config["tie_word_embeddings"] = true; });
    CHECK(copy.refusal().find("tie_word_embeddings = true with vocab_size = 125696") != std::string::npos);
  }

  TEST_CASE("no truncation or damage of a folder's files crashes; almost all of it is refused") {
    for (const std::string file : {"config.json", "model.safetensors.index.json", "model-00003-of-00003.safetensors"}) {
      Copy copy("hf-llama-gqa-sharded");
      const std::string whole = slurp(copy.dir / file);
      size_t reach = whole.size();  // of a weight file, its header: any weight is a valid weight
      if (file.ends_with(".safetensors")) reach = SafetensorsFile::open(copy.dir / file).value().header().data_offset;
      std::mt19937 random(3);
      int accepted = 0, tried = 0;
      for (int k = 0; k < 300; ++k, ++tried) {
        std::string damaged = whole;
        if (k % 2 == 0) {
          damaged.resize(random() % whole.size());
        } else {
          for (uint32_t n = 0; n <= random() % 3; ++n) damaged[random() % reach] = static_cast<char>(random());
        }
        spit(copy.dir / file, damaged);
        const auto opened = copy.open();
        accepted += opened.ok();
        if (!opened.ok()) CHECK(!opened.error().message.empty());
      }
      CAPTURE(file);
      CHECK(accepted < tried / 4);  // a changed byte inside a token id or a value may leave a valid file
    }
  }
}
