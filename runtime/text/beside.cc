#include "runtime/text/beside.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/json/json.h"
#include "runtime/text/json_fields.h"

namespace cairn::text {
namespace {

using nlohmann::json;

constexpr std::string_view kConfig = kBesideNames[0], kMap = kBesideNames[1], kAdded = kBesideNames[2];
constexpr const char* kNamed[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

/// Null: the file is missing.
Result<json> object_of(std::string_view text, std::string_view name) {
  return text.empty() ? Result<json>(json()) : parse_python_object(text).with(std::string(name));
}

Status check_characters(std::string_view name, const std::string& content) {
  if (!has_half_pair(content)) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("\"{}\" has half of a surrogate pair (\\ud800 to \\udfff), which is no character", name)};
}

/// A string, or an object with content and switches; nothing: null or of another type.
Result<std::optional<AddedToken>> token_of(const json& value, bool special) {
  AddedToken out;
  out.special = special;
  if (value.is_string()) {
    out.content = value.get<std::string>();
    RT_TRY(check_characters("content", out.content));
    return std::optional(out);
  }
  if (!value.is_object()) return std::optional<AddedToken>();
  RT_TRY_SET(out.content, string_field(value, "content"));
  RT_TRY(check_characters("content", out.content));
  RT_TRY_SET(out.single_word, bool_field(value, "single_word", false));
  RT_TRY_SET(out.lstrip, bool_field(value, "lstrip", false));
  RT_TRY_SET(out.rstrip, bool_field(value, "rstrip", false));
  RT_TRY_SET(out.special, bool_field(value, "special", special));
  RT_TRY_SET(out.normalized, bool_field(value, "normalized", !out.special));
  return std::optional(out);
}

/// A switch, also as a number, of which Python reads 0 as false.
Result<std::optional<bool>> switch_of(const json& config, const char* name) {
  const json& value = json_field(config, name);
  if (value.is_null()) return std::optional<bool>();
  if (value.is_boolean()) return std::optional(value.get<bool>());
  if (value.is_number()) return std::optional(value.get<double>() != 0);
  return bad_field(name, "true or false", value);
}

bool has(const std::vector<AddedToken>& tokens, std::string_view content) {
  return std::ranges::any_of(tokens, [&](const AddedToken& token) { return token.content == content; });
}

class Reader {
 public:
  Result<Beside> run(const BesideFiles& files) {
    RT_TRY_SET(const json config, object_of(files.config, kConfig));
    RT_TRY_SET(const json map, object_of(files.special_tokens_map, kMap));
    RT_TRY_SET(const json added, object_of(files.added_tokens, kAdded));
    RT_TRY(read_config(config).with(std::string(kConfig)));
    const bool decoder = config.is_object() && config.contains("added_tokens_decoder");
    if (!decoder) RT_TRY(read_map(map).with(std::string(kMap)));
    for (const char* name : kNamed) {
      if (named_.contains(name)) put(out_.named, named_.at(name));
    }
    for (const AddedToken& token : more_) put(out_.named, token);
    if (!decoder) RT_TRY(read_added(added).with(std::string(kAdded)));
    if (named_.contains("bos_token")) out_.bos = named_.at("bos_token").content;
    if (named_.contains("eos_token")) out_.eos = named_.at("eos_token").content;
    return std::move(out_);
  }

 private:
  static void put(std::vector<AddedToken>& list, const AddedToken& token) {
    if (!token.content.empty() && !has(list, token.content)) list.push_back(token);
  }

  Status read_names(const json& object) {
    for (const char* name : kNamed) {
      const auto found = object.find(name);
      if (found == object.end()) continue;
      RT_TRY_SET(const std::optional<AddedToken> token, token_of(*found, true).with(name));
      if (!token) continue;
      named_[name] = *token;
      named_[name].special = true;
    }
    return read_more(object, "additional_special_tokens");
  }

  Status read_more(const json& object, const char* name) {
    const auto found = object.find(name);
    if (found == object.end() || !(found->is_array() || found->is_object())) return {};
    for (const json& value : *found) {
      RT_TRY_SET(const std::optional<AddedToken> token, token_of(value, true).with(name));
      if (!token) continue;
      AddedToken special = *token;
      special.special = true;
      put(more_, special);
    }
    return {};
  }

  Status read_config(const json& config) {
    if (!config.is_object()) return {};
    out_.configured = true;
    const auto text = [&](const char* name) {
      const auto found = config.find(name);
      return found != config.end() && found->is_string() ? found->get<std::string>() : std::string();
    };
    out_.tokenizer_class = text("tokenizer_class");
    if (config.contains("backend") || out_.tokenizer_class == "TokenizersBackend") out_.line = 5;  // only 5 writes it
    if (out_.tokenizer_class.ends_with("Fast") && out_.tokenizer_class != "PreTrainedTokenizerFast") {
      out_.tokenizer_class.resize(out_.tokenizer_class.size() - 4);
    }
    RT_TRY_SET(out_.add_bos, switch_of(config, "add_bos_token"));
    RT_TRY_SET(out_.add_eos, switch_of(config, "add_eos_token"));
    RT_TRY_SET(out_.add_prefix_space, switch_of(config, "add_prefix_space"));
    RT_TRY_SET(out_.legacy, switch_of(config, "legacy"));
    RT_TRY_SET(const std::optional<bool> split, switch_of(config, "split_special_tokens"));
    out_.split_special = split.value_or(false);
    RT_TRY(read_names(config));
    RT_TRY(read_more(config, "extra_special_tokens"));
    const auto decoder = config.find("added_tokens_decoder");
    if (decoder == config.end() || !decoder->is_object()) return {};
    std::map<int64_t, AddedToken> by_id;
    for (const auto& [key, value] : decoder->items()) {
      int64_t id = -1;
      const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
      if (error != std::errc() || end != key.data() + key.size() || !value.is_object()) {
        return bad_field("added_tokens_decoder", "ids with objects that have \"content\"", json{{key, value}});
      }
      RT_TRY_SET(const std::optional<AddedToken> token, token_of(value, false).with("added_tokens_decoder"));
      by_id[id] = *token;
    }
    for (const auto& [id, token] : by_id) put(out_.listed, token);
    return {};
  }

  Status read_map(const json& map) { return map.is_object() ? read_names(map) : Status(); }

  Status read_added(const json& added) {
    if (!added.is_object()) return {};
    std::map<int64_t, std::string> by_id;
    for (const auto& [content, id] : added.items()) {
      const std::optional<int32_t> fits = token_id(id);
      if (!fits) return bad_field(content, "an id", id);
      RT_TRY(check_characters("a token", content));
      by_id[*fits] = content;
    }
    for (const auto& [id, content] : by_id) {
      const bool special = has(out_.named, content);
      put(out_.listed, {.content = content, .normalized = !special, .special = special});
    }
    return {};
  }

  Beside out_;
  std::map<std::string, AddedToken> named_;
  std::vector<AddedToken> more_;  // additional and extra ones
};

}  // namespace

std::optional<Beside::Around> Beside::around_by_class() const {
  if (!configured || line != 4) return std::nullopt;
  if (tokenizer_class == "GPTNeoXTokenizer") return Around{add_bos.value_or(false), add_eos.value_or(false)};
  for (const char* name : {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"}) {
    if (tokenizer_class == name) return Around{add_bos.value_or(true), add_eos.value_or(false)};
  }
  return std::nullopt;
}

std::string* BesideFiles::find(std::string_view name) {
  return name == kConfig ? &config : name == kMap ? &special_tokens_map : name == kAdded ? &added_tokens : nullptr;
}

Result<Beside> read_beside(const BesideFiles& files) { return Reader().run(files); }

}  // namespace cairn::text
