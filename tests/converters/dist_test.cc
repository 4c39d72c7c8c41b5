// Checkpoints of torch.distributed.checkpoint: tests/golden/dist-*, written by tests/fixtures/make_dist_fixtures.py.

#include <doctest/doctest.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "converters/dist_files.h"
#include "converters/dist_metadata.h"
#include "converters/model_compare.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/foreign_folder.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  REQUIRE(from.size() == to.size());
  REQUIRE(text.find(from) != text.npos);
  for (size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size()) text.replace(at, from.size(), to);
}

const fs::path kStacked = golden("dist-gpt2") / "iter_0000007" / ".metadata";

}  // namespace

TEST_SUITE("converters/dist") {
  TEST_CASE(
      "torch_dist of Megatron Core, layers stacked and not, and plain state dicts hold the models they came from") {
    for (const auto& [saved, source] : {std::pair("dist-gpt2", "hf-gpt2-tied"),
                                        {"dist-llama", "hf-llama-gqa-sharded"},
                                        {"dist-hf", "hf-mistral-tied"},
                                        {"dist-mixtral", "hf-mixtral-top2"}}) {
      CAPTURE(saved);
      const auto joined = opened_folder(golden(saved)), whole = opened_folder(golden(source));
      CHECK(joined->warnings().empty());
      const auto different = differing_fields(joined->model(), whole->model());
      CHECK_MESSAGE(different.empty(), fmt::format("{}", fmt::join(different, ", ")));
      CHECK(weights_of(*joined) == weights_of(*whole));
      for (const auto& file : joined->weights().files()) CHECK(file->verify().ok());
      CHECK(logit_difference(joined->model(), weights_of(*joined), reference_of(source)) <= kLogitGate);
    }
  }

  TEST_CASE("distributed checkpoints import into any layout and go out as a folder") {
    for (const auto& [saved, type] : {std::pair("dist-gpt2", "gpt2"),
                                      {"dist-llama", "llama"},
                                      {"dist-hf", "mistral"},
                                      {"dist-mixtral", "mixtral"}}) {
      CAPTURE(saved);
      TempDir temp;
      ckpt::PosixBackend io;
      ImportOptions options;
      options.mesh = {.tp = 2, .pp = 2, .dp = 1};
      const auto imported = import_hf(io, golden(saved), temp / "run", options, encode);
      REQUIRE_OK(imported);
      const auto exported = export_hf(io, imported.value().dir, temp / "out", {}, decode);
      REQUIRE_OK(exported);
      CHECK(exported.value().model_type == type);
      CHECK(weights_of(*opened_folder(temp / "out")) == weights_of(*opened_folder(golden(saved))));
    }
  }

  TEST_CASE("wrappers' prefixes and rotary tables in a distributed checkpoint, however deep its model lies") {
    TempDir temp;
    for (const char* name : {"hf-llama-tied-bias", "hf-gpt2-tied", "hf-gpt_neox-parallel", "hf-mixtral-top2"}) {
      const RawTensors plain = raw_tensors(golden(name));
      const Weights expected = weights_of(*opened_folder(golden(name)));
      const RawTensor table = plain.begin()->second;  // any numbers
      for (const std::string prefix : {"", "_orig_mod.", "module.", "_fsdp_wrapped_module.", "app.", "model.",
                                       "module._orig_mod.", "_fsdp_wrapped_module._checkpoint_wrapped_module."}) {
        RawTensors model = renamed(plain, [&](const std::string& own) { return prefix + own; });
        for (const char* rotary : {"model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq",
                                   "gpt_neox.layers.0.attention.rotary_emb.inv_freq"}) {
          model[prefix + rotary] = table;
        }
        for (const DistPath& path : {DistPath{}, {"model"}, {"module"}, {"state_dict"}, {"app", "model"}, {"app"}}) {
          CAPTURE(name);
          CAPTURE(prefix);
          CAPTURE(fmt::format("{}", fmt::join(path, ".")));
          DistState state;
          state.parts[path] = model;
          // Beside the model in the same dict; of a flat state its name alone says what it is.
          DistPath beside = path;
          if (!beside.empty() && beside.back() != "app") beside.pop_back();
          beside.emplace_back("optim");
          state.parts[beside]["state.exp_avg.model.norm.weight"] = table;
          fs::remove_all(temp / "x");
          fs::create_directory(temp / "x");
          fs::copy(golden(name) / "config.json", temp / "x");
          write_dist(temp / "x", state);
          CHECK(refusal_of(temp / "x") == "");
          const auto folder = HfFolder::open(temp / "x");
          if (!folder.ok()) continue;
          CHECK(weights_of(*folder.value()) == expected);
          CHECK(folder.value()->warnings().empty());
        }
      }
    }
  }

  TEST_CASE("gpt_neox's head under the name of transformers 5's memory, in each format of weights") {
    TempDir temp;
    const fs::path fixture = golden("hf-gpt_neox-sequential");
    for (const std::string prefix : {"", "_orig_mod.", "module."}) {
      const RawTensors memory = renamed(raw_tensors(fixture), [&](const std::string& own) {
        return prefix + (own == "embed_out.weight" ? "lm_head.weight" : own);
      });
      REQUIRE(memory.contains(prefix + "lm_head.weight"));
      for (const auto& [format, what] : kFormats) {
        CAPTURE(what);
        CAPTURE(prefix);
        write_folder(temp / "x", fixture, format, memory);
        CHECK(refusal_of(temp / "x") == "");
        CHECK(weights_of(*opened_folder(temp / "x")) == weights_of(*opened_folder(fixture)));
      }
    }
  }

  TEST_CASE("a prefix that nobody knows is reported with what it could be, in a distributed checkpoint too") {
    TempDir temp;
    const fs::path fixture = golden("hf-llama-tied-bias");
    write_folder(temp / "x", fixture, Format::kDist,
                 renamed(raw_tensors(fixture), [](const std::string& own) { return "student." + own; }));
    CHECK(refusal_of(temp / "x").find("names of the model have \"student.\" before them") != std::string::npos);
  }

  TEST_CASE("every stretch of a tensor is read alike, wherever its chunks end") {
    const auto folder = opened_folder(golden("dist-gpt2"));
    const WeightsFile& file = *folder->weights().files().front();
    std::mt19937 draw(5);
    for (const SafeTensor& tensor : file.tensors()) {
      CAPTURE(tensor.name);
      std::vector<std::byte> whole(tensor.end);
      REQUIRE(file.read(tensor, 0, tensor.end, whole.data()).ok());
      for (int k = 0; k < 20; ++k) {
        const int64_t elems = tensor.end / 4, first = draw() % elems, count = 1 + draw() % (elems - first);
        std::vector<std::byte> part(count * 4);
        REQUIRE(file.read(tensor, first * 4, count * 4, part.data()).ok());
        CHECK(std::equal(part.begin(), part.end(), whole.begin() + first * 4));
      }
    }
  }

  TEST_CASE("the metadata of a distributed checkpoint gives its chunks, whichever rank held them") {
    const auto read = read_dist_metadata(slurp(kStacked));
    REQUIRE_OK(read);
    const auto named = [&](std::string_view name) -> const DistTensor& {
      const auto found = std::ranges::find(read.value(), name, &DistTensor::name);
      REQUIRE(found != read.value().end());
      return *found;
    };
    const DistTensor& qkv = named("decoder.layers.self_attention.linear_qkv.weight");
    CHECK(qkv.dtype == "F32");
    CHECK(qkv.shape.size() == 3);
    CHECK(qkv.shape[0] == 3);
    CHECK(qkv.chunks.size() == 4);  // two stages of 2 and 1 layers, two ranks
    CHECK(std::ranges::none_of(read.value(), [](const DistTensor& t) { return t.name.starts_with("rng_state"); }));
    // A dict of dicts: the model's part under its own names.
    const auto plain = read_dist_metadata(slurp(golden("dist-hf") / ".metadata"));
    REQUIRE_OK(plain);
    CHECK(std::ranges::all_of(plain.value(), [](const DistTensor& t) { return t.name.starts_with("model."); }));
  }

  TEST_CASE("a distributed checkpoint that does not fit is reported with its file") {
    TempDir temp;
    const auto fresh = [&](const std::string& name) {
      fs::remove_all(temp / "x");
      fs::copy(golden(name), temp / "x", fs::copy_options::recursive);
      return temp / "x";
    };
    const auto edited = [&](std::string_view from, std::string_view to) {
      const fs::path dir = fresh("dist-gpt2");
      std::string bytes = slurp(kStacked);
      replace_all(bytes, from, to);
      spit(dir / "iter_0000007" / ".metadata", bytes);
      return refusal_of(dir);
    };
    const auto has = [](const std::string& text, std::string_view part) { return text.find(part) != text.npos; };
    fs::path dir = fresh("dist-gpt2");
    fs::remove(dir / "iter_0000007" / "__2_0.distcp");
    CHECK(has(refusal_of(dir), "__2_0.distcp"));
    dir = fresh("dist-gpt2");
    fs::resize_file(dir / "iter_0000007" / "__1_0.distcp", 20000);
    CHECK(has(refusal_of(dir), "__1_0.distcp"));
    dir = fresh("dist-gpt2");
    const auto tensors = read_dist_metadata(slurp(kStacked));
    REQUIRE(tensors.ok());
    DistChunk largest;
    for (const DistTensor& tensor : tensors.value()) {
      for (const DistChunk& chunk : tensor.chunks) {
        if (chunk.file == "__3_0.distcp" && chunk.bytes > largest.bytes) largest = chunk;
      }
    }
    std::string bytes = slurp(dir / "iter_0000007" / largest.file);
    bytes.at(largest.begin + largest.bytes / 2) ^= 1;  // of its elements
    spit(dir / "iter_0000007" / largest.file, bytes);
    CHECK(has(refusal_of(dir), "__3_0.distcp"));
    CHECK(has(edited("__2_0.distcp", "../0.distcp/"), "is no name of a file in its folder"));
    CHECK(has(edited("_StorageInfo", "_StorageInfa"), "_StorageInfa\" is not allowed: no .metadata needs it"));
    CHECK(has(edited("float32", "float99"), "\"torch float99\" is not allowed"));
    CHECK(has(edited("decoder.layers.mlp.linear_fc2.bias", "decoder.layers.mlp.linear_fc9.bias"), "linear_fc9"));
    dir =
        fresh("dist-gpt2");  // as many layers as the file says, or 2^40: names are made for no more than the model has
    nlohmann::json small = nlohmann::json::parse(slurp(dir / "config.json"));
    small["num_layers"] = small["n_layer"] = 2;
    spit(dir / "config.json", small.dump());
    CHECK(has(refusal_of(dir), "the layers of a model of 2"));
    dir = fresh("dist-llama");
    nlohmann::json config = nlohmann::json::parse(slurp(dir / "config.json"));
    config["num_layers"] = 4;
    spit(dir / "config.json", config.dump());
    CHECK(has(refusal_of(dir), "layers.3."));
    spit(dir / "latest_checkpointed_iteration.txt", "8");
    CHECK(has(refusal_of(dir), "says \"8\", and"));
  }

  TEST_CASE("a hostile metadata ends in an error, not in a crash: cut short, with flipped bits, of other programs") {
    const std::string good = slurp(kStacked);
    REQUIRE(read_dist_metadata(good).ok());
    for (size_t n = 0; n < good.size(); n += 7)
      CHECK_FALSE(read_dist_metadata(std::string_view(good).substr(0, n)).ok());
    std::mt19937 draw(3);
    int refused = 0;
    for (int k = 0; k < 3000; ++k) {
      std::string bad = good;
      for (int flips = 0; flips < 1 + k % 3; ++flips) bad[draw() % bad.size()] ^= static_cast<char>(1 << draw() % 8);
      refused += !read_dist_metadata(bad).ok();
    }
    CHECK(refused > 1000);
    for (const std::string_view program :
         {std::string_view("\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", 24),
          std::string_view("cbuiltins\neval\n(X\x01\0\0\0001tR.", 25), std::string_view("\x80\x04)\x81.", 5),
          std::string_view("\x80\x04\x97.", 4), std::string_view("\x80\x04}\x94h\x00h\x00s.", 10)}) {
      const auto read = read_dist_metadata(program);
      REQUIRE_FALSE(read.ok());
      CHECK((read.error().code == ErrorCode::kUnsupported || read.error().code == ErrorCode::kCorrupt));
    }
  }
}
