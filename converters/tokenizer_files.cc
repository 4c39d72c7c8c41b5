#include "converters/tokenizer_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "converters/foreign_file.h"
#include "converters/hf_folder.h"
#include "runtime/json/json.h"
#include "runtime/text/sentencepiece_json.h"
#include "runtime/text/tokenizer.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::string_view kJson = "tokenizer.json", kModel = "tokenizer.model";
constexpr std::string_view kSettings = "tokenizer_config.json", kMap = "special_tokens_map.json";
constexpr int64_t kMaxBytes = int64_t{256} << 20;
/// The class that both lines of transformers have for whatever a tokenizer.json says.
constexpr std::string_view kClass = "PreTrainedTokenizerFast", kClassOf5 = "TokenizersBackend";

/// The files that a tokenizer's file is used with.
bool goes_along(std::string_view name) {
  return name == kSettings || name == kMap || name == "added_tokens.json" || name == "chat_template.json" ||
         (name.ends_with(".jinja") && is_passed_file(name));
}

std::string text_of(const ordered_json& object, std::string_view key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  if (!object.is_object() || found == object.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  const auto content = found->is_object() ? found->find("content") : found->end();
  return found->is_object() && content != found->end() && content->is_string() ? content->get<std::string>() : "";
}

/// Takes a file that check_passed_file() has seen, or that is missing.
ordered_json object_of(const std::map<std::string, std::string>& files, std::string_view name) {
  const auto found = files.find(std::string(name));
  auto parsed = parse_ordered_json(found == files.end() ? "{}" : found->second, kMaxJsonDepth, JsonNumbers::kPython);
  return parsed.ok() && parsed.value().is_object() ? std::move(parsed).value() : ordered_json::object();
}

/// Settings that say how a tokenizer.json is used, where its own do not.
class Settings {
 public:
  explicit Settings(std::map<std::string, std::string>& files)
      : files_(files), object_(object_of(files, kSettings)), map_(object_of(files, kMap)) {}

  /// A special token by its role, "eos_token"; empty: none.
  std::string token(std::string_view role) const {
    const std::string own = text_of(object_, role);
    return own.empty() ? text_of(map_, role) : own;
  }
  void set(std::string_view key, const ordered_json& value) {
    if (object_.contains(key) && object_[key] == value) return;
    object_[key] = value;
    changed_ = true;
  }
  void set_token(std::string_view role, const std::string& token) {
    if (text_of(object_, role).empty() && !token.empty()) set(role, token);
  }
  /// A class that both lines have. `made`: the tokenizer.json is made here, and others build their own instead.
  void settle_class(bool made) {
    const std::string named = text_of(object_, "tokenizer_class");
    if (made || named.empty() || named == kClassOf5) set("tokenizer_class", kClass);
  }
  void write() {
    if (changed_) files_[std::string(kSettings)] = python_json_text(object_, 2) + "\n";
  }

 private:
  std::map<std::string, std::string>& files_;
  ordered_json object_, map_;
  bool changed_ = false;
};

constexpr std::string_view kRoles[] = {"bos_token", "eos_token", "unk_token", "pad_token"};

Status take_what_lies_beside(const fs::path& folder, std::map<std::string, std::string>& files) {
  const fs::path dir = folder.empty() ? fs::path(".") : folder;
  for (const std::string& name : passed_files_in(dir)) {
    if (!goes_along(name)) continue;
    RT_TRY(check_inside(dir, name));
    RT_TRY_SET(files[name], read_text_file(dir / name, kMaxBytes));
    RT_TRY(check_passed_file(name, files[name]).with(dir.string()));
  }
  return {};
}

/// The piece of SentencePiece that is a role's, by its name in tokenizer_config.json.
const text::SpecialPiece& piece_of(const text::SpecialPieces& special, std::string_view role) {
  return role == "bos_token"   ? special.bos
         : role == "eos_token" ? special.eos
         : role == "unk_token" ? special.unk
                               : special.pad;
}

}  // namespace

TokenizerConfig tokenizer_in(const fs::path& folder) {
  std::error_code error;
  // A link to nothing is refused where it is read: another file in its place would be another tokenizer.
  if (fs::exists(fs::symlink_status(folder / kJson, error)))
    return {TokenizerConfig::Kind::kHf, (folder / kJson).string()};
  if (is_plain_file(folder / kModel)) return {TokenizerConfig::Kind::kSentencePiece, (folder / kModel).string()};
  return {};
}

std::vector<fs::path> places_of(const fs::path& path, const fs::path& checkpoint) {
  if (path.is_absolute()) return {path};
  std::error_code error;
  std::vector<fs::path> out;
  for (fs::path above = fs::absolute(checkpoint, error); above.has_relative_path(); above = above.parent_path())
    out.push_back(above / path);
  out.push_back(path);
  return out;
}

std::string change_text(const text::TokenizerChange& change) {
  return fmt::format("its content is {}, and the run's lineage.jsonl has {}", change.now, change.then);
}

Result<FoundTokenizer> find_tokenizer(const TokenizerConfig& tokenizer, const fs::path& checkpoint,
                                      const text::TokenizerHashes& trained) {
  FoundTokenizer out{.tokenizer = tokenizer};
  if (tokenizer.path.empty()) return out;
  std::vector<text::TokenizerChange> changes;
  for (const fs::path& place : places_of(tokenizer.path, checkpoint)) {
    if (!is_plain_file(place)) continue;
    const TokenizerConfig here{tokenizer.kind, place.string()};
    RT_TRY_SET(const text::TokenizerHashes hashes, text::tokenizer_hashes(here));
    const std::vector<text::TokenizerChange> differs = text::tokenizer_changes(here.path, trained, hashes);
    if (out.hashes.file.empty() || differs.empty() || differs.size() < changes.size()) {
      out = {here, hashes};
      changes = differs;
    }
    if (differs.empty()) return out;
  }
  if (out.hashes.file.empty()) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{}: the recipe's tokenizer is missing in the working directory and in each folder above {}",
                    tokenizer.path, checkpoint.string())};
  }
  const text::TokenizerChange& first = changes[0];
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format("{}: is not the {} that the run was trained with: {}; {}", first.path,
                  first.path == out.tokenizer.path ? "tokenizer" : "file beside the tokenizer", change_text(first),
                  first.then == "missing" ? "move it away" : "put the file of the training back")};
}

Result<TokenizerFiles> tokenizer_files(const TokenizerConfig& tokenizer, int64_t context, int64_t document_end) {
  using Kind = TokenizerConfig::Kind;
  RT_TRY_SET(const std::unique_ptr<text::Tokenizer> read, text::make_tokenizer(tokenizer));
  TokenizerFiles out{.vocab = read->vocab()};
  text::SpecialPieces special;
  const fs::path path(tokenizer.path), folder = path.parent_path();
  if (tokenizer.kind == Kind::kBytes) {
    out.files[std::string(kJson)] = text::bytes_as_json();
  } else {
    RT_TRY(check_inside(folder.empty() ? fs::path(".") : folder, path.filename()));
    RT_TRY_SET(std::string content, read_text_file(path, kMaxBytes));
    RT_TRY(take_what_lies_beside(folder, out.files));
    if (tokenizer.kind == Kind::kSentencePiece) {
      RT_TRY_SET(special, text::special_pieces(content).with(tokenizer.path));
      const ordered_json own = object_of(out.files, kSettings);
      const auto wants = [&](const char* key) {
        return own.contains(key) && (own[key] == true || (own[key].is_number() && own[key] != 0));
      };
      Result<std::string> json =
          text::sentencepiece_as_json(content, {.bos = wants("add_bos_token"), .eos = wants("add_eos_token")});
      if (json.ok()) {
        out.files[std::string(kJson)] = std::move(json).value();
      } else {
        out.warnings.push_back(fmt::format(
            "{}: no tokenizer.json gives its ids: {}; tokenizer.model is exported, which AutoTokenizer may read "
            "otherwise: use it by the sentencepiece library",
            tokenizer.path, json.error().message));
      }
    }
    out.files[std::string(tokenizer.kind == Kind::kHf ? kJson : kModel)] = std::move(content);
  }
  const bool has_settings = out.files.contains(std::string(kSettings));
  Settings settings(out.files);
  if (out.files.contains(std::string(kJson))) settings.settle_class(tokenizer.kind != Kind::kHf);
  if (!has_settings) {
    settings.set("model_max_length", context);
    settings.set("clean_up_tokenization_spaces", false);
  }
  if (tokenizer.kind == Kind::kBytes) settings.set_token("eos_token", std::string(1, '\0'));
  for (const std::string_view role : kRoles) {
    settings.set_token(role, settings.token(role));
    if (tokenizer.kind == Kind::kSentencePiece) settings.set_token(role, piece_of(special, role).piece);
  }
  if (read->eod() >= 0) out.eos.push_back(read->eod());
  if (document_end >= 0 && document_end != read->eod()) {
    // The run's documents end so, whatever the tokenizer's files say.
    const int32_t id = static_cast<int32_t>(document_end);
    const Result<std::string> spelled = read->decode(std::span(&id, 1));
    const bool whole = spelled.ok() && read->find(spelled.value()) == id;
    if (out.eos.empty() && whole) settings.set_token("eos_token", spelled.value());
    out.eos.push_back(document_end);
  }
  if (out.eos.empty()) {
    out.warnings.push_back(
        fmt::format("{}: {}, so eos_token_id is null and no text ends by itself; name the eos_token there, or "
                    "objective.document_end in the recipe",
                    tokenizer.path, read->why_no_eod()));
  }
  const auto id_of = [&](std::string_view role) {
    const std::string token = settings.token(role);
    return token.empty() ? int64_t{-1} : int64_t{read->find(token).value_or(-1)};
  };
  out.bos = id_of("bos_token");
  out.pad = id_of("pad_token");
  settings.write();
  return out;
}

}  // namespace cairn::convert
