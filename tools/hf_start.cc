#include "tools/hf_start.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "converters/hf_folder.h"
#include "dsl/dsl.h"
#include "runtime/json/json.h"
#include "tools/model_source.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

json model_json(const ModelConfig& model) {
  Recipe recipe;
  recipe.model = model;
  return json_or_nothing(dsl::encode_recipe(recipe)).at("model");
}

/// Whether a difference in this field is told by tensors' names and shapes, or is no property of the weights.
bool is_free(const std::string& key, const ModelConfig& model) {
  if (key == "context") return model.positions != Positions::kLearned;
  return key == "vocab" || key == "init_std" || key == "init" || key == "tied_embeddings" || key.ends_with("dropout");
}

Status check_same_model(const ModelConfig& wanted, const ModelConfig& found) {
  const json mine = model_json(wanted), theirs = model_json(found);
  json keys = mine;
  keys.update(theirs);  // a field at its default is in neither or in one of them only
  std::string differences;
  for (const auto& [key, unused] : keys.items()) {
    json here = json_field(mine, key), there = json_field(theirs, key);
    for (json* moe : {&here, &there}) {  // how experts are balanced
      if (key != "moe" || !moe->is_object()) continue;
      if (moe->contains("bias_rate")) (*moe)["choice_bias"] = true;
      for (const char* how : {"aux_loss", "aux_scope", "z_loss", "bias_rate"}) moe->erase(how);
    }
    if (here == there || is_free(key, wanted)) continue;
    differences +=
        fmt::format("\n  model.{} = {} in the recipe, {} in config.json", key, json_text(here), json_text(there));
  }
  if (differences.empty()) return {};
  return Error{ErrorCode::kInvalidInput, fmt::format("the recipe trains another model:{}", differences)};
}

class HfWeights final : public ckpt::ForeignWeights {
 public:
  explicit HfWeights(std::unique_ptr<convert::HfFolder> folder) : folder_(std::move(folder)) {
    for (const TensorSpec& tensor : folder_->tensors()) {
      manifest_.tensors.push_back({.name = tensor.name, .kind = "weight", .dtype = DType::kF32, .shape = tensor.shape});
    }
  }

  const ckpt::Manifest& manifest() const override { return manifest_; }

  Status read(std::string_view name, const Box& box, float* out) const override {
    const std::vector<TensorSpec>& tensors = folder_->tensors();
    const auto found =
        std::find_if(tensors.begin(), tensors.end(), [&](const TensorSpec& spec) { return spec.name == name; });
    RT_CHECK(found != tensors.end(), "no tensor {} in the folder", name);
    if (box.empty()) return {};
    return folder_->read_box(found - tensors.begin(), box, {out, static_cast<size_t>(box.count_elems())});
  }

 private:
  std::unique_ptr<convert::HfFolder> folder_;
  ckpt::Manifest manifest_;
};

}  // namespace

ckpt::OpenForeign open_hf_for(const ModelConfig& model) {
  return [model](const std::filesystem::path& dir) -> Result<std::unique_ptr<ckpt::ForeignWeights>> {
    if (!is_hf_folder(dir)) return std::unique_ptr<ckpt::ForeignWeights>();
    RT_TRY_SET(std::unique_ptr<convert::HfFolder> folder, convert::HfFolder::open(dir));
    RT_TRY(check_same_model(model, folder->model()).with(dir.string()));
    return std::unique_ptr<ckpt::ForeignWeights>(std::make_unique<HfWeights>(std::move(folder)));
  };
}

}  // namespace cairn::tools
