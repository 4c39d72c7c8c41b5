// Checkpoints with a file for each rank: tests/golden/ranks-*, written by tests/fixtures/make_megatron_fixtures.py.

#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "converters/model_compare.h"
#include "converters/sharded_files.h"
#include "tests/converters/fixtures.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

void copy_golden(const std::string& name, const fs::path& to) {
  fs::copy(golden(name), to, fs::copy_options::recursive);
}

void change_config(const fs::path& dir, const auto& change) {
  nlohmann::json config = nlohmann::json::parse(slurp(dir / "config.json"));
  change(config);
  spit(dir / "config.json", config.dump());
}

}  // namespace

TEST_SUITE("converters/ranks") {
  TEST_CASE("Megatron-LM's files of ranks hold the model that they were made from, weight by weight") {
    for (const auto& [ranks, source] :
         {std::pair("ranks-gpt2", "hf-gpt2-tied"), {"ranks-llama", "hf-llama-gqa-sharded"}}) {
      CAPTURE(ranks);
      const auto joined = opened_folder(golden(ranks)), whole = opened_folder(golden(source));
      CHECK(joined->warnings().empty());
      const auto different = differing_fields(joined->model(), whole->model());
      CHECK_MESSAGE(different.empty(), fmt::format("{}", fmt::join(different, ", ")));
      CHECK(weights_of(*joined) == weights_of(*whole));
      for (const auto& file : joined->weights().files()) CHECK(file->verify().ok());
      CHECK(logit_difference(joined->model(), weights_of(*joined), reference_of(source)) <= kLogitGate);
    }
  }

  TEST_CASE("GLM-130B's files give the logits of its published forward pass") {
    const auto folder = opened_folder(golden("ranks-glm130b"));
    CHECK(folder->dtype() == DType::kF16);
    CHECK(folder->model().mask == Mask::kPrefix);
    CHECK(folder->model().residual_scale == doctest::Approx(2.0));
    ModelConfig model = folder->model();
    model.mask = Mask::kCausal;  // as the reference: no prefix
    const Weights weights = weights_of(*folder);
    const double difference = logit_difference(model, weights, reference_of("ranks-glm130b"));
    CHECK(difference <= kLogitGate);
    MESSAGE("ranks-glm130b: logits differ by ", difference);
    // What a wrong half of the joined MLP, or a wrong third of q, k and v, would do.
    for (const auto& [one, other] : {std::pair("layers.1.mlp.gate.weight", "layers.1.mlp.up.weight"),
                                     {"layers.1.attn.q.weight", "layers.1.attn.k.weight"}}) {
      Weights wrong = weights;
      REQUIRE(wrong[tensor_index(*folder, one)].size() == wrong[tensor_index(*folder, other)].size());
      std::swap(wrong[tensor_index(*folder, one)], wrong[tensor_index(*folder, other)]);
      CHECK(logit_difference(model, wrong, reference_of("ranks-glm130b")) > 100 * kLogitGate);
    }
  }

  TEST_CASE(
      "GLM-130B's logits behind a prefix, with a gap in it and at its end, with kept keys and values and without") {
    const auto folder = opened_folder(golden("ranks-glm130b"));
    const auto session = session_of(folder->model(), weights_of(*folder));
    const int64_t vocab = folder->model().vocab;
    auto made = SafetensorsFile::open(golden("ranks-glm130b") / "reference.safetensors");
    REQUIRE(made.ok());
    for (const std::string n : {"0", "1", "2"}) {
      CAPTURE(n);
      const auto ids = reference_tensor<int64_t>(made.value(), "shaped_input." + n),
                 shape = reference_tensor<int64_t>(made.value(), "shape." + n);
      const auto wanted = reference_tensor<float>(made.value(), "shaped_logits." + n);
      REQUIRE(shape.size() == 2);
      const std::vector<int32_t> tokens(ids.begin(), ids.end());
      const auto check = [&](std::span<const float> found, size_t first) {
        double largest = 1, difference = 0;
        for (size_t k = 0; k < found.size(); ++k) {
          const float at = wanted.at(first * vocab + k);
          largest = std::max(largest, std::abs(static_cast<double>(at)));
          difference = std::max(difference, std::abs(static_cast<double>(found[k]) - at));
        }
        return difference / largest;
      };
      const inference::PromptShape as{.prefix = shape[0], .gap = shape[1]};
      CHECK(check(session->logits(tokens, as).value(), 0) <= kLogitGate);
      CHECK(check(session->logits(tokens).value(), 0) > 100 * kLogitGate);
      CHECK(check(session->logits(tokens, {.prefix = as.prefix - 1, .gap = -1}).value(), 0) > 100 * kLogitGate);
      REQUIRE(session->make_cache(2, folder->model().context).ok());
      REQUIRE(session->start(1, std::vector<int32_t>{1, 2, 3}).ok());
      const size_t prompt = std::min<size_t>(tokens.size(), shape[0] + 1);
      CHECK(check(session->start(0, std::span(tokens).first(prompt), as).value(), prompt - 1) <= kLogitGate);
      for (size_t t = prompt; t < tokens.size(); ++t) {
        const auto next = session->next(std::vector<int32_t>{tokens[t], t % 2 == 0 ? 5 : -1});
        REQUIRE(next.ok());
        CHECK(check(next.value().first(vocab), t) <= kLogitGate);
      }
    }
  }

  TEST_CASE("gradients of GLM-130B and CodeGeeX are those of automatic differentiation of the published forward pass") {
    for (const std::string name : {"ranks-glm130b", "ranks-codegeex"}) {
      CAPTURE(name);
      const auto folder = opened_folder(golden(name));
      ModelConfig model = folder->model();
      model.mask = Mask::kCausal;
      const double worst = gradient_difference(*folder, model, gradient_reference_of(name));
      MESSAGE(name, ": largest difference ", worst, " of a tensor's largest gradient");
    }
  }

  TEST_CASE("CodeGeeX's files, cut for two ranks and whole, give the logits of its published forward pass") {
    const auto folder = opened_folder(golden("ranks-codegeex")), whole = opened_folder(golden("ranks-codegeex-merged"));
    CHECK(folder->dtype() == DType::kF16);
    CHECK(folder->model().top_query);
    CHECK(differing_fields(folder->model(), whole->model()).empty());
    const Weights weights = weights_of(*folder);
    CHECK(weights == weights_of(*whole));
    const Reference reference = reference_of("ranks-codegeex");
    const double difference = logit_difference(folder->model(), weights, reference);
    CHECK(difference <= kLogitGate);
    MESSAGE("ranks-codegeex: logits differ by ", difference);
    // What other readings of the files would do: queries of another table or projection, the norm of another place.
    for (const auto& [one, other] : {std::pair("top_query.positions", "embed.positions"),
                                     {"top_query.attn.q.weight", "top_query.attn.k.weight"},
                                     {"top_query.attn.q.bias", "top_query.attn.v.bias"},
                                     {"final_norm.weight", "top_query.attn_norm.weight"},
                                     {"top_query.attn_norm.bias", "top_query.mlp_norm.bias"}}) {
      CAPTURE(one);
      Weights wrong = weights;
      REQUIRE(wrong[tensor_index(*folder, one)].size() == wrong[tensor_index(*folder, other)].size());
      std::swap(wrong[tensor_index(*folder, one)], wrong[tensor_index(*folder, other)]);
      CHECK(logit_difference(folder->model(), wrong, reference) > 100 * kLogitGate);
    }
    Weights transposed = weights;  // a square matrix the wrong way round
    std::vector<float>& o = transposed[tensor_index(*folder, "top_query.attn.o.weight")];
    const auto width = static_cast<size_t>(folder->model().width);
    for (size_t r = 0; r < width; ++r) {
      for (size_t c = 0; c < r; ++c) std::swap(o[r * width + c], o[c * width + r]);
    }
    CHECK(logit_difference(folder->model(), transposed, reference) > 100 * kLogitGate);
  }

  TEST_CASE("mp_rank files import into any layout and go out as the family that holds the model") {
    for (const auto& [ranks, type] : {std::pair("ranks-gpt2", "gpt2"), {"ranks-llama", "llama"}}) {
      CAPTURE(ranks);
      TempDir temp;
      ckpt::PosixBackend io;
      ImportOptions options;
      options.mesh = {.tp = 2, .pp = 3, .dp = 1};
      const auto imported = import_hf(io, golden(ranks), temp / "run", options, encode);
      REQUIRE_OK(imported);
      const auto exported = export_hf(io, imported.value().dir, temp / "out", {}, decode);
      REQUIRE_OK(exported);
      CHECK(exported.value().model_type == type);
      CHECK(weights_of(*opened_folder(temp / "out")) == weights_of(*opened_folder(golden(ranks))));
    }
    for (const char* ranks : {"ranks-glm130b", "ranks-codegeex"}) {
      CAPTURE(ranks);
      TempDir temp;
      ckpt::PosixBackend io;
      ImportOptions options;
      options.mesh = {.tp = 2, .pp = 2, .dp = 1};
      const auto imported = import_hf(io, golden(ranks), temp / "run", options, encode);
      REQUIRE_OK(imported);
      auto again = CheckpointWeights::open(io, imported.value().dir, decode);
      REQUIRE(again.ok());
      CHECK(weights_of(*again.value()) == weights_of(*opened_folder(golden(ranks))));
      const auto refused = export_hf(io, imported.value().dir, temp / "out", {}, decode);
      REQUIRE(!refused.ok());
      CHECK(refused.error().message.find("no Hugging Face family holds this model") != std::string::npos);
    }
  }

  TEST_CASE("mp_rank files that do not fit are reported with the file") {
    TempDir temp;
    const auto fresh = [&](const std::string& name) {
      fs::remove_all(temp / "x");
      copy_golden(name, temp / "x");
      return temp / "x";
    };
    fs::path dir = fresh("ranks-gpt2");
    CHECK(refusal_of(dir).empty());
    fs::remove_all(dir / "iter_0000007" / "mp_rank_01_000");
    CHECK(refusal_of(dir).find("has 3 files of ranks, expected 2 tensor-parallel ranks x 2 stages") !=
          std::string::npos);
    dir = fresh("ranks-gpt2");
    spit(dir / "latest_checkpointed_iteration.txt", "8\n");
    CHECK(refusal_of(dir).find("says \"8\", and") != std::string::npos);
    spit(dir / "latest_checkpointed_iteration.txt", "../../etc");
    CHECK(refusal_of(dir).find("is no folder") != std::string::npos);
    dir = fresh("ranks-gpt2");
    change_config(dir, [](nlohmann::json& c) { c["num_layers"] = 4; });
    CHECK(refusal_of(dir).find("layers.3.") != std::string::npos);
    change_config(dir, [](nlohmann::json& c) { c.erase("checkpoint_version"); });
    CHECK(refusal_of(dir).find("checkpoint_version must be said") != std::string::npos);
    dir = fresh("ranks-llama");
    change_config(dir, [](nlohmann::json& c) { c["swiglu"] = false; });
    CHECK(refusal_of(dir).find("mlp.dense_h_to_4h.weight") != std::string::npos);
    dir = fresh("ranks-llama");
    change_config(dir, [](nlohmann::json& c) { c.erase("hidden_size"); });
    CHECK(refusal_of(dir).find("hidden_size is missing") != std::string::npos);
    dir = fresh(
        "ranks-llama");  // two ranks that are the same rank: what each holds whole agrees, the vocabulary's half not
    fs::copy_file(dir / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt",
                  dir / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt", fs::copy_options::overwrite_existing);
    CHECK(weights_of(*opened_folder(dir)) != weights_of(*opened_folder(golden("ranks-llama"))));
    dir = fresh("ranks-codegeex-merged");
    CHECK(refusal_of(dir).empty());
    fs::copy_file(dir / "codegeex_13b.pt", dir / "other.pt");
    CHECK(refusal_of(dir).find("not exactly one .pt file") != std::string::npos);
    dir = fresh("ranks-codegeex");
    change_config(dir, [](nlohmann::json& c) { c["num_layers"] = 3; });
    CHECK(refusal_of(dir).find("layers.2.") != std::string::npos);
    // A bit of a norm, which both ranks hold.
    dir = fresh("ranks-glm130b");
    const fs::path file = dir / "49300" / "mp_rank_01_model_states.pt";
    std::string bytes = slurp(file);
    bytes[bytes.size() / 2] ^= 1;
    spit(file, bytes);
    CHECK(refusal_of(dir).find("mp_rank_01_model_states.pt") != std::string::npos);
  }

  TEST_CASE("a state dict alone is held to the strict list still") {
    TempDir temp;
    fs::create_directory(temp / "x");
    copy_golden("ranks-gpt2", temp / "y");
    fs::copy_file(temp / "y" / "iter_0000007" / "mp_rank_00_000" / "model_optim_rng.pt",
                  temp / "x" / "pytorch_model.bin");
    spit(temp / "x" / "config.json", R"({"model_type": "gpt2"})");
    const std::string message = refusal_of(temp / "x");
    CHECK(message.find("is not allowed: no state dict needs it; nothing was run") != std::string::npos);
  }
}
