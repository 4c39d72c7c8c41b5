#pragma once
// The golden Hugging Face folders (tests/fixtures/make_hf_fixtures.py), their reference logits, and a Cairn model made
// from any source of weights.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ckpt/store/posix_backend.h"
#include "converters/export.h"
#include "converters/hf_folder.h"
#include "converters/import.h"
#include "converters/safetensors.h"
#include "dsl/dsl.h"
#include "runtime/comm/thread_world.h"
#include "runtime/device/buffer.h"
#include "runtime/inference/session.h"
#include "runtime/nn/stage_model.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/model_check.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

namespace cairn::convert::testing {

namespace fs = std::filesystem;

inline const std::vector<std::string>& fixture_names() {
  static const std::vector<std::string> kNames = {"hf-gpt2-tied", "hf-gpt2-erf-untied", "hf-llama-gqa-sharded",
                                                  "hf-llama-tied-bias"};
  return kNames;
}

/// Where the fixtures lie: tests/golden, or the folder that the variable CAIRN_FIXTURES of the environment names
/// (draw_models.py).
inline fs::path fixtures_folder() {
  const char* const other = std::getenv("CAIRN_FIXTURES");
  return other != nullptr ? fs::path(other) : fs::path(CAIRN_SOURCE_DIR) / "tests/golden";
}

/// Every folder of the fixtures that has a model: what families_test.cc goes through.
inline const std::vector<std::string>& all_fixtures() {
  static const std::vector<std::string> kNames = [] {
    std::vector<std::string> out;
    for (const auto& entry : fs::directory_iterator(fixtures_folder())) {
      if (entry.path().filename().string().starts_with("hf-") && fs::exists(entry.path() / "config.json")) {
        out.push_back(entry.path().filename().string());
      }
    }
    std::ranges::sort(out);
    return out;
  }();
  return kNames;
}

/// check(name) of every folder. What ends one ends none of the others: they are judged too.
template <class Check>
void for_each_fixture(const Check& check) {
  for (const std::string& name : all_fixtures()) {
    CAPTURE(name);
    try {
      check(name);
    } catch (const doctest::detail::TestFailureException&) {  // a REQUIRE, which has counted and told it
    } catch (const std::exception& error) {
      FAIL_CHECK(error.what());
    }
  }
}

inline fs::path golden(const std::string& name) { return fixtures_folder() / name; }

inline std::unique_ptr<HfFolder> opened_folder(const fs::path& dir) {
  auto folder = HfFolder::open(dir);
  REQUIRE_OK(folder);
  return std::move(folder).value();
}

/// Why a folder or one of its files is not taken; empty when all is well.
inline std::string refusal_of(const fs::path& dir) {
  auto folder = HfFolder::open(dir);
  if (!folder.ok()) return folder.error().message;
  for (const auto& file : folder.value()->weights().files()) {
    const Status checked = file->verify();
    if (!checked.ok()) return checked.error().message;
  }
  return "";
}

/// The place of a tensor among the folder's.
inline size_t tensor_index(const HfFolder& folder, std::string_view name) {
  const auto found = std::ranges::find(folder.tensors(), name, &TensorSpec::name);
  REQUIRE_MESSAGE(found != folder.tensors().end(), name);
  return static_cast<size_t>(found - folder.tensors().begin());
}

using cairn::testing::TempDir;

inline std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream out;
  out << in.rdbuf();
  return out.str();
}

inline void spit(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

inline RecipeText encode(const Recipe& recipe) {
  const std::string json = dsl::encode_recipe(recipe);
  return {json, dsl::recipe_hash(json)};
}
inline Result<Recipe> decode(std::string_view json) { return dsl::decode_recipe(json); }

struct Reference {
  std::vector<std::vector<int32_t>> inputs;
  std::vector<std::vector<float>> logits;  // [tokens, vocab] of each
  std::vector<double> bf16_error;  // of transformers' own bf16 run: root mean squares of error and logits, divided
  std::vector<std::vector<double>> exact_losses;  // of each, of the tokens but the first, by float64; empty: not known
};

/// The numbers of a tensor of reference.safetensors; empty when it has none of this name.
template <class T>
std::vector<T> reference_tensor(const SafetensorsFile& file, const std::string& name) {
  for (const SafeTensor& tensor : file.header().tensors) {
    if (tensor.name != name) continue;
    const int64_t bytes = tensor.end - tensor.begin;
    std::vector<T> out(bytes / sizeof(T));
    REQUIRE(file.read(tensor, 0, bytes, reinterpret_cast<std::byte*>(out.data())).ok());
    return out;
  }
  return {};
}

inline Reference reference_of(const std::string& name) {
  auto opened = SafetensorsFile::open(golden(name) / "reference.safetensors");
  REQUIRE(opened.ok());
  const SafetensorsFile file = std::move(opened).value();
  Reference out;
  for (const std::string n : {"0", "1"}) {
    const auto ids = reference_tensor<int64_t>(file, "input." + n);
    REQUIRE(!ids.empty());
    out.inputs.emplace_back(ids.begin(), ids.end());
    out.logits.push_back(reference_tensor<float>(file, "logits." + n));
    for (const float error : reference_tensor<float>(file, "bf16_error." + n)) out.bf16_error.push_back(error);
    out.exact_losses.push_back(reference_tensor<double>(file, "exact_losses." + n));
  }
  return out;
}

constexpr int64_t kGradientStride = 7;  // GRADIENT_STRIDE of make_hf_fixtures.py

struct GradientReference {
  std::vector<int32_t> input;  // tokens; each but the first is to be predicted
  std::vector<float> samples;  // every kGradientStride-th element of the stored tensors, ordered by name
};

inline GradientReference gradient_reference_of(const std::string& name) {
  auto opened = SafetensorsFile::open(golden(name) / "reference.safetensors");
  REQUIRE(opened.ok());
  const SafetensorsFile file = std::move(opened).value();
  GradientReference out;
  const auto ids = reference_tensor<int64_t>(file, "gradient_input");
  out.input.assign(ids.begin(), ids.end());
  out.samples = reference_tensor<float>(file, "grad");
  return out;
}

inline bool has_gradients(const std::string& name) { return !gradient_reference_of(name).input.empty(); }

using Weights = std::vector<std::vector<float>>;  // of each logical tensor

inline Weights weights_of(const WeightSource& source) {
  Weights out;
  for (size_t k = 0; k < source.tensors().size(); ++k) {
    out.emplace_back(count_elems(source.tensors()[k].shape));
    REQUIRE(source.read(static_cast<int64_t>(k), out.back()).ok());
  }
  return out;
}

/// Whether this build has kernels for all of the model's options.
inline bool is_computed(const ModelConfig& model) { return find_mistakes(model).empty(); }

/// Two ranks where they can cut every row, else one: some fixtures have odd widths on purpose. A single head of keys is
/// copied.
inline int64_t tp_of(const ModelConfig& model) {
  const bool heads = model.heads % 2 == 0 && (model.kv_heads % 2 == 0 || model.kv_heads == 1);
  return heads && model.ffn % 2 == 0 && model.moe.ffn % 2 == 0 && model.moe.shared_ffn % 2 == 0 ? 2 : 1;
}

inline Recipe test_recipe(ModelConfig model, Precision precision = Precision::kF32) {
  // Without a table of positions the context is only a length; BLOOM's config.json says none that is near.
  if (model.positions == Positions::kAlibi) model.context = 35;
  Recipe recipe = recipe_for_import(model, {.tp = 1, .pp = 1, .dp = 1}, "test", "");
  recipe.precision = precision;
  return recipe;
}

inline std::unique_ptr<inference::Session> session_of(const ModelConfig& model, const Weights& weights,
                                                      Precision precision = Precision::kF32) {
  auto made = inference::Session::make(test_recipe(model, precision));
  REQUIRE_OK(made);
  std::unique_ptr<inference::Session> session = std::move(made).value();
  for (const trainer::StateTensor& run : session->weights()) {
    copy_box_out(weights[run.tensor].data(), session->plan().tensors[run.tensor].shape, run.box,
                 address_of(run.data.as<float>()));
  }
  const Status ready = session->weights_ready();
  REQUIRE_OK(ready);
  return session;
}

/// Logits [tokens, vocab] of each input.
inline std::vector<std::vector<float>> logits_of(const ModelConfig& model, const Weights& weights,
                                                 const std::vector<std::vector<int32_t>>& inputs,
                                                 Precision precision = Precision::kF32) {
  const std::unique_ptr<inference::Session> session = session_of(model, weights, precision);
  std::vector<std::vector<float>> out;
  for (const std::vector<int32_t>& input : inputs) {
    auto logits = session->logits(input);
    REQUIRE(logits.ok());
    out.emplace_back(logits.value().begin(), logits.value().end());
  }
  return out;
}

/// Largest |difference| to the reference over both inputs, divided by max(1, largest |logit|).
inline double logit_difference(const ModelConfig& model, const Weights& weights, const Reference& reference) {
  const auto found = logits_of(model, weights, reference.inputs);
  double worst = 0;
  for (size_t n = 0; n < found.size(); ++n) {
    REQUIRE(found[n].size() == reference.logits[n].size());
    double largest = 1, difference = 0;
    for (size_t k = 0; k < found[n].size(); ++k) {
      largest = std::max(largest, std::abs(static_cast<double>(reference.logits[n][k])));
      const double d = std::abs(static_cast<double>(found[n][k]) - reference.logits[n][k]);
      difference = std::isfinite(d) ? std::max(difference, d) : INFINITY;
    }
    worst = std::max(worst, difference / largest);
  }
  return worst;
}

/// Of each input: root mean square of the error, divided by that of the reference.
inline std::vector<double> logit_errors(const ModelConfig& model, const Weights& weights, const Reference& reference,
                                        Precision precision) {
  const auto found = logits_of(model, weights, reference.inputs, precision);
  std::vector<double> out;
  for (size_t n = 0; n < found.size(); ++n) {
    double error = 0, size = 0;
    for (size_t k = 0; k < found[n].size(); ++k) {
      const double d = static_cast<double>(found[n][k]) - reference.logits[n][k];
      error += d * d;
      size += static_cast<double>(reference.logits[n][k]) * reference.logits[n][k];
    }
    out.push_back(std::sqrt(error / size));
  }
  return out;
}

/// Gradients of the mean loss of predicting each next token, of each logical tensor.
inline Weights gradients_of(ModelConfig model, const Weights& weights, const std::vector<int32_t>& tokens) {
  model.moe.aux_loss = 0;
  Recipe recipe = test_recipe(model);
  recipe.model.context = static_cast<int64_t>(tokens.size()) - 1;
  auto made = make_plan(recipe, 1);
  REQUIRE_OK(made);
  const Plan plan = std::move(made).value();
  const RankPlan rank = plan.rank(0);
  std::vector<float> flat(rank.flat_elems), gradients(rank.flat_elems);
  for (const LocalTensor& local : rank.tensors) {
    REQUIRE(local.box.count_elems() == static_cast<int64_t>(weights[local.tensor].size()));
    std::ranges::copy(weights[local.tensor], flat.begin() + local.weight_at);
  }
  auto activations = Buffer::allocate({DeviceKind::kCpu, 0}, stage_buffers_bytes(plan, rank));
  REQUIRE(activations.ok());
  auto engine = comm::ThreadWorld(1).engine(0);
  auto tp = engine->group("tp", {0});
  REQUIRE(tp.ok());
  const std::unique_ptr<Stream> stream = make_cpu_stream();
  auto stage = nn::StageModel::make(*stream, plan, rank, 0, {.tp = tp.value().get()}, DevicePtr(flat.data()),
                                    DevicePtr(gradients.data()), activations.value().all());
  REQUIRE_OK(stage);
  const int32_t* const targets = tokens.data() + 1;
  REQUIRE(stage.value()->forward(0, tokens.data(), targets, nullptr, nullptr).ok());
  const float scale = 1.0f / static_cast<float>(recipe.model.context);
  REQUIRE(stage.value()->backward(0, tokens.data(), targets, nullptr, nullptr, scale).ok());
  Weights out(plan.tensors.size());
  for (const LocalTensor& local : rank.tensors) {
    const auto from = gradients.begin() + local.grad_at;
    out[local.tensor].assign(from, from + local.box.count_elems());
  }
  return out;
}

/// Losses of tokens in float32, of the loss, or of 1 where it is less.
constexpr double kLossGate = 1e-5;
/// Beyond it, of drawn models: so many times the error of transformers' own float32 (docs/adding-a-family.md, "Proof").
constexpr double kLossErrorFactor = 10;

/// Gradients in float32, of a tensor's largest: a backward pass is twice as many sums as the forward, and a softmax's
/// gradient a difference of nearly equal numbers. And of gradients that are zero in exact arithmetic (the bias of k).
constexpr double kGradientGate = 3e-4;
constexpr double kGradientNoise = 1e-6;

/// What export makes of logical tensors: each element at its place in the stored ones. Elements that none fills are
/// NaN.
inline std::map<std::string, std::vector<float>> to_stored(const std::vector<Mapping>& mappings,
                                                           const std::vector<TensorSpec>& tensors,
                                                           const Weights& logical) {
  std::map<std::string, std::vector<float>> out;
  for (const Mapping& mapping : mappings) {
    const size_t k = static_cast<size_t>(mapping.tensor);
    auto [at, is_new] = out.try_emplace(mapping.stored, count_elems(mapping.shape), NAN);
    const int64_t columns = column_count(tensors[k].shape);
    const int64_t width = mapping.transpose ? mapping.shape.back() : columns;
    for (const RowRun& run : row_runs(mapping, tensors[k].shape)) {
      for (int64_t r = 0; r < run.count; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t row = run.stored + r * run.stride;
          const int64_t to = mapping.transpose ? (mapping.line + c) * width + row : row * width + c;
          REQUIRE(std::isnan(at->second.at(to)));
          at->second[to] = logical[k][(run.logical + r) * columns + c];
        }
      }
    }
  }
  return out;
}

/// Largest difference of a tensor's gradients to the reference's, of the tensor's largest, without those that are zero
/// in exact arithmetic; each is held against the gate and the noise.
inline double gradient_difference(const HfFolder& folder, const ModelConfig& model,
                                  const GradientReference& reference) {
  auto stored =
      to_stored(folder.mappings(), folder.tensors(), gradients_of(model, weights_of(folder), reference.input));
  for (const Mapping& mapping : folder.mappings()) {  // counts of choices, no gradients
    if (folder.tensors()[mapping.tensor].balances) stored.erase(mapping.stored);
  }
  double worst = 0;
  size_t next = 0;
  for (const auto& [tensor, found] : stored) {
    CAPTURE(tensor);
    double largest = 0, difference = 0;
    for (size_t k = 0; k < found.size(); k += kGradientStride, ++next) {
      REQUIRE(next < reference.samples.size());
      const double wanted = reference.samples[next];
      largest = std::max(largest, std::abs(wanted));
      difference = std::max(difference, std::abs(found[k] - wanted));
    }
    CHECK(difference <= kGradientGate * largest + kGradientNoise);
    if (largest > 100 * kGradientNoise) worst = std::max(worst, difference / largest);
  }
  REQUIRE(next == reference.samples.size());
  return worst;
}

/// float32 logits against transformers': spec of the converters, 1e-4 of the largest logit. A mistake must pass 100x.
constexpr double kLogitGate = 1e-4;

/// Root mean square error in bf16, as a multiple of transformers' own: the two round at other places.
constexpr double kBf16LogitFactor = 2.0;

}  // namespace cairn::convert::testing
