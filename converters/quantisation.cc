#include "converters/quantisation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "converters/elements.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

using nlohmann::json;

constexpr std::string_view kKey = "quantization_config";
constexpr std::string_view kBlocks = "_blocks", kScales = "_scales";  // of mxfp4
constexpr int64_t kGroupBytes = kMxfp4Group / 2;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

struct Scheme {
  bool mxfp4 = false;
  std::string suffix = {};                    // of the scale's name, after the weight's
  int64_t block_rows = 0, block_columns = 0;  // 0: not by blocks
  bool bytes = false;                         // scales of U8 are exponents
};

Result<Scheme> by_blocks(Scheme scheme, const json& blocks, std::string_view what) {
  if (blocks.is_null()) return scheme;
  const auto whole = [](const json& n) { return n.is_number_integer() && n >= 1 && n <= (1 << 30); };
  if (!blocks.is_array() || blocks.size() != 2 || !whole(blocks[0]) || !whole(blocks[1])) {
    return invalid(fmt::format("{} must be two sizes or null, got {}", what, json_text(blocks)));
  }
  scheme.block_rows = blocks[0].get<int64_t>();
  scheme.block_columns = blocks[1].get<int64_t>();
  return scheme;
}

/// What people call a method, beside its name in config.json.
std::string described(const std::string& method, const json& quant) {
  static const std::map<std::string, std::string_view> kKnown = {
      {"awq", "AWQ, packed integers"},
      {"gptq", "GPTQ, packed integers"},
      {"auto-round", "AutoRound, packed integers"},
      {"bitsandbytes", "bitsandbytes, NF4, FP4 or LLM.int8()"},
      {"aqlm", "AQLM, additive codebooks"},
      {"quip", "QuIP, codebooks"},
      {"vptq", "VPTQ, codebooks"},
      {"spqr", "SpQR, sparse outliers"},
      {"hqq", "HQQ, packed integers"},
      {"higgs", "HIGGS, grids"},
      {"eetq", "EETQ, integers of eight bits"},
      {"quark", "AMD Quark"},
      {"modelopt", "NVIDIA ModelOpt, NVFP4 or FP8"},
      {"fp_quant", "FP-Quant, MXFP4 or NVFP4 of rotated weights"},
      {"bitnet", "BitNet, ternary weights"},
      {"metal", "Metal, packed integers"}};
  std::string out = fmt::format("quant_method \"{}\"", method);
  std::vector<std::string> more;
  if (const auto known = kKnown.find(method); known != kKnown.end()) more.emplace_back(known->second);
  for (const char* key : {"bits", "w_bit", "nbits"}) {
    if (quant.contains(key) && quant[key].is_number_integer())
      more.push_back(fmt::format("{} bits", json_text(quant[key])));
  }
  if (!more.empty()) out += fmt::format(" ({})", fmt::join(more, ", "));
  return out;
}

/// Nothing: the weights are stored as they are.
Result<std::optional<Scheme>> scheme_of(const json& config) {
  const auto mlx = config.is_object() ? config.find("quantization") : config.end();
  if (config.is_object() && mlx != config.end() && mlx->is_object() && mlx->contains("bits")) {
    return unsupported(
        fmt::format("quantization: the weights are packed by MLX ({} bits), which cannot be read here; use "
                    "the model that they were made from",
                    json_text((*mlx)["bits"])));
  }
  const auto found = config.is_object() ? config.find(kKey) : config.end();
  if (!config.is_object() || found == config.end() || found->is_null()) return std::optional<Scheme>();
  const json& quant = *found;
  std::string method;
  if (quant.is_object() && quant.contains("quant_method") && quant["quant_method"].is_string()) {
    method = quant["quant_method"];
  } else if (quant.is_object() && (quant.contains("load_in_4bit") || quant.contains("load_in_8bit"))) {
    method = "bitsandbytes";  // as its first releases wrote it
  } else {
    return invalid(fmt::format("{} must be an object with a quant_method", kKey));
  }
  if (method == "fp8") {
    const json& stated = json_field(quant, "weight_block_size");
    const json blocks =
        stated.is_null() && !quant.contains("weight_block_size") ? json{128, 128} : stated;  // its class
    const json experts = json_field(quant, "expert_dtype");
    if (experts == "fp4") {
      return unsupported(fmt::format("{}: expert_dtype \"fp4\" cannot be read here; known: \"fp8\"", kKey));
    }
    RT_TRY_SET(Scheme scheme, by_blocks({.suffix = "_scale_inv", .bytes = json_field(quant, "scale_fmt") == "ue8m0"},
                                        blocks, fmt::format("{}.weight_block_size", kKey)));
    return std::optional(std::move(scheme));
  }
  if (method == "mxfp4") return std::optional(Scheme{.mxfp4 = true});
  if (method == "fbgemm_fp8") return std::optional(Scheme{.suffix = "_scale"});
  constexpr std::string_view kAdvice = "use the folder that it was made from";
  if (method == "compressed-tensors") {
    const json format = json_field(quant, "format");
    if (format != "float-quantized" && format != "naive-quantized") {
      return unsupported(
          fmt::format("{}: compressed-tensors in format {} cannot be read here; known: "
                      "\"float-quantized\" (fp8); {}",
                      kKey, json_text(format), kAdvice));
    }
    Scheme scheme{.suffix = "_scale"};
    const json groups = json_field(quant, "config_groups");
    for (const auto& group : groups) {
      const auto weights = group.is_object() ? group.find("weights") : group.end();
      if (!group.is_object() || weights == group.end() || !weights->is_object()) continue;
      RT_TRY_SET(scheme,
                 by_blocks(scheme, json_field(*weights, "block_structure"), fmt::format("{}: block_structure", kKey)));
    }
    return std::optional(std::move(scheme));
  }
  return unsupported(fmt::format("{}: {} cannot be read here; known: fp8, fbgemm_fp8, compressed-tensors, mxfp4; {}",
                                 kKey, described(method, quant), kAdvice));
}

int64_t blocks_in(int64_t size, int64_t block) { return (size + block - 1) / block; }

/// The blocks for which a scale of this shape stands; nothing when it does not fit the weight.
std::optional<std::pair<int64_t, int64_t>> blocks_for(const Scheme& scheme, const Shape& weight, const Shape& scale) {
  const int64_t rows = row_count(weight), columns = column_count(weight);
  if (count_elems(scale) == 1) return std::pair(rows, columns);
  if (scale == Shape{rows, 1} || scale == Shape{rows}) return std::pair(int64_t{1}, columns);
  if (scheme.block_rows > 0 &&
      scale == Shape{blocks_in(rows, scheme.block_rows), blocks_in(columns, scheme.block_columns)}) {
    return std::pair(scheme.block_rows, scheme.block_columns);
  }
  return std::nullopt;
}

/// The shape that the scale of a weight has to have, as text.
std::string expected_scale(const Scheme& scheme, const Shape& weight) {
  const int64_t rows = row_count(weight), columns = column_count(weight);
  if (scheme.block_rows == 0) return fmt::format("[1] or {}", to_string(Shape{rows, 1}));
  return fmt::format("{} (blocks of {} x {})",
                     to_string(Shape{blocks_in(rows, scheme.block_rows), blocks_in(columns, scheme.block_columns)}),
                     scheme.block_rows, scheme.block_columns);
}

/// A number for activations, which only kernels that compute in eight bits need.
bool is_activation_scale(std::string_view name) {
  for (const std::string_view leaf : {".input_scale", ".input_scale_ub", ".activation_scale", ".activation_scale_inv",
                                      ".output_scale", ".k_scale", ".v_scale", ".q_scale"}) {
    if (name.ends_with(leaf)) return true;
  }
  return false;
}

std::string place_of(const FolderTensor& tensor) {
  return fmt::format("{}: {} {}", tensor.file_name(), tensor.name, tensor.dtype);
}

using ByName = std::map<std::string_view, const FolderTensor*>;
using Problems = std::vector<std::string>;

Status refuse(std::string_view what, const Problems& problems) {
  constexpr size_t kTold = 20;
  if (problems.empty()) return {};
  const std::span told = std::span(problems).first(std::min(problems.size(), kTold));
  std::string text = fmt::format("{}:\n  {}", what, fmt::join(told, "\n  "));
  if (problems.size() > kTold) text += fmt::format("\n  and {} more", problems.size() - kTold);
  return invalid(std::move(text));
}

/// Weights of eight bits with their scales.
class ScaledWeights {
 public:
  ScaledWeights(const Scheme& scheme, const std::vector<FolderTensor>& tensors) : scheme_(scheme), tensors_(tensors) {
    for (const FolderTensor& tensor : tensors) by_name_[tensor.name] = &tensor;
  }

  std::vector<FolderTensor> join() {
    std::vector<FolderTensor> out, others;
    for (const FolderTensor& tensor : tensors_) {
      if (is_fp8_dtype(tensor.dtype)) {
        if (const auto joined = with_scale(tensor)) out.push_back(*joined);
      } else if (is_scale(tensor)) {
        check_scale(tensor);
      } else if (!is_activation_scale(tensor.name)) {
        others.push_back(tensor);
      }
    }
    out.insert(out.end(), others.begin(), others.end());
    return out;
  }
  const Problems& problems() const { return problems_; }

 private:
  bool is_scale(const FolderTensor& tensor) const { return tensor.name.ends_with(".weight" + scheme_.suffix); }

  std::optional<FolderTensor> with_scale(const FolderTensor& tensor) {
    const std::string expected = expected_scale(scheme_, tensor.shape);
    const auto found = by_name_.find(tensor.name + scheme_.suffix);
    if (found == by_name_.end()) {
      problems_.push_back(fmt::format("{}: its scale {}{} is missing, expected F32 {}", place_of(tensor), tensor.name,
                                      scheme_.suffix, expected));
      return std::nullopt;
    }
    const FolderTensor& scale = *found->second;
    const auto blocks = blocks_for(scheme_, tensor.shape, scale.shape);
    const bool number =
        is_float_dtype(scale.dtype) || scale.dtype == "F8_E8M0" || (scheme_.bytes && scale.dtype == "U8");
    if (!blocks || !number) {
      problems_.push_back(fmt::format("{} {}: its scale {} {} {} does not fit, expected F32 {}", place_of(tensor),
                                      to_string(tensor.shape), scale.name, scale.dtype, to_string(scale.shape),
                                      expected));
      return std::nullopt;
    }
    FolderTensor out = tensor;
    out.dtype = "F32";
    out.scale_file = scale.file;
    out.scale = scale.stored;
    std::tie(out.block_rows, out.block_columns) = *blocks;
    return out;
  }

  void check_scale(const FolderTensor& scale) {
    const std::string name = scale.name.substr(0, scale.name.size() - scheme_.suffix.size());
    const auto weight = by_name_.find(name);
    if (weight != by_name_.end() && is_fp8_dtype(weight->second->dtype)) return;
    problems_.push_back(fmt::format("{} {}: a scale without its weight: {} is {}, expected F8_E4M3", place_of(scale),
                                    to_string(scale.shape), name,
                                    weight == by_name_.end() ? "missing" : weight->second->dtype));
  }

  const Scheme& scheme_;
  const std::vector<FolderTensor>& tensors_;
  ByName by_name_;
  Problems problems_;
};

/// Stacks of four-bit numbers with their scales.
std::vector<FolderTensor> join_mxfp4(const std::vector<FolderTensor>& tensors, Problems& problems) {
  ByName by_name;
  for (const FolderTensor& tensor : tensors) by_name[tensor.name] = &tensor;
  const auto partner = [&](const FolderTensor& tensor, std::string_view own, std::string_view other) {
    const auto found = by_name.find(tensor.name.substr(0, tensor.name.size() - own.size()) + std::string(other));
    return found == by_name.end() ? nullptr : found->second;
  };
  std::vector<FolderTensor> out;
  for (const FolderTensor& tensor : tensors) {
    if (tensor.name.ends_with(kScales)) {
      if (partner(tensor, kScales, kBlocks) == nullptr) {
        problems.push_back(fmt::format("{} {}: scales without their blocks: {}{} is missing", place_of(tensor),
                                       to_string(tensor.shape),
                                       tensor.name.substr(0, tensor.name.size() - kScales.size()), kBlocks));
      }
      continue;
    }
    if (!tensor.name.ends_with(kBlocks)) {
      out.push_back(tensor);
      continue;
    }
    if (tensor.dtype != "U8" || tensor.shape.size() != 4 || tensor.shape[3] != kGroupBytes) {
      problems.push_back(fmt::format("{} {}: blocks of four-bit numbers, expected U8 [experts, out, in / {}, {}]",
                                     place_of(tensor), to_string(tensor.shape), kMxfp4Group, kGroupBytes));
      continue;
    }
    const Shape expected(tensor.shape.begin(), tensor.shape.end() - 1);
    const FolderTensor* const scales = partner(tensor, kBlocks, kScales);
    if (scales == nullptr || scales->dtype != "U8" || scales->shape != expected) {
      problems.push_back(fmt::format(
          "{} {}: its scales {} {}, expected U8 {}", place_of(tensor), to_string(tensor.shape),
          tensor.name.substr(0, tensor.name.size() - kBlocks.size()) + std::string(kScales),
          scales == nullptr ? "are missing" : fmt::format("are {} {}", scales->dtype, to_string(scales->shape)),
          to_string(expected)));
      continue;
    }
    FolderTensor joined = tensor;
    joined.dtype = "F32";
    joined.shape = {tensor.shape[0], tensor.shape[1], tensor.shape[2] * kMxfp4Group};
    joined.scale_file = scales->file;
    joined.scale = scales->stored;
    joined.mxfp4 = true;
    out.push_back(std::move(joined));
  }
  return out;
}

/// Of a folder whose config.json says nothing: names that only quantised weights have.
Status refuse_unsaid(const std::vector<FolderTensor>& tensors) {
  static constexpr std::pair<std::string_view, std::string_view> kTellTales[] = {
      {".qweight", "packed integers of GPTQ or AWQ"},
      {".weight_packed", "packed integers of compressed-tensors"},
      {".SCB", "integers of bitsandbytes, LLM.int8()"},
      {".weight.absmax", "four-bit numbers of bitsandbytes"}};
  Problems problems;
  for (const FolderTensor& tensor : tensors) {
    for (const auto& [suffix, what] : kTellTales) {
      if (!tensor.name.ends_with(suffix)) continue;
      return unsupported(fmt::format("{}: {} {} {}: {}, which cannot be read here, and config.json has no {}",
                                     tensor.file_name(), tensor.name, tensor.dtype, to_string(tensor.shape), what,
                                     kKey));
    }
    if (!is_fp8_dtype(tensor.dtype)) continue;
    problems.push_back(fmt::format("{}: config.json has no {} that says how it is scaled", place_of(tensor), kKey));
  }
  return refuse("weights of eight bits without usable scales", problems);
}

}  // namespace

Status join_quantised(const json& config, std::vector<FolderTensor>& tensors) {
  RT_TRY_SET(const std::optional<Scheme> scheme, scheme_of(config));
  if (!scheme) return refuse_unsaid(tensors);
  Problems problems;
  std::vector<FolderTensor> joined;
  if (scheme->mxfp4) {
    joined = join_mxfp4(tensors, problems);
  } else {
    ScaledWeights scaled(*scheme, tensors);
    joined = scaled.join();
    problems = scaled.problems();
  }
  RT_TRY(refuse(
      scheme->mxfp4 ? "weights of four bits without usable scales" : "weights of eight bits without usable scales",
      problems));
  tensors = std::move(joined);
  return {};
}

}  // namespace cairn::convert
