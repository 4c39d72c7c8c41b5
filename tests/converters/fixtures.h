#pragma once
// The golden Hugging Face folders (tests/fixtures/make_hf_fixtures.py), their reference logits, and a Cairn model made
// from any source of weights.

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ckpt/store/posix_backend.h"
#include "converters/export.h"
#include "converters/hf_folder.h"
#include "converters/safetensors.h"
#include "converters/import.h"
#include "dsl/dsl.h"
#include "runtime/inference/session.h"

namespace cairn::convert::testing {

namespace fs = std::filesystem;

inline const std::vector<std::string>& fixture_names() {
  static const std::vector<std::string> kNames = {"hf-gpt2-tied", "hf-gpt2-erf-untied", "hf-llama-gqa-sharded",
                                                  "hf-llama-tied-bias"};
  return kNames;
}

inline fs::path golden(const std::string& name) { return fs::path(CAIRN_SOURCE_DIR) / "tests/golden" / name; }

/// A folder of its own, removed at the end.
class TempDir {
 public:
  TempDir() {
    std::string name = (fs::temp_directory_path() / "cairn-convert-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  fs::path operator/(const std::string& name) const { return path_ / name; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

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
};

inline Reference reference_of(const std::string& name) {
  auto opened = SafetensorsFile::open(golden(name) / "reference.safetensors");
  REQUIRE(opened.ok());
  const SafetensorsFile file = std::move(opened).value();
  Reference out;
  for (const std::string n : {"0", "1"}) {
    for (const SafeTensor& tensor : file.header().tensors) {
      const int64_t bytes = tensor.end - tensor.begin;
      if (tensor.name == "input." + n) {
        std::vector<int64_t> ids(bytes / 8);
        REQUIRE(file.read(tensor, 0, bytes, reinterpret_cast<std::byte*>(ids.data())).ok());
        out.inputs.emplace_back(ids.begin(), ids.end());
      } else if (tensor.name == "logits." + n) {
        out.logits.emplace_back(bytes / 4);
        REQUIRE(file.read(tensor, 0, bytes, reinterpret_cast<std::byte*>(out.logits.back().data())).ok());
      }
    }
  }
  REQUIRE(out.inputs.size() == 2);
  REQUIRE(out.logits.size() == 2);
  return out;
}

using Weights = std::vector<std::vector<float>>;  // of each logical tensor

inline Weights weights_of(const WeightSource& source) {
  Weights out;
  for (size_t k = 0; k < source.tensors().size(); ++k) {
    out.emplace_back(count_elems(source.tensors()[k].shape));
    REQUIRE(source.read(static_cast<int64_t>(k), out.back()).ok());
  }
  return out;
}

/// Largest |difference| to the reference over both inputs, divided by max(1, largest |logit|).
inline double logit_difference(const ModelConfig& model, const Weights& weights, const Reference& reference) {
  const Recipe recipe = recipe_for_import(model, {.tp = 1, .pp = 1, .dp = 1}, "test", "");
  auto made = inference::Session::make(recipe);
  REQUIRE(made.ok());
  const std::unique_ptr<inference::Session> session = std::move(made).value();
  for (const trainer::StateTensor& run : session->weights()) {
    copy_box_out(weights[run.tensor].data(), session->plan().tensors[run.tensor].shape, run.box,
                 reinterpret_cast<float*>(run.data));
  }
  session->weights_ready();
  double worst = 0;
  for (size_t n = 0; n < reference.inputs.size(); ++n) {
    auto logits = session->logits(reference.inputs[n]);
    REQUIRE(logits.ok());
    REQUIRE(logits.value().size() == reference.logits[n].size());
    double largest = 1, difference = 0;
    for (size_t k = 0; k < reference.logits[n].size(); ++k) {
      largest = std::max(largest, std::abs(static_cast<double>(reference.logits[n][k])));
      const double d = std::abs(static_cast<double>(logits.value()[k]) - reference.logits[n][k]);
      difference = std::isfinite(d) ? std::max(difference, d) : INFINITY;
    }
    worst = std::max(worst, difference / largest);
  }
  return worst;
}

/// float32 logits against transformers': spec of the converters, 1e-4 of the largest logit. A mistake must pass 100x.
constexpr double kLogitGate = 1e-4;

}  // namespace cairn::convert::testing
