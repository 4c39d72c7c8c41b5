#include "converters/family.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "converters/config_keys.h"
#include "converters/family_table.h"
#include "converters/mechanisms.h"
#include "converters/model_compare.h"
#include "converters/weights_folder.h"
#include "runtime/plan/model_check.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {

// One function for each file in families/, from CMake's listing of that folder: a list that is compiled in cannot lose
// a member to a linker that drops unreferenced objects of static libraries, and its order is fixed.
#define CAIRN_FAMILY(name) Family name##_family();
#include <hf_families.inc>
#undef CAIRN_FAMILY

namespace {

using nlohmann::json;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

Status check_sizes(const ModelConfig& m) {
  for (const auto& [field, name, most] : kSizeBounds) {  // of those that were derived from others, too
    if (m.*field < 1 || m.*field > most)
      return invalid(fmt::format("{} = {} is out of range, 1 to {}", name, m.*field, most));
  }
  if (m.heads % m.kv_heads != 0) {
    return invalid(fmt::format("{} key/value heads do not divide {} heads", m.kv_heads, m.heads));
  }
  if (m.positions == Positions::kRotary && rotary_dims(m) % 2 != 0) {
    return invalid(fmt::format("{} = {} is odd: rotary positions need pairs",
                               m.rope.dims > 0 ? "the number of rotary channels" : "head_dim", rotary_dims(m)));
  }
  return {};
}

/// The bounds that the recipe has for numbers of any key, which a checkpoint of the model would break. `key`: the one
/// that was just read.
Status check_numbers(const ModelConfig& m, std::string_view key) {
  const auto refuse = [&](double value, std::string_view bounds) {
    return unsupported(fmt::format("{} = {} must be {}", key, value, bounds));
  };
  if (!(m.norm_eps > 0 && m.norm_eps <= 1)) return refuse(m.norm_eps, "above 0 and at most 1");
  if (m.positions == Positions::kRotary && !(m.rope_theta > 0)) return refuse(m.rope_theta, "above 0");
  return {};
}

Result<ModelConfig> read_config(const Family& family, const json& config, std::vector<std::string>* notes = nullptr) {
  ConfigReader reader(config);
  ModelConfig model = family.base();
  for (const ConfigKey& key : family.keys) {
    if (!key.read) continue;
    key.read(reader, model);
    if (reader.status().ok()) RT_TRY(check_numbers(model, key.names.empty() ? "it" : key.names.front()));
  }
  RT_TRY(reader.status());
  if (notes != nullptr) *notes = reader.notes();
  RT_TRY(refuse_unread_keys(family, model, config));
  RT_TRY(check_sizes(model));
  return canonical(model);
}

nlohmann::ordered_json write_config(const Family& family, const ModelConfig& model) {
  nlohmann::ordered_json out;
  out["architectures"] = {family.architecture};
  out["model_type"] = family.model_type;
  for (const ConfigKey& key : family.keys) {
    if (key.write) key.write(model, out);
  }
  return out;
}

/// What of the model the family's config.json cannot say; empty when it can say all.
Result<std::vector<std::string>> what_is_lost(const Family& family, const ModelConfig& model) {
  RT_TRY_SET(const ModelConfig again, read_config(family, json(write_config(family, model))));
  return differing_fields(again, canonical(model));
}

// --- names ----------------------------------------------------------------------------------------------------------

/// Cuts a name at its dots.
std::vector<std::string_view> parts_of(std::string_view name) {
  std::vector<std::string_view> out;
  for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
    out.push_back(name.substr(0, dot));
    name.remove_prefix(dot + 1);
  }
  out.push_back(name);
  return out;
}

/// "{q,k,v}" -> q, k, v; anything else is its own only alternative.
std::vector<std::string_view> alternatives_of(std::string_view part) {
  if (!part.starts_with('{')) return {part};
  std::vector<std::string_view> out;
  part = part.substr(1, part.size() - 2);
  for (size_t comma = part.find(','); comma != std::string_view::npos; comma = part.find(',')) {
    out.push_back(part.substr(0, comma));
    part.remove_prefix(comma + 1);
  }
  out.push_back(part);
  return out;
}

struct Match {
  std::vector<std::string_view> stars;
  size_t alternative = 0;
  std::string_view member;  // what `#` stands for; empty: the pattern has none
};

std::optional<Match> match(std::string_view pattern, std::string_view name) {
  const std::vector<std::string_view> wanted = parts_of(pattern), found = parts_of(name);
  if (wanted.size() != found.size()) return std::nullopt;
  Match out;
  for (size_t k = 0; k < wanted.size(); ++k) {
    if (wanted[k] == "*") {
      out.stars.push_back(found[k]);
      continue;
    }
    if (wanted[k] == "#") {
      out.member = found[k];
      continue;
    }
    const std::vector<std::string_view> alternatives = alternatives_of(wanted[k]);
    const auto at = std::ranges::find(alternatives, found[k]);
    if (at == alternatives.end()) return std::nullopt;
    if (alternatives.size() > 1) out.alternative = static_cast<size_t>(at - alternatives.begin());
  }
  return out;
}

/// The pattern with its stars and its `#` replaced, and its braces by one of their alternatives.
std::string fill(std::string_view pattern, const Match& by, size_t alternative = 0) {
  std::string out;
  size_t star = 0;
  for (const std::string_view part : parts_of(pattern)) {
    if (!out.empty()) out += '.';
    if (part == "*") {
      RT_CHECK(star < by.stars.size(), "{} has more stars than its logical name", pattern);
      out += by.stars[star++];
    } else if (part == "#") {
      out += by.member;
    } else {
      out += alternatives_of(part)[part.starts_with('{') ? alternative : 0];
    }
  }
  return out;
}

size_t alternative_count(std::string_view pattern) {
  size_t out = 1;
  for (const std::string_view part : parts_of(pattern)) out = std::max(out, alternatives_of(part).size());
  return out;
}

int64_t groups_of(Fuse fuse, const ModelConfig& model) {
  switch (fuse) {
    case Fuse::kBlocks:
      return 1;
    case Fuse::kPerKvHead:
      return model.kv_heads;
    case Fuse::kFourBlocks:
      return 4;
    case Fuse::kInterleaved:
      return 0;  // as many as rows
  }
  return 1;
}

std::vector<Mapping> by_rows(const TensorRow& row, Match found, const Shape& shape) {
  RT_CHECK(shape.size() == 2, "rows of {} are no vectors", row.logical);
  std::vector<Mapping> out;
  for (int64_t k = 0; k < shape[0]; ++k) {
    const std::string number = fmt::format("{}", k);
    found.member = number;
    out.push_back({.stored = fill(row.stored, found), .shape = {shape[1]}, .only_row = k});
  }
  return out;
}

/// By the first row that fits; nothing when none does.
std::vector<Mapping> map_tensor(std::span<const TensorRow> rows, const ModelConfig& model,
                                const std::map<std::string, Shape>& shapes, const std::string& logical) {
  for (const TensorRow& row : rows) {
    if (row.when != nullptr && !row.when(model)) continue;
    const std::optional<Match> found = match(row.logical, logical);
    if (!found) continue;
    const size_t members = alternative_count(row.logical);
    bool all = true;  // a model without a gate has another row for what it has
    for (size_t k = 0; k < members; ++k) all &= shapes.contains(fill(row.logical, *found, k));
    if (!all) continue;
    const Shape& shape = shapes.at(logical);
    RT_CHECK(!row.one_row || shape.size() == 1, "{} is no vector", logical);
    if (found->member.empty() && row.stored.find('#') != std::string_view::npos) return by_rows(row, *found, shape);
    Mapping out{.logical = logical, .stored = fill(row.stored, *found), .shape = shape};
    out.transpose = row.transpose && shape.size() == 2;
    if (members > 1) {
      int64_t groups = groups_of(row.fuse, model);
      if (groups == 0) groups = shape[0];
      int64_t total = 0;
      for (size_t k = 0; k < members; ++k) {
        const Shape& sibling = shapes.at(fill(row.logical, *found, k));
        RT_CHECK(sibling[0] % groups == 0, "{}: {} rows in {} groups", logical, sibling[0], groups);
        if (k < found->alternative) out.first += sibling[0] / groups;
        total += sibling[0];
      }
      out.shape[0] = total;
      if (groups > 1) {
        out.run = shape[0] / groups;
        out.stride = total / groups;
      }
    }
    if (!found->member.empty()) {  // rows of a matrix of all experts' rows
      int64_t member = -1;
      const char* const end = found->member.data() + found->member.size();
      RT_CHECK(std::from_chars(found->member.data(), end, member).ptr == end, "{} cannot be in a stack", logical);
      if (shape.size() == 1) {
        out.transpose = true;  // a matrix of one column each: what is stored are rows of the stack
        out.line = member;
      } else if (out.transpose) {
        out.line = member * shape[1];
        std::swap(out.shape[0], out.shape[1]);
      } else {
        out.first += member * out.shape[0];
      }
      out.shape.insert(out.shape.begin(), model.moe.experts);
    } else if (out.transpose) {
      std::swap(out.shape[0], out.shape[1]);
    }
    if (row.one_row) out.shape.insert(out.shape.begin(), 1);
    return {std::move(out)};
  }
  return {};
}

/// The name by which tables know a tensor: what predicts further tokens is stored as the layers behind the model's.
std::string table_name(const std::string& logical, const ModelConfig& model) {
  for (int64_t k = 0; k < model.mtp.depth; ++k) {
    const std::string prefix = layer_prefix(model, model.layers + k);
    if (logical.starts_with(prefix))
      return fmt::format("layers.{}.{}", model.layers + k, logical.substr(prefix.size()));
  }
  return logical;
}

std::map<std::string, Shape> shapes_of(const std::vector<TensorSpec>& tensors, const ModelConfig& model) {
  std::map<std::string, Shape> out;
  for (const TensorSpec& tensor : tensors) out[table_name(tensor.name, model)] = tensor.shape;
  return out;
}

/// map_tensor() of each tensor of the model.
std::vector<std::vector<Mapping>> map_tensors(std::span<const TensorRow> rows, const ModelConfig& model) {
  const std::vector<TensorSpec> tensors = model_tensors(model);
  const std::map<std::string, Shape> shapes = shapes_of(tensors, model);
  std::vector<std::vector<Mapping>> out;
  out.reserve(tensors.size());
  for (const TensorSpec& tensor : tensors) {
    std::vector<Mapping>& made = out.emplace_back(map_tensor(rows, model, shapes, table_name(tensor.name, model)));
    for (Mapping& mapping : made) {
      mapping.logical = tensor.name;
      mapping.tensor = std::ssize(out) - 1;
    }
  }
  return out;
}

}  // namespace

const std::vector<Family>& families() {
  static const std::vector<Family> kFamilies = {
#define CAIRN_FAMILY(name) name##_family(),
#include <hf_families.inc>
#undef CAIRN_FAMILY
  };
  return kFamilies;
}

Result<Family> find_family(std::string_view model_type) {
  std::string known;
  for (const Family& family : families()) {
    if (family.model_type == model_type) return family;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", family.model_type);
  }
  return unsupported(fmt::format("model_type \"{}\" is not known; known: {}", model_type, known));
}

Result<Family> family_for(const ModelConfig& model, std::string_view preferred) {
  std::vector<const Family*> candidates;
  for (const bool own_code : {false, true}) {
    for (const bool last : {false, true}) {
      for (const Family& family : families()) {
        if (family.architecture.empty() || family.own_code != own_code || family.last_choice != last) continue;
        const bool first = family.model_type == preferred && !own_code;
        candidates.insert(first ? candidates.begin() : candidates.end(), &family);
      }
    }
  }
  const Family* nearest = nullptr;
  std::vector<std::string> lost;
  for (const Family* family : candidates) {
    const Result<std::vector<std::string>> missing = what_is_lost(*family, model);
    if (!missing.ok()) continue;  // for example heads that this class cannot divide
    if (missing.value().empty()) return *family;
    if (nearest == nullptr || missing.value().size() < lost.size()) {
      nearest = family;
      lost = missing.value();
    }
  }
  if (nearest == nullptr) return unsupported("no Hugging Face family holds this model");
  return unsupported(fmt::format("no Hugging Face family holds this model; {} is the nearest and has no place for {}",
                                 nearest->model_type, fmt::join(lost, "; ")));
}

std::string own_code_warning(const Family& family) {
  return fmt::format("transformers has no class {}: who opens this folder needs the model's own code beside it",
                     family.architecture);
}

Result<ModelConfig> model_from_config(const json& config, std::vector<std::string>* notes) {
  if (!config.is_object()) return invalid("it is no JSON object");
  if (!config.contains("model_type") || !config["model_type"].is_string()) {
    return invalid("\"model_type\" is missing or no string: it selects the family");
  }
  Result<Family> family = find_family(config["model_type"].get<std::string>());
  if (!family.ok()) {
    const std::vector<std::string> missing = missing_mechanisms(config);
    if (missing.empty()) return std::move(family).error();
    return unsupported(fmt::format("it needs {}, which this build does not compute; {}", fmt::join(missing, ", "),
                                   family.error().message));
  }
  return read_config(family.value(), config, notes);
}

nlohmann::ordered_json config_from_model(const Family& family, const ModelConfig& model, DType weights,
                                         const json& original) {
  nlohmann::ordered_json out = write_config(family, model);
  // Token ids are the tokenizer's business; null keeps transformers from assuming its own defaults.
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) out[key] = nullptr;
  out["use_cache"] = true;
  out["torch_dtype"] = weights == DType::kBf16 ? "bfloat16" : weights == DType::kF16 ? "float16" : "float32";
  if (!original.is_object() || !original.contains("model_type") || original["model_type"] != family.model_type)
    return out;
  const ModelConfig wanted = canonical(model);
  const auto is_same = [&](const nlohmann::ordered_json& changed) {
    const Result<ModelConfig> again = read_config(family, json(changed));
    return again.ok() && differing_fields(again.value(), wanted).empty();
  };
  std::vector<std::pair<std::string, json>> others;  // spellings of the source
  for (const ConfigKey& key : family.keys) {
    for (const std::string_view name : key.names) {
      const auto value = original.find(name);
      if (value == original.end() || !(key.may_keep ? key.may_keep(name, *value) : !value->is_null())) continue;
      std::string place(name);
      if (value->is_string() && !out.contains(name)) {  // under another name of the key
        const auto written = std::ranges::find_if(key.names, [&](auto other) { return out.contains(other); });
        if (written != key.names.end() && out[*written].is_string()) place = *written;
      }
      // A null head_dim breaks some classes of transformers, which take it as it is. A number stays, for other readers.
      const bool has_place = name == "head_dim" ? value->is_number_integer() : out.contains(place);
      if (has_place && (!out.contains(place) || out[place] != *value)) others.emplace_back(place, *value);
    }
  }
  // All of them, since some mean a thing between them; else those that by themselves say the same model.
  nlohmann::ordered_json all = out;
  for (const auto& [place, value] : others) all[place] = value;
  if (is_same(all)) return all;
  for (const auto& [place, value] : others) {
    nlohmann::ordered_json changed = out;
    changed[place] = value;
    if (is_same(changed)) out = std::move(changed);
  }
  return out;
}

WrittenFor written_for(const Family& family, const ModelConfig& model) {
  constexpr std::string_view kFour = "4.57.6", kFive = "5.24.0";  // that fixtures were tried with, docs/converters.md
  if (family.since_5) return {kFive, ""};
  const std::string otherwise = family.beyond_4 != nullptr ? family.beyond_4(canonical(model)) : "";
  if (otherwise.empty()) return {kFour, ""};
  return {kFive, fmt::format("the folder is for transformers 5: {}", otherwise)};
}

std::vector<Mapping> tensor_map(const Family& family, const ModelConfig& model) {
  const std::vector<TensorSpec> tensors = model_tensors(model);
  std::vector<Mapping> out;
  out.reserve(tensors.size());
  std::vector<std::vector<Mapping>> made = map_tensors(family.tensors, model);
  for (size_t k = 0; k < made.size(); ++k) {
    RT_CHECK(!made[k].empty(), "the table of {} has no row for {}", family.model_type, tensors[k].name);
    std::ranges::move(made[k], std::back_inserter(out));
  }
  return out;
}

std::vector<std::optional<Mapping>> other_map(const Family& family, const ModelConfig& model) {
  std::vector<std::optional<Mapping>> out;
  for (std::vector<Mapping>& made : map_tensors(family.also, model)) {
    RT_CHECK(made.size() <= 1, "{} has rows of {} by another name", family.model_type, made.front().logical);
    out.push_back(made.empty() ? std::nullopt : std::optional(std::move(made.front())));
  }
  return out;
}

std::vector<RowRun> row_runs(const Mapping& mapping, const Shape& logical) {
  const int64_t rows = row_count(logical);
  if (mapping.only_row >= 0) return {{mapping.only_row, 0, 1}};
  if (mapping.run == 0) return {{0, mapping.first, rows}};
  if (mapping.run == 1) return {{0, mapping.first, rows, mapping.stride}};
  std::vector<RowRun> out;
  for (int64_t row = 0; row < rows; row += mapping.run) {
    out.push_back({row, mapping.first + row / mapping.run * mapping.stride, mapping.run});
  }
  return out;
}

std::string head_name(const Family& family) {
  for (const TensorRow& row : family.tensors) {
    if (row.logical == "head.weight" || row.logical == "head.*") return fill(row.stored, {.stars = {"weight"}});
  }
  RT_CHECK(false, "the table of {} has no row for the head", family.model_type);
}

bool is_wrapper(std::string_view part) {
  static constexpr std::string_view kWrappers[] = {
      "_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "app", "pretrained_model"};
  return std::ranges::find(kWrappers, part) != std::end(kWrappers);
}

std::string without_wrappers(std::string_view stored) {
  std::string out;
  for (const std::string_view part : parts_of(stored)) {
    if (!is_wrapper(part)) out += fmt::format("{}{}", out.empty() ? "" : ".", part);
  }
  return out;
}

std::string known_name(const Family& family, const std::set<std::string>& known, std::string_view stored) {
  if (known.contains(std::string(stored))) return std::string(stored);
  std::string name = without_wrappers(stored);
  while (true) {
    if (known.contains(name)) return name;
    for (const std::string_view prefix : {family.prefix, std::string_view("model.")}) {  // of other names
      if (const std::string added = std::string(prefix) + name; known.contains(added)) return added;
    }
    const size_t dot = name.find('.');
    const std::string_view first = std::string_view(name).substr(0, dot);
    // A class of its own around the model, and the backbone's prefix where a tensor has none.
    if (dot == std::string::npos || (first != "model" && std::string(first) + "." != family.prefix)) break;
    name = name.substr(dot + 1);
  }
  if (without_wrappers(stored).ends_with("lm_head.weight") && known.contains(head_name(family)))
    return head_name(family);
  return {};
}

int64_t later_layer(const Family& family, const ModelConfig& model, std::string_view stored) {
  if (family.later_layers.empty() || !stored.starts_with(family.later_layers)) return -1;
  stored.remove_prefix(family.later_layers.size());
  int64_t layer = -1;
  const auto [end, error] = std::from_chars(stored.data(), stored.data() + stored.size(), layer);
  const bool whole = error == std::errc() && end != stored.data() + stored.size() && *end == '.';
  return whole && layer >= model.layers ? layer - model.layers : -1;
}

bool is_passed_over(const Family& family, std::string_view stored) {
  return !family.passed_over.empty() && stored.find(family.passed_over) != std::string_view::npos;
}

bool is_ignored_tensor(const Family& family, std::string_view original) {
  const std::string plain = without_wrappers(original);
  std::string_view stored = plain;
  while (stored.starts_with("model.model.")) stored.remove_prefix(6);
  // Tables of rotary frequencies are computed from the configuration, wherever a release kept them.
  if (stored.ends_with("rotary_emb.inv_freq") || stored.ends_with("rotary_emb.original_inv_freq")) return true;
  // Whole names only: ".attn.bias" is a mask here and a projection's bias elsewhere. With or without the prefix.
  return std::ranges::any_of(family.ignored, [&](std::string_view pattern) {
    return match(pattern, stored) ||
           (pattern.starts_with(family.prefix) && match(pattern.substr(family.prefix.size()), stored));
  });
}

}  // namespace cairn::convert
