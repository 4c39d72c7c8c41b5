// Weights of eight and four bits: what is read of them, and the blocks of eight bits that an export writes.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "converters/block_fp8.h"
#include "converters/elements.h"
#include "converters/rewrite.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/foreign_folder.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

constexpr const char* kFixture = "hf-deepseek_v3-fp8";  // blocks of 12 x 6, none of them cut
constexpr const char* kCutFixture = "hf-deepseek_v3-cut";

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::vector<float> floats_of(const RawTensor& tensor) {
  std::vector<float> out(static_cast<size_t>(count_elems(tensor.shape)));
  to_floats(tensor.dtype, reinterpret_cast<const std::byte*>(tensor.bytes.data()), std::ssize(out), out.data());
  return out;
}

std::byte e4m3_of(float value) {
  std::byte out{};
  to_e4m3(std::span(&value, 1), &out);
  return out;
}

float of_e4m3(std::byte code) {
  float out = 0;
  to_floats("F8_E4M3", &code, 1, &out);
  return out;
}

/// A block of random codes and its numbers, in one row.
struct RandomBlock {
  std::vector<std::byte> codes;
  std::vector<float> values;
};
RandomBlock random_block(std::mt19937& random, float scale, size_t count, float largest) {
  RandomBlock out;
  for (size_t k = 0; k < count; ++k) {
    auto code = static_cast<std::byte>(random() % 256);
    while (!(std::abs(of_e4m3(code)) <= largest)) code = static_cast<std::byte>(random() % 256);
    if (k == count / 2) code = e4m3_of(-largest);
    out.codes.push_back(code);
    out.values.push_back(of_e4m3(code) * scale);
  }
  return out;
}

struct Quantised {
  std::vector<std::byte> codes;
  std::vector<float> scales, values;
};
Quantised quantised(const BlockFp8& shape, int64_t rows, int64_t columns, const std::vector<float>& values) {
  Quantised out{std::vector<std::byte>(values.size()), {}, std::vector<float>(values.size())};
  const int64_t across = (columns + shape.columns - 1) / shape.columns;
  out.scales.resize(static_cast<size_t>(across));
  REQUIRE(quantise_band(shape, rows, columns, values, out.codes, out.scales) == -1);
  to_floats("F8_E4M3", out.codes.data(), std::ssize(values), out.values.data());
  for (size_t k = 0; k < values.size(); ++k)
    out.values[k] *= out.scales[k % static_cast<size_t>(columns) / static_cast<size_t>(shape.columns)];
  return out;
}

/// A power of two and a multiple of 11 or 13, which no other scale can hold as well.
bool is_telling(const std::vector<std::byte>& codes) {
  bool power = false, prime = false;
  for (const std::byte code : codes) {
    int exponent = 0;
    const auto mantissa = static_cast<int>(16 * std::abs(std::frexp(of_e4m3(code), &exponent)));
    power = power || mantissa == 8;
    prime = prime || mantissa == 11 || mantissa == 13;
  }
  return power && prime;
}

/// A folder that may be changed, and what is said of it.
struct Changed {
  TempDir temp;
  fs::path dir = temp / "model";
  RawTensors tensors;
  explicit Changed(const std::string& name) : tensors(raw_tensors(golden(name))) { fs::copy(golden(name), dir); }

  void configure(const std::function<void(nlohmann::json&)>& change) const {
    auto config = nlohmann::json::parse(slurp(dir / "config.json"));
    change(config);
    spit(dir / "config.json", config.dump());
  }
  std::string refusal() const {
    write_safetensors_file(dir / "model.safetensors", tensors);
    const auto opened = HfFolder::open(dir);
    return opened.ok() ? "accepted" : opened.error().message;
  }
};

fs::path imported(const fs::path& from, const fs::path& to) {
  ckpt::PosixBackend io;
  const auto report = import_hf(io, from, to, ImportOptions{}, encode);
  REQUIRE_OK(report);
  return report.value().dir;
}

Result<ExportReport> exported(const fs::path& checkpoint, const fs::path& to, const ExportOptions& options) {
  ckpt::PosixBackend io;
  return export_hf(io, checkpoint, to, options, decode);
}

/// The plain folder of the same weights, so that nothing of the source's config says blocks.
fs::path plain_folder(const TempDir& temp, const char* name = kFixture) {
  REQUIRE_OK(rewrite_hf(golden(name), temp / "plain", {.to = {.dtype = DType::kF32}}));
  return temp / "plain";
}

}  // namespace

TEST_SUITE("converters/quantised") {
  TEST_CASE("eight bits: all 256 codes are the numbers of the formats") {
    std::vector<std::byte> codes(256);
    for (int k = 0; k < 256; ++k) codes[k] = static_cast<std::byte>(k);
    std::vector<float> e4m3(256), e5m2(256), e8m0(256);
    to_floats("F8_E4M3", codes.data(), 256, e4m3.data());
    to_floats("F8_E5M2", codes.data(), 256, e5m2.data());
    to_floats("F8_E8M0", codes.data(), 256, e8m0.data());
    CHECK(e4m3[0x7e] == 448.0f);
    CHECK(e4m3[0x08] == std::ldexp(1.0f, -6));
    CHECK(e4m3[0x01] == std::ldexp(1.0f, -9));
    CHECK(e4m3[0xb8] == -1.0f);
    CHECK(std::isnan(e4m3[0x7f]));
    CHECK(std::isnan(e4m3[0xff]));
    CHECK(e5m2[0x7b] == 57344.0f);
    CHECK(e5m2[0x01] == std::ldexp(1.0f, -16));
    CHECK(std::isinf(e5m2[0x7c]));
    CHECK(std::isnan(e5m2[0x7d]));
    CHECK(e8m0[127] == 1.0f);
    CHECK(e8m0[0] == std::ldexp(1.0f, -127));
    CHECK(std::isnan(e8m0[255]));
    for (int k = 1; k < 0x7e; ++k) CHECK(e4m3[k] > e4m3[k - 1]);
  }

  TEST_CASE("eight-bit weights are their numbers times their scales, by block, by row and by tensor") {
    TempDir temp;
    const fs::path dir = temp / "in";
    fs::copy(golden("hf-llama-tied-bias"), dir);
    const RawTensors before = raw_tensors(dir);
    struct Scheme {
      std::string suffix;
      nlohmann::json config;
      int64_t rows, columns;  // of a block; 0: all
    };
    const std::vector<Scheme> schemes = {
        {"_scale_inv", {{"quant_method", "fp8"}, {"weight_block_size", {16, 7}}}, 16, 7},
        {"_scale_inv", {{"quant_method", "fp8"}, {"weight_block_size", nullptr}}, 0, 0},
        {"_scale", {{"quant_method", "fbgemm_fp8"}}, 1, 0},
        {"_scale", {{"quant_method", "compressed-tensors"}, {"format", "float-quantized"}}, 1, 0}};
    for (const Scheme& scheme : schemes) {
      CAPTURE(scheme.config.dump());
      RawTensors stored;
      std::map<std::string, std::vector<float>> expected;
      for (const auto& [name, tensor] : before) {
        if (!has(name, "_proj.weight")) {
          stored[name] = tensor;
          continue;
        }
        const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
        const int64_t down = scheme.rows > 0 ? scheme.rows : rows,
                      across = scheme.columns > 0 ? scheme.columns : columns;
        const int64_t lines = (rows + down - 1) / down, wide = (columns + across - 1) / across;
        RawTensor codes{"F8_E4M3", tensor.shape, ""}, scales{"F32", {lines, wide}, ""};
        for (int64_t k = 0; k < rows * columns; ++k) codes.bytes += static_cast<char>((k * 37) % 120);
        std::vector<float> scale(static_cast<size_t>(lines * wide)), values(static_cast<size_t>(rows * columns));
        for (size_t k = 0; k < scale.size(); ++k) scale[k] = 0.01f * static_cast<float>(k + 1);
        scales.bytes.assign(reinterpret_cast<const char*>(scale.data()), scale.size() * sizeof(float));
        to_floats("F8_E4M3", reinterpret_cast<const std::byte*>(codes.bytes.data()), rows * columns, values.data());
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; ++c) values[r * columns + c] *= scale[(r / down) * wide + c / across];
        }
        expected[name] = values;
        stored[name] = codes;
        stored[name + scheme.suffix] = scales;
        stored[name.substr(0, name.size() - 6) + "input_scale"] = {"F32", {}, std::string(4, '\0')};
      }
      write_safetensors_file(dir / "model.safetensors", stored);
      auto config = nlohmann::json::parse(slurp(golden("hf-llama-tied-bias") / "config.json"));
      config["quantization_config"] = scheme.config;
      spit(dir / "config.json", config.dump());
      const auto folder = HfFolder::open(dir);
      REQUIRE_OK(folder);
      int64_t checked = 0;
      for (size_t k = 0; k < folder.value()->tensors().size(); ++k) {
        const auto wanted = expected.find(folder.value()->stored()[k].name);
        if (wanted == expected.end()) continue;
        std::vector<float> whole(wanted->second.size());
        REQUIRE(folder.value()->read(static_cast<int64_t>(k), whole).ok());
        CHECK(whole == wanted->second);
        const Shape& shape = folder.value()->tensors()[k].shape;
        const Box box{{3, 2}, {shape[0] - 1, shape[1] - 4}};  // across the edges of blocks
        std::vector<float> part(static_cast<size_t>(box.count_elems())), cut(part.size());
        copy_box_out(whole.data(), shape, box, cut.data());
        REQUIRE(folder.value()->read_box(static_cast<int64_t>(k), box, part).ok());
        CHECK(part == cut);
        ++checked;
      }
      CHECK(checked == 7 * folder.value()->model().layers);
      // And as a folder of its own: no scales, no quantization_config.
      fs::remove_all(temp / "out");
      const auto report = rewrite_hf(dir, temp / "out", {.to = {.dtype = DType::kF32}});
      REQUIRE_OK(report);
      CHECK(!nlohmann::json::parse(slurp(temp / "out" / "config.json")).contains("quantization_config"));
      CHECK(weights_of(*HfFolder::open(temp / "out").value()) == weights_of(*folder.value()));
    }
  }

  TEST_CASE("each float becomes the nearest code, ties to even, the largest beyond 448") {
    std::vector<float> codes;  // ascending
    for (int code = 0; code < 127; ++code) codes.push_back(of_e4m3(static_cast<std::byte>(code)));
    const auto check = [&](float value) {
      size_t best = 0;
      for (size_t k = 1; k < codes.size(); ++k) {
        const double before = std::abs(static_cast<double>(value) - codes[best]),
                     now = std::abs(static_cast<double>(value) - codes[k]);
        if (now < before || (now == before && k % 2 == 0)) best = k;
      }
      CAPTURE(value);
      CHECK(static_cast<size_t>(e4m3_of(value)) == best);
      CHECK(static_cast<size_t>(e4m3_of(-value)) == best + 128);
    };
    for (size_t k = 0; k < codes.size(); ++k) {
      check(codes[k]);
      const float middle = k + 1 < codes.size() ? (codes[k] + codes[k + 1]) / 2 : 464.0f;
      for (const float value : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e9f)}) check(value);
    }
    for (const float value : {1e-40f, 1e-4f, 479.9f, 480.0f, 1e30f}) check(value);
    std::mt19937 random(1);
    for (int k = 0; k < 2000; ++k)
      check(std::ldexp(static_cast<float>(random() % 4096), static_cast<int>(random() % 24) - 24));
  }

  TEST_CASE("a block of other weights has the scale of its largest magnitude / 448, and the nearest codes") {
    std::mt19937 random(2);
    const BlockFp8 shape{.rows = 5, .columns = 7};
    constexpr int64_t kRows = 3, kColumns = 17;  // both edges cut
    std::vector<float> values(kRows * kColumns);
    for (float& value : values) value = std::ldexp(static_cast<float>(random()), -30) - 2.0f;
    for (int64_t r = 0; r < kRows; ++r) std::fill_n(values.begin() + r * kColumns + 7, 7, 0.0f);  // a block of zeros
    const Quantised made = quantised(shape, kRows, kColumns, values);
    REQUIRE(made.scales.size() == 3);
    for (int64_t block = 0; block < 3; ++block) {
      float largest = 0;
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = block * 7; c < std::min<int64_t>(kColumns, block * 7 + 7); ++c)
          largest = std::max(largest, std::abs(values[static_cast<size_t>(r * kColumns + c)]));
      }
      CHECK(made.scales[static_cast<size_t>(block)] == (block == 1 ? 1.0f : largest / 448.0f));
    }
    for (size_t k = 0; k < values.size(); ++k)
      CHECK(made.codes[k] == e4m3_of(values[k] / made.scales[k % static_cast<size_t>(kColumns) / 7]));
    values[20] = std::numeric_limits<float>::quiet_NaN();
    std::vector<std::byte> codes(values.size());
    std::vector<float> scales(3);
    CHECK(quantise_band(shape, kRows, kColumns, values, codes, scales) == 20);
  }

  TEST_CASE(
      "numbers that came from a block go into one without a change, and byte for byte if nothing else can be meant") {
    std::mt19937 random(3);
    int64_t same_bytes = 0, untelling = 0;
    for (int round = 0; round < 4000; ++round) {
      // Of any mantissa and size; the largest code is any, 448 as such scales are made, or one of scales by powers of
      // two.
      const float scale = round % 5 == 0 ? std::ldexp(1.0f, static_cast<int>(random() % 40) - 30)
                                         : std::ldexp(1.0f + static_cast<float>(random() % (1u << 23)) * 0x1p-23f,
                                                      static_cast<int>(random() % 80) - 60);
      const float largest = round % 3 == 0 ? 448.0f : of_e4m3(static_cast<std::byte>(0x40 + random() % (0x7f - 0x40)));
      const RandomBlock block = random_block(random, scale, 1 + random() % 64, largest);
      const auto count = static_cast<int64_t>(block.values.size());
      const Quantised made = quantised({.rows = 1, .columns = count}, 1, count, block.values);
      CAPTURE(round);
      CAPTURE(scale);
      CAPTURE(largest);
      CHECK(bytes_of(made.values) == bytes_of(block.values));
      const bool same = made.scales[0] == scale && made.codes == block.codes;
      same_bytes += same ? 1 : 0;
      if (largest >= 240 && is_telling(block.codes)) {
        CHECK(same);
      } else {
        untelling += same ? 0 : 1;
      }
    }
    CHECK(same_bytes > 1000);
    CHECK(untelling > 100);  // the condition is none for nothing
    // Scales at the ends of float32: what is written can be read.
    for (const float largest : {std::numeric_limits<float>::max(), 1e-44f, std::numeric_limits<float>::min()}) {
      const Quantised made = quantised({.rows = 1, .columns = 2}, 1, 2, {largest, largest / 3});
      CHECK(std::isfinite(made.values[0]));
      CHECK(made.scales[0] > 0);
    }
  }

  TEST_CASE("an export in blocks has the published names, dtypes and config, and what a plain model cannot lose") {
    TempDir temp;
    const fs::path plain = plain_folder(temp);
    const fs::path checkpoint = imported(plain, temp / "run");
    const auto report = exported(checkpoint, temp / "out", {.dtype = DType::kBf16, .block_fp8 = true});
    REQUIRE_OK(report);
    CHECK(report.value().block_fp8);
    CHECK(report.value().parameters == count_parameters(opened_folder(plain)->model()));
    const auto config = nlohmann::json::parse(slurp(temp / "out" / "config.json"));
    CHECK(config["quantization_config"] == nlohmann::json{{"activation_scheme", "dynamic"},
                                                          {"fmt", "e4m3"},
                                                          {"quant_method", "fp8"},
                                                          {"weight_block_size", {128, 128}}});
    CHECK(config["torch_dtype"] == "bfloat16");
    int64_t blocks = 0;
    for (const auto& [name, tensor] : raw_tensors(temp / "out")) {
      CAPTURE(name);
      const bool matrix = name.ends_with("_proj.weight") || name.ends_with("_proj_with_mqa.weight");
      blocks += matrix ? 1 : 0;
      CHECK(tensor.dtype == (matrix                                      ? "F8_E4M3"
                             : name.ends_with("_scale_inv")              ? "F32"
                             : name.ends_with("e_score_correction_bias") ? "F32"
                                                                         : "BF16"));
      if (name.ends_with("_scale_inv")) CHECK(tensor.shape == Shape{1, 1});
    }
    CHECK(blocks == 2 * 5 + 3 + 3 * 4 + 3);  // attention, the dense layer, experts, the shared one
    CHECK(has(slurp(temp / "out" / "README.md"), "fp8 in blocks, the rest bf16"));
    // What it says is what blocks make of the weights, through the folder itself too, and as one part a file.
    REQUIRE_OK(rewrite_hf(plain, temp / "again", {.to = {.dtype = DType::kBf16, .block_fp8 = true}}));
    CHECK(slurp(temp / "again" / "model.safetensors") == slurp(temp / "out" / "model.safetensors"));
    REQUIRE_OK(
        exported(checkpoint, temp / "parts", {.dtype = DType::kBf16, .max_shard_bytes = 100, .block_fp8 = true}));
    const RawTensors parts = raw_tensors(temp / "parts"), whole = raw_tensors(temp / "out");
    REQUIRE(parts.size() == whole.size());
    for (const auto& [name, tensor] : whole) CHECK(parts.at(name).bytes == tensor.bytes);
  }

  TEST_CASE("blocks come back byte for byte, through a checkpoint and from folder to folder") {
    for (const std::string name : {kFixture, kCutFixture}) {
      CAPTURE(name);
      TempDir temp;
      const fs::path checkpoint = imported(golden(name), temp / "run");
      for (const bool through : {true, false}) {
        CAPTURE(through);
        const fs::path out = temp / (through ? "a" : "b");
        if (through) {
          REQUIRE_OK(exported(checkpoint, out, {.block_fp8 = true}));
        } else {
          REQUIRE_OK(rewrite_hf(golden(name), out, {.to = {.block_fp8 = true}}));
        }
        CHECK(slurp(out / "model.safetensors") == slurp(golden(name) / "model.safetensors"));
        CHECK(nlohmann::json::parse(slurp(out / "config.json"))["quantization_config"] ==
              nlohmann::json::parse(slurp(golden(name) / "config.json"))["quantization_config"]);
      }
      // Without the choice, numbers: the dtype is what config.json says that they stand for.
      REQUIRE_OK(exported(checkpoint, temp / "plain", {}));
      CHECK(!nlohmann::json::parse(slurp(temp / "plain" / "config.json")).contains("quantization_config"));
      const RawTensors source = raw_tensors(golden(name));
      for (const auto& [tensor, raw] : raw_tensors(temp / "plain")) {
        CAPTURE(tensor);
        const std::string& was = source.at(tensor).dtype;
        CHECK(raw.dtype == (was == "F8_E4M3" ? "BF16" : was));
      }
    }
  }

  TEST_CASE("from folder to folder scales and codes are copied where they are as wanted, else made again") {
    TempDir temp;
    Changed source(kFixture);
    const std::string weight = "model.layers.0.mlp.up_proj.weight";
    source.tensors[weight].bytes.assign(source.tensors[weight].bytes.size(), '\0');  // whose scale no export could know
    write_safetensors_file(source.dir / "model.safetensors", source.tensors);
    REQUIRE_OK(rewrite_hf(source.dir, temp / "copied", {.to = {.block_fp8 = true}}));
    CHECK(slurp(temp / "copied" / "model.safetensors") == slurp(source.dir / "model.safetensors"));
    // With scales of another dtype.
    for (auto& [name, tensor] : source.tensors) {
      if (!name.ends_with("_scale_inv")) continue;
      std::string halves;
      for (const float scale : floats_of(tensor)) {
        const bf16 half = to_bf16(scale);
        halves.append(reinterpret_cast<const char*>(&half.bits), 2);
      }
      tensor = {"BF16", tensor.shape, halves};
    }
    write_safetensors_file(source.dir / "model.safetensors", source.tensors);
    const auto wanted = weights_of(*opened_folder(source.dir));
    REQUIRE_OK(rewrite_hf(source.dir, temp / "made", {.to = {.block_fp8 = true}}));
    CHECK(weights_of(*opened_folder(temp / "made")) == wanted);
    for (const auto& [name, tensor] : raw_tensors(temp / "made")) {
      if (name.ends_with("_scale_inv")) CHECK(tensor.dtype == "F32");
    }
  }

  TEST_CASE("modules that a source keeps out of blocks stay out") {
    TempDir temp;
    Changed source(kFixture);
    const std::string weight = "model.layers.0.mlp.up_proj.weight";
    source.tensors.erase(weight + "_scale_inv");
    source.tensors[weight] = {"BF16", source.tensors[weight].shape,
                              std::string(source.tensors[weight].bytes.size() * 2, '\x3c')};
    source.configure([](auto& config) {
      config["quantization_config"]["modules_to_not_convert"] = {"lm_head", "model.layers.0.mlp.up_proj"};
    });
    CHECK(source.refusal() == "accepted");
    REQUIRE_OK(exported(imported(source.dir, temp / "run"), temp / "out", {.block_fp8 = true}));
    CHECK(slurp(temp / "out" / "model.safetensors") == slurp(source.dir / "model.safetensors"));
    CHECK(nlohmann::json::parse(slurp(temp / "out" / "config.json"))["quantization_config"] ==
          nlohmann::json::parse(slurp(source.dir / "config.json"))["quantization_config"]);
  }

  TEST_CASE("an export in blocks is refused where it cannot be meant, by name") {
    TempDir temp;
    const fs::path llama = imported(golden("hf-llama-tied-bias"), temp / "llama");
    const std::string message = exported(llama, temp / "out", {.block_fp8 = true}).error().message;
    CAPTURE(message);
    CHECK(has(message, "models of type llama are not written in blocks of eight bits; known: deepseek_v3, kimi_k2"));
    CHECK(has(rewrite_hf(golden("hf-llama-tied-bias"), temp / "out", {.to = {.block_fp8 = true}}).error().message,
              "type llama"));
    const fs::path plain = plain_folder(temp);
    CHECK(has(exported(imported(plain, temp / "run"), temp / "out", {.block_fp8 = true, .hdf5 = true}).error().message,
              "without --hdf5"));
    RawTensors tensors = raw_tensors(plain);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(tensors["model.layers.1.self_attn.o_proj.weight"].bytes.data() + 4 * (36 * 3 + 5), &nan, 4);
    write_safetensors_file(plain / "model.safetensors", tensors);
    const std::string told = rewrite_hf(plain, temp / "out", {.to = {.block_fp8 = true}}).error().message;
    CAPTURE(told);
    CHECK(has(told, "model.layers.1.self_attn.o_proj.weight [3, 5]: found nan, expected a finite number"));
    CHECK(!fs::exists(temp / "out"));
  }

  TEST_CASE("eight bits: what does not fit together is told with file, tensor, found and expected") {
    const std::string up = "model.layers.0.mlp.up_proj.weight", down = "model.layers.0.mlp.down_proj.weight";
    {
      Changed folder(kFixture);
      folder.tensors.erase(up + "_scale_inv");
      folder.tensors[down + "_scale_inv"] = {"F32", {3}, std::string(12, '\0')};
      folder.tensors["model.norm.weight_scale_inv"] = {"F32", {2, 1}, std::string(8, '\0')};
      folder.tensors["model.other.weight_scale_inv"] = {"F32", {1, 1}, std::string(4, '\0')};
      const std::string message = folder.refusal();
      CAPTURE(message);
      CHECK(has(message, "model.safetensors: " + up + " F8_E4M3: its scale " + up +
                             "_scale_inv is missing, expected F32 [3, 4] (blocks of 12 x 6)"));
      CHECK(has(message, down + " F8_E4M3 [24, 36]: its scale " + down +
                             "_scale_inv F32 [3] does not fit, expected F32 [2, 6] (blocks of 12 x 6)"));
      CHECK(has(message,
                "model.norm.weight_scale_inv F32 [2, 1]: a scale without its weight: model.norm.weight is BF16, "
                "expected F8_E4M3"));
      CHECK(has(message,
                "model.other.weight_scale_inv F32 [1, 1]: a scale without its weight: model.other.weight is "
                "missing"));
    }
    {
      Changed folder(kFixture);  // blocks of another size than the scales have
      folder.configure([](auto& config) { config["quantization_config"].erase("weight_block_size"); });
      const std::string message = folder.refusal();
      CHECK(has(message, up + "_scale_inv F32 [3, 4] does not fit, expected F32 [1, 1] (blocks of 128 x 128)"));
      CHECK(has(message, " more"));  // of many, the first
      folder.configure([](auto& config) { config["quantization_config"]["weight_block_size"] = {0, 8}; });
      CHECK(has(folder.refusal(), "quantization_config.weight_block_size must be two sizes or null, got [0,8]"));
      folder.configure([](auto& config) { config.erase("quantization_config"); });
      CHECK(has(folder.refusal(), up + " F8_E4M3: config.json has no quantization_config that says how it is scaled"));
    }
    for (const bool of_scale : {false, true}) {
      CAPTURE(of_scale);
      Changed folder(kFixture);
      const float nan = std::numeric_limits<float>::quiet_NaN();
      if (of_scale) {  // of rows 12 to 23, columns 6 to 11
        std::memcpy(folder.tensors[up + "_scale_inv"].bytes.data() + 4 * (4 * 1 + 1), &nan, 4);
      } else {
        folder.tensors[up].bytes[static_cast<size_t>(24 * 17 + 9)] = '\xff';
      }
      CHECK(folder.refusal() == "accepted");  // which reads no weights
      const auto told = [&](const auto& result) { return result.ok() ? "accepted" : result.error().message; };
      ckpt::PosixBackend io;
      for (const std::string& message :
           {told(import_hf(io, folder.dir, folder.temp / "run", ImportOptions{}, encode)),
            told(rewrite_hf(folder.dir, folder.temp / "out", {})),
            told(rewrite_hf(folder.dir, folder.temp / "out", {.to = {.block_fp8 = true}}))}) {
        CAPTURE(message);
        CHECK(has(message, "model.safetensors: " + up));
        CHECK((has(message, "found the F8_E4M3 code 0xff") || (of_scale && has(message, "times nan of " + up)) ||
               (of_scale && has(message, "found a NaN"))));
        CHECK((of_scale || has(message, "[17, 9]: ")));
        CHECK(has(message, "expected "));
      }
      CHECK(!fs::exists(folder.temp / "out"));
    }
  }

  TEST_CASE("scales that are exponents in a byte, with a dtype of their own or as scale_fmt says") {
    Changed folder(kFixture);
    const auto before = weights_of(*opened_folder(folder.dir));
    const std::string up = "model.layers.0.mlp.up_proj.weight";
    std::string exponents;
    for (int k = 0; k < 12; ++k) exponents += static_cast<char>(120 + k);
    folder.tensors[up + "_scale_inv"] = {"F8_E8M0", {3, 4}, exponents};
    CHECK(folder.refusal() == "accepted");
    const auto of_dtype = weights_of(*opened_folder(folder.dir));
    const auto place = tensor_index(*opened_folder(folder.dir), "layers.0.mlp.up.weight");
    const std::vector<float> codes = floats_of(folder.tensors[up]);
    for (int64_t r = 0; r < 36; ++r) {
      for (int64_t c = 0; c < 24; ++c) {
        const auto at = static_cast<size_t>(24 * r + c);
        CHECK(of_dtype[place][at] == std::ldexp(codes[at], static_cast<int>(r / 12 * 4 + c / 6) - 7));
      }
    }
    folder.tensors[up + "_scale_inv"].dtype = "U8";
    CHECK(has(folder.refusal(), up + "_scale_inv U8 [3, 4] does not fit"));
    folder.configure([](auto& config) { config["quantization_config"]["scale_fmt"] = "ue8m0"; });
    CHECK(folder.refusal() == "accepted");
    CHECK(weights_of(*opened_folder(folder.dir)) == of_dtype);
    CHECK(before != of_dtype);
  }

  TEST_CASE("what cannot be read is refused by its name, in config.json or by the tensors that tell it") {
    Changed folder("hf-llama-tied-bias");
    const auto with = [&](const nlohmann::json& quant) {
      folder.configure([&](auto& config) { config["quantization_config"] = quant; });
      return folder.refusal();
    };
    for (const auto& [quant, told] : std::vector<std::pair<nlohmann::json, std::string>>{
             {{{"quant_method", "awq"}, {"bits", 4}}, "\"awq\" (AWQ, packed integers, 4 bits) cannot be read here"},
             {{{"quant_method", "gptq"}, {"bits", 8}}, "\"gptq\" (GPTQ, packed integers, 8 bits)"},
             {{{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}}, "\"bitsandbytes\" (bitsandbytes, NF4"},
             {{{"load_in_8bit", true}}, "\"bitsandbytes\""},
             {{{"quant_method", "torchao"}}, "\"torchao\" cannot"},
             {{{"quant_method", "later"}}, "quant_method \"later\" cannot be read here; known: fp8, fbgemm_fp8"},
             {{{"quant_method", "compressed-tensors"}, {"format", "pack-quantized"}},
              "compressed-tensors in format \"pack-quantized\" cannot be read here"},
             {{{"quant_method", "fp8"}, {"expert_dtype", "fp4"}}, "expert_dtype \"fp4\" cannot be read here"}}) {
      const std::string message = with(quant);
      CAPTURE(message);
      CHECK(has(message, told));
    }
    folder.configure([](auto& config) { config.erase("quantization_config"); });
    for (const auto& [suffix, told] : std::vector<std::pair<std::string, std::string>>{
             {".qweight", "GPTQ or AWQ"}, {".weight_packed", "compressed-tensors"}, {".SCB", "bitsandbytes"}}) {
      Changed copy("hf-llama-tied-bias");
      copy.tensors["model.layers.0.mlp.up_proj" + suffix] = {"I32", {2, 3}, std::string(24, '\0')};
      const std::string message = copy.refusal();
      CAPTURE(message);
      CHECK(has(message, "model.safetensors: model.layers.0.mlp.up_proj" + suffix + " I32 [2, 3]: "));
      CHECK(has(message, told));
    }
  }

  TEST_CASE("stacks in MXFP4 are what transformers makes of them, any box of them") {
    const fs::path dir = golden("mxfp4");
    const auto opened = WeightsFolder::open(dir, nlohmann::json::parse(slurp(dir / "config.json")));
    REQUIRE_OK(opened);
    const WeightsFolder& folder = opened.value();
    CHECK(folder.tensors().size() == 3);
    auto file = SafetensorsFile::open(dir / "reference.safetensors");
    REQUIRE_OK(file);
    std::mt19937 random(4);
    for (const SafeTensor& wanted : file.value().tensors()) {
      CAPTURE(wanted.name);
      const auto found = std::ranges::find(folder.tensors(), wanted.name + "_blocks", &FolderTensor::name);
      REQUIRE(found != folder.tensors().end());
      const int64_t experts = wanted.shape[0], columns = wanted.shape[1], rows = wanted.shape[2];
      CHECK(found->shape == Shape{experts, rows, columns});
      CHECK(found->dtype == "F32");
      const std::vector<uint16_t> raw = reference_tensor<uint16_t>(file.value(), wanted.name);
      std::vector<float> reference(raw.size()), turned(raw.size()), whole(raw.size());
      to_floats("BF16", reinterpret_cast<const std::byte*>(raw.data()), std::ssize(raw), reference.data());
      REQUIRE(folder.read_turned(*found, 0, std::ssize(raw), turned.data()).ok());
      CHECK(bytes_of(turned) == bytes_of(reference));  // exact in bf16, -0 too
      REQUIRE(folder.read(*found, 0, std::ssize(raw), whole.data()).ok());
      for (int64_t e = 0; e < experts; ++e) {
        std::vector<float> one(static_cast<size_t>(rows * columns));
        transpose_into(reference.data() + e * rows * columns, columns, rows, one.data(), columns);
        CHECK(std::equal(one.begin(), one.end(), whole.begin() + e * rows * columns));
      }
      for (int round = 0; round < 200; ++round) {
        const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
        const int64_t row = below(experts * rows), column = below(columns), n = 1 + below(experts * rows - row),
                      wide = 1 + below(columns - column);
        std::vector<float> part(static_cast<size_t>(n * wide)), cut(part.size());
        copy_box_out(whole.data(), {experts * rows, columns}, Box{{row, column}, {row + n, column + wide}}, cut.data());
        REQUIRE(folder.read_rect(*found, row, n, column, wide, part.data()).ok());
        CHECK(bytes_of(part) == bytes_of(cut));
        const int64_t first = below(std::ssize(raw)), count = 1 + below(std::ssize(raw) - first);
        std::vector<float> flat(static_cast<size_t>(count));
        REQUIRE(folder.read_turned(*found, first, count, flat.data()).ok());
        CHECK(std::equal(flat.begin(), flat.end(), reference.begin() + first));
      }
    }
  }

  TEST_CASE("MXFP4: long rows in pieces, as the whole") {
    // Rows of 3 x 4096 bytes, so that a part of one is read by itself.
    constexpr int64_t kGroups = 768, kOut = 3;
    TempDir temp;
    std::mt19937 random(5);
    RawTensors tensors;
    RawTensor &blocks = tensors["x_blocks"], &scales = tensors["x_scales"];
    blocks = {"U8", {1, kOut, kGroups, 16}, std::string(kOut * kGroups * 16, '\0')};
    scales = {"U8", {1, kOut, kGroups}, std::string(kOut * kGroups, '\0')};
    for (char& byte : blocks.bytes) byte = static_cast<char>(random());
    for (char& byte : scales.bytes) byte = static_cast<char>(100 + random() % 50);
    write_safetensors_file(temp / "model.safetensors", tensors);
    const auto opened = WeightsFolder::open(temp / "", {{"quantization_config", {{"quant_method", "mxfp4"}}}});
    REQUIRE_OK(opened);
    const FolderTensor& tensor = opened.value().tensors().at(0);
    constexpr int64_t kIn = kGroups * 32;
    CHECK(tensor.shape == Shape{1, kOut, kIn});
    std::vector<float> whole(kIn * kOut), part(whole.size()), cut(whole.size());
    REQUIRE(opened.value().read_rect(tensor, 0, kOut, 0, kIn, whole.data()).ok());
    for (const auto& [column, columns] :
         {std::pair<int64_t, int64_t>{0, 10000}, {77, 9001}, {15000, 9576}, {24575, 1}}) {
      REQUIRE(opened.value().read_rect(tensor, 1, 2, column, columns, part.data()).ok());
      copy_box_out(whole.data(), {kOut, kIn}, Box{{1, column}, {3, column + columns}}, cut.data());
      CHECK(std::equal(cut.begin(), cut.begin() + 2 * columns, part.begin()));
    }
  }

  TEST_CASE("gpt_oss as published, in blocks of four bits, is the same model as in bf16, on the way to a folder too") {
    constexpr float kNumbers[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    nlohmann::json config = nlohmann::json::parse(slurp(golden("hf-gpt_oss-tied") / "config.json"));
    config["hidden_size"] = 64;
    config["intermediate_size"] = 32;
    const ModelConfig model = model_from_config(config).value();
    std::mt19937 random(5);
    RawTensors plain, blocks;
    for (const Mapping& mapping : tensor_map(find_family("gpt_oss").value(), model)) {
      if (plain.contains(mapping.stored)) continue;
      std::vector<float> values(static_cast<size_t>(count_elems(mapping.shape)));
      const bool four_bits = mapping.stored.ends_with("gate_up_proj") || mapping.stored.ends_with("down_proj");
      if (four_bits) {  // a column of [experts, in, out] is a row of the blocks
        const int64_t experts = mapping.shape[0], in = mapping.shape[1], out = mapping.shape[2];
        std::string codes(static_cast<size_t>(experts * out * in / 2), '\0'), scales(codes.size() / 16, '\0');
        for (char& code : codes) code = static_cast<char>(random());
        for (char& scale : scales) scale = static_cast<char>(118 + random() % 8);
        for (int64_t e = 0; e < experts; ++e) {
          for (int64_t o = 0; o < out; ++o) {
            for (int64_t i = 0; i < in; ++i) {
              const auto at = static_cast<size_t>((e * out + o) * in + i);
              const int code = codes[at / 2] >> (at % 2 * 4) & 15;
              values[static_cast<size_t>((e * in + i) * out + o)] =
                  std::ldexp(code < 8 ? kNumbers[code] : -kNumbers[code - 8], scales[at / 32] - 127);
            }
          }
        }
        blocks[mapping.stored + "_blocks"] = {"U8", {experts, out, in / 32, 16}, codes};
        blocks[mapping.stored + "_scales"] = {"U8", {experts, out, in / 32}, scales};
      } else {
        for (float& value : values) value = static_cast<float>(random() % 65) / 64 - 0.5f;
      }
      RawTensor tensor{"BF16", mapping.shape, std::string(values.size() * 2, '\0')};
      REQUIRE(from_floats(DType::kBf16, values, reinterpret_cast<std::byte*>(tensor.bytes.data())) < 0);
      if (!four_bits) blocks[mapping.stored] = tensor;
      plain[mapping.stored] = std::move(tensor);
    }
    TempDir temp;
    for (const auto& [name, tensors] : {std::pair("plain", &plain), {"blocks", &blocks}}) {
      fs::create_directory(temp / name);
      spit(temp / name / "config.json", config.dump());
      write_safetensors_file(temp / name / "model.safetensors", *tensors);
      config["quantization_config"] = {{"quant_method", "mxfp4"}};
    }
    const auto read = HfFolder::open(temp / "blocks");
    REQUIRE_OK(read);
    CHECK(weights_of(*read.value()) == weights_of(*HfFolder::open(temp / "plain").value()));
    REQUIRE_OK(rewrite_hf(temp / "blocks", temp / "written", {.to = {.dtype = DType::kBf16}}));
    const RawTensors written = raw_tensors(temp / "written");
    CHECK(written.size() == plain.size());
    for (const auto& [name, tensor] : plain) {
      CAPTURE(name);
      CHECK(written.at(name).shape == tensor.shape);
      CHECK(written.at(name).bytes == tensor.bytes);
    }
    CHECK_FALSE(nlohmann::json::parse(slurp(temp / "written" / "config.json")).contains("quantization_config"));
  }

  TEST_CASE("MXFP4: what does not fit together is told with file, tensor, found and expected") {
    const auto refusal = [](const std::function<void(RawTensors&)>& change) {
      TempDir temp;
      RawTensors tensors = raw_tensors(golden("mxfp4"));
      change(tensors);
      write_safetensors_file(temp / "model.safetensors", tensors);
      const auto opened = WeightsFolder::open(temp / "", nlohmann::json::parse(slurp(golden("mxfp4") / "config.json")));
      if (!opened.ok()) return opened.error().message;
      for (const FolderTensor& tensor : opened.value().tensors()) {
        std::vector<float> whole(static_cast<size_t>(count_elems(tensor.shape)));
        const Status read = opened.value().read(tensor, 0, std::ssize(whole), whole.data());
        if (!read.ok()) return read.error().message;
      }
      return std::string("accepted");
    };
    const std::string up = "model.layers.0.mlp.experts.gate_up_proj", down = "model.layers.0.mlp.experts.down_proj";
    CHECK(refusal([](RawTensors&) {}) == "accepted");
    CHECK(has(refusal([&](RawTensors& t) { t.erase(up + "_scales"); }),
              "model.safetensors: " + up + "_blocks U8 [3, 10, 2, 16]: its scales " + up +
                  "_scales are missing, expected U8 [3, 10, 2]"));
    CHECK(has(refusal([&](RawTensors& t) { t.erase(up + "_blocks"); }),
              up + "_scales U8 [3, 10, 2]: scales without their blocks: " + up + "_blocks is missing"));
    CHECK(has(refusal([&](RawTensors& t) {
                t[up + "_scales"].shape = {3, 5, 4};
              }),
              "its scales " + up + "_scales are U8 [3, 5, 4], expected U8 [3, 10, 2]"));
    CHECK(has(refusal([&](RawTensors& t) {
                t[down + "_blocks"].shape = {3, 6, 6, 8};
              }),
              down + "_blocks U8 [3, 6, 6, 8]: blocks of four-bit numbers, expected U8 [experts, out, in / 32, 16]"));
    CHECK(has(refusal([&](RawTensors& t) { t[down + "_scales"].bytes[7] = '\xff'; }), "the scale 0xff of " + down));
    const std::string message = refusal([&](RawTensors& t) {
      t[down + "_scales"].bytes[7] = '\xfd';                      // 2^126
      t[down + "_blocks"].bytes.replace(7 * 16, 16, 16, '\x11');  // 0.5 each
      t[down + "_blocks"].bytes[7 * 16 + 4] = '\x71';             // 0.5, then 6
    });
    CAPTURE(message);
    CHECK(has(message, down + "_blocks [0, 2, 1], number 9: found the code 0x71, times the scale 0xfd"));
  }
}
