// GGUF files, read back, hold the numbers of the Hugging Face folders that they came from, by the names and in the form
// that llama.cpp's own converter gives them. The `gguf` package and transformers: tests/fixtures/check_gguf_exports.py.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <regex>
#include <set>

#include "converters/elements.h"
#include "converters/gguf_export.h"
#include "converters/gguf_vocab.h"
#include "runtime/text/sentencepiece_json.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/gguf_file_reader.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;
using nlohmann::json;

namespace {

/// A folder as it is, but for what architectures fix and the fixtures do not have: the scale of the scores, and the
/// base of layers with a window.
fs::path with_usual_settings(const std::string& name, const fs::path& to) {
  json config = json::parse(slurp(golden(name) / "config.json"));
  if (!config.contains("query_pre_attn_scalar")) return golden(name);
  fs::copy(golden(name), to, fs::copy_options::recursive);
  config["query_pre_attn_scalar"] = config["head_dim"];
  if (config.contains("rope_local_base_freq")) config["rope_local_base_freq"] = 10000;
  if (json& rope = config["rope_parameters"]; rope.is_object() && rope.contains("sliding_attention")) {
    rope["sliding_attention"]["rope_theta"] = 10000;
  }
  if (config["rope_parameters"].is_null()) config.erase("rope_parameters");
  spit(to / "config.json", config.dump());
  return to;
}

/// A checkpoint with a folder's model.
fs::path checkpoint_of(const fs::path& folder, const fs::path& to) {
  ckpt::PosixBackend io;
  const auto report = import_hf(io, folder, to, {.mesh = {.tp = 1, .pp = 1, .dp = 1}}, encode);
  REQUIRE_OK(report);
  return report.value().dir;
}

Result<GgufExportReport> exported(const fs::path& from, const fs::path& to, GgufExportOptions options = {}) {
  ckpt::PosixBackend io;
  return export_gguf(io, from, to, options, decode);
}
GgufExportOptions without_tokenizer(GgufType type = GgufType::kF32) {
  GgufExportOptions out{.type = type};
  out.files.without_tokenizer = true;
  return out;
}

struct Numbers {
  Shape shape;
  std::vector<float> values;
};

/// All tensors of a folder, by Hugging Face's names.
std::map<std::string, Numbers> folder_numbers(const fs::path& dir) {
  std::map<std::string, Numbers> out;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".safetensors") || name == "reference.safetensors") continue;
    const auto file = SafetensorsFile::open(entry.path());
    REQUIRE_OK(file);
    for (const SafeTensor& tensor : file.value().tensors()) {
      std::vector<std::byte> bytes(static_cast<size_t>(tensor.end - tensor.begin));
      REQUIRE_OK(file.value().read(tensor, 0, std::ssize(bytes), bytes.data()));
      Numbers numbers{tensor.shape, std::vector<float>(static_cast<size_t>(count_elems(tensor.shape)))};
      to_floats(tensor.dtype, bytes.data(), std::ssize(numbers.values), numbers.values.data());
      out[tensor.name] = std::move(numbers);
    }
  }
  return out;
}

/// llama.cpp's name of a tensor, its converter's way: by Hugging Face's names, family by family.
std::string llama_cpp_name(const std::string& type, std::string name) {
  static const std::vector<std::pair<std::string, std::string>> kWords = {
      {R"(^transformer\.h\.)", "blk."},
      {R"(^model\.layers\.)", "blk."},
      {R"(^(transformer\.wte|model\.embed_tokens)\.)", "token_embd."},
      {R"(^transformer\.wpe\.)", "position_embd."},
      {R"(^(transformer\.ln_f|model\.norm)\.)", "output_norm."},
      {R"(^lm_head\.)", "output."},
      {R"(\.ln_1\.|\.input_layernorm\.)", ".attn_norm."},
      {R"(\.ln_2\.)", ".ffn_norm."},
      {R"(\.attn\.c_attn\.|\.self_attn\.qkv_proj\.)", ".attn_qkv."},
      {R"(\.attn\.c_proj\.|\.self_attn\.o_proj\.)", ".attn_output."},
      {R"(\.self_attn\.([qkv])_proj\.)", ".attn_$1."},
      {R"(\.self_attn\.([qk])_norm\.)", ".attn_$1_norm."},
      {R"(\.mlp\.c_fc\.|\.mlp\.gate_up_proj\.)", ".ffn_up."},
      {R"(\.mlp\.c_proj\.)", ".ffn_down."},
      {R"(\.(mlp|block_sparse_moe)\.gate\.)", ".ffn_gate_inp."},
      {R"(\.mlp\.experts\.\d+\.(gate|up|down)_proj\.)", ".ffn_$1_exps."},
      {R"(\.experts\.\d+\.w1\.)", ".ffn_gate_exps."},
      {R"(\.experts\.\d+\.w2\.)", ".ffn_down_exps."},
      {R"(\.experts\.\d+\.w3\.)", ".ffn_up_exps."},
      {R"(\.block_sparse_moe)", ""},
      {R"(\.mlp\.shared_expert\.(gate|up|down)_proj\.)", ".ffn_$1_shexp."},
      {R"(\.mlp\.shared_expert_gate\.)", ".ffn_gate_inp_shexp."},
      {R"(\.mlp\.(gate|up|down)_proj\.)", ".ffn_$1."}};
  for (const auto& [from, to] : kWords) name = std::regex_replace(name, std::regex(from), to);
  const bool sandwich = type == "gemma2" || type == "gemma3_text";
  name = std::regex_replace(name, std::regex(R"(\.post_attention_layernorm\.)"),
                            sandwich ? ".post_attention_norm." : ".ffn_norm.");
  name = std::regex_replace(name, std::regex(R"(\.pre_feedforward_layernorm\.)"), ".ffn_norm.");
  return std::regex_replace(name, std::regex(R"(\.post_feedforward_layernorm\.)"), ".post_ffw_norm.");
}

/// Rows of each head as [2, d / 2] become [d / 2, 2].
Numbers paired(const Numbers& from, int64_t heads) {
  Numbers out = from;
  const int64_t rows = from.shape[0], columns = std::ssize(from.values) / rows, d = rows / heads;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t k = 0; k < d / 2; ++k) {
        std::copy_n(from.values.begin() + (h * d + half * (d / 2) + k) * columns, columns,
                    out.values.begin() + (h * d + 2 * k + half) * columns);
      }
    }
  }
  return out;
}

Numbers transposed(const Numbers& from) {
  Numbers out{{from.shape[1], from.shape[0]}, std::vector<float>(from.values.size())};
  for (int64_t r = 0; r < from.shape[0]; ++r) {
    for (int64_t c = 0; c < from.shape[1]; ++c) {
      out.values[static_cast<size_t>(c * from.shape[0] + r)] = from.values[static_cast<size_t>(r * from.shape[1] + c)];
    }
  }
  return out;
}

/// Makes of a folder what llama.cpp's converter does.
std::map<std::string, Numbers> expected_numbers(const fs::path& dir) {
  const json config = json::parse(slurp(dir / "config.json"));
  const std::string type = config["model_type"];
  const bool gemma = type.starts_with("gemma"), llama = type == "llama" || type == "mistral" || type == "mixtral";
  std::map<std::string, Numbers> out;
  std::map<std::string, std::map<int64_t, Numbers>> experts;
  for (auto& [name, numbers] : folder_numbers(dir)) {
    const std::string to = llama_cpp_name(type, name);
    const bool matrix = numbers.shape.size() == 2;
    if (type == "gpt2" && matrix && name.find(".c_") != std::string::npos) numbers = transposed(numbers);
    const int64_t heads = config.value("num_attention_heads", 1);
    if (llama && name.find(".q_proj.") != std::string::npos) numbers = paired(numbers, heads);
    if (llama && name.find(".k_proj.") != std::string::npos) {
      const auto kv = config.find("num_key_value_heads");
      numbers = paired(numbers, kv == config.end() || kv->is_null() ? heads : kv->get<int64_t>());
    }
    if (gemma && name.ends_with("norm.weight")) {
      for (float& x : numbers.values) x += 1.0f;
    }
    std::smatch found;
    if (std::regex_search(name, found, std::regex(R"(\.experts\.(\d+)\.)"))) {
      experts[to][std::stoll(found[1])] = std::move(numbers);
    } else {
      if (name.find("shared_expert_gate") != std::string::npos) numbers.shape = {numbers.shape[1]};
      out[to] = std::move(numbers);
    }
  }
  for (const auto& [name, all] : experts) {
    Numbers& stack = out[name];
    stack.shape = all.begin()->second.shape;
    stack.shape.insert(stack.shape.begin(), std::ssize(all));
    for (const auto& [index, one] : all) stack.values.insert(stack.values.end(), one.values.begin(), one.values.end());
  }
  const bool tied = config.value("tie_word_embeddings", gemma || type == "gpt2");
  if (tied) out.erase("output.weight");
  return out;
}

std::vector<float> floats_of(const GgufContents::Tensor& tensor) {
  std::vector<float> out(static_cast<size_t>(count_elems(tensor.shape)));
  REQUIRE(tensor.bytes.size() >= out.size() * sizeof(float));
  std::memcpy(out.data(), tensor.bytes.data(), out.size() * sizeof(float));
  return out;
}

}  // namespace

TEST_SUITE("converters/gguf") {
  TEST_CASE("a file holds the numbers of the folder, by llama.cpp's names, for every family that has an architecture") {
    std::set<std::string> seen, refused;
    for_each_fixture([&](const std::string& name) {
      TempDir temp;
      const fs::path from = checkpoint_of(with_usual_settings(name, temp / "folder"), temp / "run");
      const auto report = exported(from, temp / "model.gguf", without_tokenizer());
      if (!report.ok()) {
        CHECK(report.error().code == ErrorCode::kUnsupported);
        CHECK(!fs::exists(temp / "model.gguf"));
        refused.insert(name);
        return;
      }
      const std::string type = json::parse(slurp(golden(name) / "config.json"))["model_type"];
      if (type != report.value().model_type) return;  // a family that goes out as another one, by that one's names
      seen.insert(type);
      const std::string file = slurp(temp / "model.gguf");
      const GgufContents contents = GgufReader(file).read();
      REQUIRE(contents.whole);
      std::map<std::string, Numbers> expected = expected_numbers(golden(name));
      for (const auto& [tensor, found] : contents.tensors) {
        CAPTURE(tensor);
        if (tensor.starts_with("rope_")) continue;
        REQUIRE(expected.contains(tensor));
        CHECK(found.type == 0);
        CHECK(found.shape == expected[tensor].shape);
        CHECK(floats_of(found) == expected[tensor].values);
        expected.erase(tensor);
      }
      for (const auto& [tensor, numbers] : expected) FAIL_CHECK("not written: " << tensor);
    });
    CHECK(seen == std::set<std::string>{"gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "phi3",
                                        "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"});
    // Activations, scales and windows of these families that no key says.
    for (const char* name :
         {"hf-gpt2-relu-unscaled", "hf-gpt2-erf-untied", "hf-llama-quick-gate", "hf-gemma2-uncapped"}) {
      CHECK(refused.contains(name));
    }
  }

  TEST_CASE("keys say a model's sizes, and what they cannot say of rotary positions stands in tensors") {
    TempDir temp;
    REQUIRE_OK(exported(checkpoint_of(golden("hf-llama-llama3-bias"), temp / "run"), temp / "model.gguf",
                        without_tokenizer()));
    const std::string file = slurp(temp / "model.gguf");
    const GgufContents contents = GgufReader(file).read();
    const json config = json::parse(slurp(golden("hf-llama-llama3-bias") / "config.json"));
    const auto key = [&](const std::string& name) { return contents.keys.at("llama." + name); };
    CHECK(contents.keys.at("general.architecture") == "llama");
    CHECK(contents.keys.at("general.file_type") == 0);
    CHECK(contents.keys.at("tokenizer.ggml.model") == "no_vocab");
    CHECK(key("context_length") == config["max_position_embeddings"]);
    CHECK(key("embedding_length") == config["hidden_size"]);
    CHECK(key("block_count") == config["num_hidden_layers"]);
    CHECK(key("feed_forward_length") == config["intermediate_size"]);
    CHECK(key("attention.head_count") == config["num_attention_heads"]);
    CHECK(key("attention.head_count_kv") == config["num_key_value_heads"]);
    CHECK(key("vocab_size") == config["vocab_size"]);
    CHECK(key("attention.layer_norm_rms_epsilon").get<float>() == config["rms_norm_eps"].get<float>());
    const json& rope = config["rope_parameters"];
    const double base = rope["rope_theta"];
    CHECK(key("rope.freq_base").get<double>() == base);
    // Llama 3's scaling, from its description: long waves by `factor`, short ones not, a ramp between.
    const auto dims = key("rope.dimension_count").get<int64_t>();
    const GgufContents::Tensor& factors = contents.tensors.at("rope_freqs.weight");
    CHECK(factors.shape == Shape{dims / 2});
    std::set<float> seen;
    for (int64_t k = 0; k < dims / 2; ++k) {
      const double frequency = std::pow(base, -2.0 * static_cast<double>(k) / static_cast<double>(dims));
      const double wave = 2 * M_PI / frequency, context = rope["original_max_position_embeddings"].get<double>();
      const double low = rope["low_freq_factor"].get<double>(), high = rope["high_freq_factor"].get<double>(),
                   by = rope["factor"].get<double>();
      double scaled = frequency / by;
      if (wave < context / high) scaled = frequency;
      if (wave >= context / high && wave <= context / low) {
        const double smooth = (context / wave - low) / (high - low);
        scaled = (1 - smooth) * frequency / by + smooth * frequency;
      }
      const float found = floats_of(factors)[static_cast<size_t>(k)];
      CHECK(found == doctest::Approx(frequency / scaled).epsilon(1e-6));
      seen.insert(found);
    }
    CHECK(seen.size() > 1);
  }

  TEST_CASE("Q8_0's blocks are the bytes that the gguf package makes") {
    // gguf.quants.quantize(x, GGMLQuantizationType.Q8_0) for x[k] = (k - 13.25)^3 / 7, then zeros.
    std::array<float, 64> values{};
    for (int k = 0; k < 32; ++k) {
      const float x = static_cast<float>(k) - 13.25f;
      values[static_cast<size_t>(k)] = x * x * x / 7.0f;
    }
    std::array<std::byte, 68> bytes{};
    CHECK(to_q8(values, bytes.data()) == -1);
    std::string hex;
    for (const std::byte byte : bytes) hex += fmt::format("{:02x}", static_cast<int>(byte));
    CHECK(hex ==
          "4a46cbd6e0e8eef3f7fafdfeff000000000000010204070b0f151c252f3b49596b7f"
          "00000000000000000000000000000000000000000000000000000000000000000000");
    values[40] = std::numeric_limits<float>::infinity();
    CHECK(to_q8(values, bytes.data()) == 40);
    values[40] = 1e10f;
    CHECK(to_q8(values, bytes.data()) == 32);
  }

  TEST_CASE("matrices are of the type that is asked for, rows that 32 does not divide f16, the rest f32") {
    TempDir temp;
    const fs::path from = checkpoint_of(golden("hf-gpt2-tied"), temp / "run");
    for (const GgufType type : {GgufType::kF16, GgufType::kBf16, GgufType::kQ8_0}) {
      const fs::path to = temp / fmt::format("{}.gguf", gguf_type_name(type));
      REQUIRE_OK(exported(from, to, without_tokenizer(type)));
      const std::string file = slurp(to);
      const GgufContents contents = GgufReader(file).read();
      CHECK(contents.whole);
      int64_t matrices = 0, others = 0;
      for (const auto& [name, tensor] : contents.tensors) {
        CAPTURE(name);
        const bool whole = tensor.shape.size() == 1 || name == "position_embd.weight";
        const bool fits = tensor.shape.back() % 32 == 0 || type != GgufType::kQ8_0;
        CHECK(tensor.type == static_cast<uint32_t>(whole ? GgufType::kF32 : fits ? type : GgufType::kF16));
        ++(whole ? others : matrices);
      }
      CHECK(matrices > 0);
      CHECK(others > 0);
    }
  }

  TEST_CASE("a target that exists, a folder and what lies in the checkpoint are refused, and stay as they were") {
    TempDir temp;
    const fs::path from = checkpoint_of(golden("hf-llama-tied-bias"), temp / "run");
    spit(temp / "there.gguf", "mine");
    fs::create_directory(temp / "folder");
    for (const fs::path& to : {temp / "there.gguf", temp / "folder", from / "model.gguf"}) {
      CAPTURE(to.string());
      const auto report = exported(from, to, without_tokenizer());
      REQUIRE(!report.ok());
      CHECK(report.error().code == ErrorCode::kInvalidInput);
    }
    CHECK(slurp(temp / "there.gguf") == "mine");
    CHECK(fs::is_empty(temp / "folder"));
    GgufExportOptions over = without_tokenizer();
    over.overwrite = true;
    REQUIRE_OK(exported(from, temp / "there.gguf", over));
    CHECK(slurp(temp / "there.gguf").starts_with("GGUF"));
    REQUIRE(::mkfifo((temp / "pipe").c_str(), 0600) == 0);
    fs::create_symlink(temp / "there.gguf", temp / "link");
    for (const char* name : {"pipe", "link"}) {
      const auto other = exported(from, temp / name, over);
      REQUIRE(!other.ok());
      CHECK(other.error().message.find("is no regular file") != std::string::npos);
    }
    CHECK(fs::is_fifo(temp / "pipe"));

    std::atomic<bool> stop = true;
    GgufExportOptions stopped = without_tokenizer();
    stopped.cancel = &stop;
    const auto report = exported(from, temp / "new.gguf", stopped);
    REQUIRE(!report.ok());
    CHECK(report.error().code == ErrorCode::kStopped);
    for (const auto& entry : fs::directory_iterator(temp.path)) {
      CHECK(entry.path().filename().string().find("new") == std::string::npos);
    }
  }

  TEST_CASE("a family without an architecture is refused with those that have one, a model without a tokenizer too") {
    TempDir temp;
    const auto falcon =
        exported(checkpoint_of(golden("hf-falcon-7b"), temp / "falcon"), temp / "a.gguf", without_tokenizer());
    REQUIRE(!falcon.ok());
    CHECK(falcon.error().code == ErrorCode::kUnsupported);
    CHECK(falcon.error().message.find("falcon") != std::string::npos);
    CHECK(falcon.error().message.find("qwen3_moe") != std::string::npos);
    const auto bare = exported(checkpoint_of(golden("hf-llama-tied-bias"), temp / "llama"), temp / "b.gguf");
    REQUIRE(!bare.ok());
    CHECK(bare.error().message.find("--without-tokenizer") != std::string::npos);
    CHECK(!fs::exists(temp / "b.gguf"));
  }

  TEST_CASE("a tokenizer goes along: tokens, types, merges or scores, and what is put around a text") {
    const json bpe = {
        {"added_tokens",
         {{{"id", 4}, {"content", "<|end|>"}, {"special", true}}, {{"id", 6}, {"content", "<x>"}, {"special", false}}}},
        {"normalizer", nullptr},
        {"pre_tokenizer",
         {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}},
        {"post_processor", nullptr},
        {"decoder", {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}}},
        {"model",
         {{"type", "BPE"},
          {"vocab", {{"a", 0}, {"b", 1}, {"ab", 2}, {"aab", 3}}},
          {"merges", json::array({json::array({"a", "b"}), json::array({"a", "ab"})})}}}};
    const nlohmann::ordered_json config = {{"eos_token_id", json::array({4, 1})}, {"bos_token_id", nullptr}};
    const auto put = [&](const json& tokenizer,
                         std::vector<std::string>* warnings) -> Result<std::map<std::string, json>> {
      GgufKeys keys;
      RT_TRY(
          put_gguf_vocab({{"tokenizer.json", tokenizer.dump()}, {"tokenizer_config.json", R"({"chat_template": "T"})"}},
                         config, 8, keys, warnings));
      const std::string file = gguf_head(keys, {});
      return GgufReader(file).read().keys;
    };
    std::vector<std::string> warnings;
    const auto keys = put(bpe, &warnings);
    REQUIRE_OK(keys);
    const auto key = [&](const std::string& name) { return keys.value().at("tokenizer." + name); };
    CHECK(key("ggml.model") == "gpt2");
    CHECK(key("ggml.pre") == "gpt-2");
    CHECK(key("ggml.tokens") == json({"a", "b", "ab", "aab", "<|end|>", "[PAD5]", "<x>", "[PAD7]"}));
    CHECK(key("ggml.token_type") == json({1, 1, 1, 1, 3, 5, 4, 5}));
    CHECK(key("ggml.merges") == json({"a b", "a ab"}));
    CHECK(key("ggml.eos_token_id") == 4);
    CHECK(!keys.value().contains("tokenizer.ggml.bos_token_id"));
    CHECK(key("ggml.add_bos_token") == false);
    CHECK(key("chat_template") == "T");
    CHECK(warnings.empty());

    const auto refused = [&](const json& patch) {
      json other = bpe;
      other.merge_patch(patch);
      const auto out = put(other, &warnings);
      return out.ok() ? std::string() : out.error().message;
    };
    CHECK(refused({{"pre_tokenizer", {{"type", "Whitespace"}}}}).find("Whitespace") != std::string::npos);
    CHECK(refused({{"pre_tokenizer", {{"add_prefix_space", true}}}}).find("add_prefix_space") != std::string::npos);
    CHECK(refused({{"normalizer", {{"type", "Lowercase"}}}}).find("Lowercase") != std::string::npos);
    CHECK(refused({{"model", {{"ignore_merges", true}}}}).find("ignore_merges") != std::string::npos);
    CHECK(refused({{"model", {{"type", "WordPiece"}}}}).find("WordPiece") != std::string::npos);
  }

  TEST_CASE("tokenizers of published kinds have llama.cpp's names for how they cut texts, or are refused") {
    const std::map<std::string, std::string> names = {{"gpt2", "gpt-2"}, {"llama3", "llama-bpe"}, {"qwen2", "qwen2"}};
    for (const auto& entry : fs::directory_iterator(fixtures_folder() / "tokenizers")) {
      const std::string name = entry.path().stem().string();
      if (entry.path().extension() != ".json" || name.ends_with(".expected")) continue;
      CAPTURE(name);
      GgufKeys keys;
      std::vector<std::string> warnings;
      const Status done =
          put_gguf_vocab({{"tokenizer.json", slurp(entry.path())}}, json::object(), 200'000, keys, &warnings);
      const auto known = names.find(name);
      CHECK(done.ok() == (known != names.end()));
      if (!done.ok()) {
        CHECK(done.error().code == ErrorCode::kUnsupported);
        continue;
      }
      const std::string file = gguf_head(keys, {});
      CHECK(GgufReader(file).read().keys.at("tokenizer.ggml.pre") == known->second);
    }
  }

  TEST_CASE("a SentencePiece model's pieces, scores and types go out as they are") {
    const std::string model = slurp(fixtures_folder() / "sentencepiece-tiny/tiny.model");
    const text::SentencePieces pieces = text::sentence_pieces(model);
    const int64_t count = std::ssize(pieces.pieces);
    REQUIRE(count > 0);
    GgufKeys keys;
    std::vector<std::string> warnings;
    const Status done =
        put_gguf_vocab({{"tokenizer.model", model}, {"added_tokens.json", fmt::format(R"({{"<new>": {}}})", count)}},
                       json::object(), count + 2, keys, &warnings);
    REQUIRE_OK(done);
    const std::string file = gguf_head(keys, {});
    const std::map<std::string, json> found = GgufReader(file).read().keys;
    CHECK(found.at("tokenizer.ggml.model") == "llama");
    for (int64_t id = 0; id < count; ++id) {
      const text::SentencePiece& piece = pieces.pieces[static_cast<size_t>(id)];
      CHECK(found.at("tokenizer.ggml.tokens")[id] == piece.text);
      CHECK(found.at("tokenizer.ggml.scores")[id].get<float>() == piece.score);
      CHECK(found.at("tokenizer.ggml.token_type")[id] == static_cast<int>(piece.type));
    }
    CHECK(found.at("tokenizer.ggml.tokens")[count] == "<new>");
    CHECK(found.at("tokenizer.ggml.token_type")[count] == 4);
    CHECK(found.at("tokenizer.ggml.token_type")[count + 1] == 5);
  }
}
