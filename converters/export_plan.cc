#include "converters/export_plan.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/plan/save_plan.h"
#include "converters/family.h"
#include "converters/hf_folder.h"
#include "converters/model_card.h"
#include "converters/model_files.h"
#include "runtime/json/json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

ModelCard card_of(const CheckpointWeights& source, const std::string& name, const ExportPlan& plan, bool block_fp8) {
  const ckpt::Manifest& m = source.manifest();
  ModelCard card{.name = name,
                 .model_type = plan.model_type,
                 .dtype = dtype_text(plan.output.dtype, block_fp8),
                 .parameters = count_parameters(source.model())};
  card.lineage.push_back(fmt::format("run `{}` (id `{}`), step {}, {} samples and {} tokens seen", m.run.name, m.run.id,
                                     m.step, m.samples, m.tokens));
  if (source.kind() != ckpt::kWeightKind) {
    card.lineage.push_back(fmt::format("the moving average of its weights, decay {}", source.recipe().optimizer.ema));
  }
  card.lineage.push_back(fmt::format("recipe hash `{}`", m.recipe_hash));
  if (!m.origin.empty()) card.lineage.push_back(m.origin);
  for (auto parent = m.run.parents.rbegin(); parent != m.run.parents.rend(); ++parent)
    card.lineage.push_back(fmt::format("continues the run with id `{}`", *parent));
  return card;
}

/// config.json, and the ids of a tokenizer in `files`.
Result<nlohmann::ordered_json> config_of(const Family& family, const CheckpointWeights& source,
                                         const ExportOptions& options, ModelFiles& files, ExportPlan& plan) {
  const nlohmann::json original = json_or_nothing(files.original_text(), JsonNumbers::kPython);
  nlohmann::ordered_json config = config_from_model(family, source.model(), plan.output.dtype, original);
  keep_token_ids(files.original_text(), &config);
  const WrittenFor written_line = written_for(family, source.model());
  config["transformers_version"] = written_line.version;
  files.settle_token_ids(&config);
  if (!written_line.warning.empty()) plan.warnings.push_back(written_line.warning);
  if (options.block_fp8) {
    RT_TRY(check_block_fp8(family));
    plan.blocks = BlockFp8::like(original);
    config["quantization_config"] = plan.blocks.config();
  }
  return config;
}

}  // namespace

Result<std::unique_ptr<TensorSource>> ExportPlan::open(const fs::path& source_dir, const CheckpointWeights& source,
                                                       std::span<const int64_t> tensors, OutputReads reads) const {
  return open_outputs(source_dir, source, outputs, output.dtype, blocks, tensors, reads);
}

Result<ExportPlan> plan_export(ckpt::IoBackend& io, const CheckpointWeights& source, const fs::path& source_dir,
                               const std::string& name, const ExportOptions& options, const RecipeDecoder& decode) {
  RT_TRY_SET(ModelFiles files,
             gather_model_files(io, source, source_dir,
                                {options.like, options.without_tokenizer, options.trained_tokenizer}, decode));
  ExportPlan plan{.warnings = files.warnings};
  // A model that came from Hugging Face goes back as what it was, where several families could hold it.
  const std::string original_type = files.original_type();
  RT_TRY_SET(const Family family, family_for(source.model(), original_type));
  const DType trained = options.block_fp8 ? DType::kBf16 : DType::kF32;
  const DType dtype = options.dtype.value_or(source.imported_dtype().value_or(files.origin_dtype.value_or(trained)));
  plan.output.dtype = dtype == DType::kF64 ? DType::kF32 : dtype;
  plan.model_type = family.model_type;
  if (!options.like.empty() && !original_type.empty() && original_type != family.model_type) {
    plan.warnings.push_back(fmt::format("{} is of type {}, which cannot hold this model: exported as {}",
                                        options.like.string(), original_type, family.model_type));
  }
  if (family.own_code) plan.warnings.push_back(own_code_warning(family));
  RT_TRY_SET(const nlohmann::ordered_json config, config_of(family, source, options, files, plan));
  plan.outputs = outputs_of(family, source, options.block_fp8 ? &plan.blocks : nullptr);
  if (!options.dtype) {  // what nothing has trained leaves as it came
    const std::map<std::string, DType> own = source.imported_dtypes();
    for (Output& tensor : plan.outputs) {
      const auto found = own.find(source.tensors()[tensor.runs.front().source].name);
      if (found != own.end()) tensor.own_dtype = found->second;
    }
  }

  HfOutput& output = plan.output;
  for (const Output& tensor : plan.outputs)
    output.tensors.push_back({tensor.name, tensor.shape, tensor.own_dtype, tensor.part});
  if (const auto index = files.files.find(std::string(kIndexFile)); index != files.files.end())
    output.split = split_of_index(output.tensors, index->second);
  for (auto& [file, text] : files.files) {
    if (file != kConfigFile && file != kIndexFile) output.texts[file] = std::move(text);
  }
  output.texts[std::string(kConfigFile)] = json_text(config, 2) + "\n";
  output.texts[std::string(kCardFile)] = model_card(card_of(source, name, plan, options.block_fp8));
  RT_TRY_SET(output.source, ckpt::encode_manifest(source.manifest()));
  output.source += source.kind();
  return plan;
}

}  // namespace cairn::convert
