// A Hugging Face tokenizer.json as a pipeline: added tokens are cut out, the rest is normalized, cut again by the added
// tokens that are looked for in normalized text, cut into pieces, and each piece given to the model.
// Source: huggingface/tokenizers, src/tokenizer/mod.rs and src/processors. Truncation and padding are not applied.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "runtime/json/json.h"
#include "runtime/text/added_tokens.h"
#include "runtime/text/beside.h"
#include "runtime/text/decoder.h"
#include "runtime/text/json_fields.h"
#include "runtime/text/normalizer.h"
#include "runtime/text/places.h"
#include "runtime/text/pre_tokenizer.h"
#include "runtime/text/subword_model.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

using nlohmann::json;

constexpr size_t kRememberedPieces = size_t{1} << 16;
constexpr size_t kRememberedBytes = 64;  // longer pieces rarely come again

/// ids around a text, as the post-processor says.
struct Around {
  std::vector<int32_t> before, after;
};

Result<std::vector<int32_t>> template_ids(const json& spec, const std::string& name) {
  const auto pointer = json::json_pointer("/special_tokens") / name / "ids";
  if (!spec.contains(pointer) || !spec[pointer].is_array()) {
    return Error{ErrorCode::kInvalidInput, fmt::format("the template names {}, which special_tokens lacks", name)};
  }
  std::vector<int32_t> out;
  for (const json& id : spec[pointer]) {
    const std::optional<int32_t> fits = token_id(id);
    if (!fits) return bad_field("ids", "a list of ids", spec[pointer]);
    out.push_back(*fits);
  }
  return out;
}

Result<int32_t> pair_id(const json& spec, std::string_view name) {  // ["</s>", 2]
  const auto found = spec.find(name);
  const bool pair = found != spec.end() && found->is_array() && found->size() == 2;
  const std::optional<int32_t> id = pair ? token_id((*found)[1]) : std::nullopt;
  if (!id) return bad_field(name, "[token, id]", found == spec.end() ? json() : *found);
  return *id;
}

Status add_post_processor(const json& spec, Around* out) {
  if (spec.is_null()) return {};
  RT_TRY_SET(const std::string type, type_of(spec, "post_processor"));
  if (type == "ByteLevel") return {};  // offsets only
  if (type == "Sequence") {
    const auto list = spec.find("processors");
    if (list == spec.end() || !list->is_array()) return bad_field("processors", "a list", spec);
    for (const json& step : *list) RT_TRY(add_post_processor(step, out));
    return {};
  }
  if (type == "BertProcessing" || type == "RobertaProcessing") {
    RT_TRY_SET(const int32_t first, pair_id(spec, "cls"));
    RT_TRY_SET(const int32_t last, pair_id(spec, "sep"));
    out->before.insert(out->before.begin(), first);
    out->after.push_back(last);
    return {};
  }
  if (type == "TemplateProcessing") {
    const auto single = spec.find("single");
    if (single == spec.end() || !single->is_array()) return bad_field("single", "a list", spec);
    Around added;
    bool text_seen = false;
    for (const json& item : *single) {
      if (item.is_object() && item.contains("Sequence") && !text_seen) {
        text_seen = true;
        continue;
      }
      if (!item.is_object() || !item.contains("SpecialToken")) {
        return bad_field("single", "special tokens around one sequence", *single);
      }
      RT_TRY_SET(const std::string name, string_field(item["SpecialToken"], "id"));
      RT_TRY_SET(const std::vector<int32_t> ids, template_ids(spec, name));
      std::vector<int32_t>& side = text_seen ? added.after : added.before;
      side.insert(side.end(), ids.begin(), ids.end());
    }
    if (!text_seen) return bad_field("single", "special tokens around one sequence", *single);
    out->before.insert(out->before.begin(), added.before.begin(), added.before.end());
    out->after.insert(out->after.end(), added.after.begin(), added.after.end());
    return {};
  }
  return Error{ErrorCode::kUnsupported,
               fmt::format("the type {} is not read here; known are BertProcessing, ByteLevel, RobertaProcessing, "
                           "Sequence, TemplateProcessing",
                           type)};
}

constexpr std::string_view kConfigFile = "tokenizer_config.json", kMapFile = "special_tokens_map.json";

class HfTokenizer final : public Tokenizer {
 public:
  Status load(std::string_view text, const BesideFiles& files) {
    if (const int64_t bad = find_invalid_utf8(text); bad >= 0) {
      return Error{ErrorCode::kInvalidInput, fmt::format("byte {}: is not UTF-8", bad)};
    }
    Result<json> parsed = parse_json(text);
    if (!parsed.ok()) return Error{ErrorCode::kInvalidInput, parsed.error().message};
    json spec = std::move(parsed).value();
    if (!spec.is_object() || !spec.contains("model")) {
      return Error{ErrorCode::kInvalidInput, "not a tokenizer.json: expected a JSON object with \"model\""};
    }
    RT_TRY_SET(const Beside beside, read_beside(files));
    set_prefix_space(beside, &spec);
    const auto part = [&](const char* name) { return spec.contains(name) ? spec[name] : json(); };
    RT_TRY_SET(model_, make_subword_model(spec["model"]));
    RT_TRY_SET(normalizer_, Normalizer::make(part("normalizer")));
    RT_TRY_SET(pre_tokenizer_, PreTokenizer::make(part("pre_tokenizer")));
    RT_TRY(add_post_processor(part("post_processor"), &around_).with("post_processor"));
    RT_TRY_SET(decoder_, Decoder::make(part("decoder")));
    for (const auto& [token, id] : model_->vocabulary()) RT_TRY(name(id, token));
    std::vector<AddedToken> added;
    RT_TRY(read_added(part("added_tokens"), &added));
    own_vocab_ = vocab();
    RT_TRY(add_beside(beside, &added));
    RT_TRY(look_for(added, beside.split_special));
    set_around(beside);
    for (const std::vector<int32_t>& side : {around_.before, around_.after}) {
      for (const int32_t id : side) {
        if (!has(id)) return Error{ErrorCode::kInvalidInput, fmt::format("post_processor: no token has the id {}", id)};
      }
    }
    // A name that nothing else knows has an id in transformers; a model was hardly trained on it.
    const bool known = model_->vocabulary().find(beside.eos) != model_->vocabulary().end() ||
                       std::ranges::find(beside.listed, beside.eos, &AddedToken::content) != beside.listed.end();
    const std::optional<int32_t> eos = beside.eos.empty() ? std::nullopt : find(beside.eos);
    if (eos && (known || *eos < own_vocab_)) eod_ = *eos;
    for (const auto& [file, said] :
         {std::pair(kConfigFile, &files.config), std::pair(kMapFile, &files.special_tokens_map)}) {
      const bool names = eos && said->find(beside.eos) != said->npos;
      why_no_eod_ += fmt::format("{}{}", why_no_eod_.empty() ? "" : ", ", file);
      why_no_eod_ += names ? fmt::format(" names the eos_token \"{}\", which is no token of the vocabulary", beside.eos)
                     : said->empty() ? " beside it is missing or empty"
                                     : " names no eos_token";
    }
    return {};
  }

  int64_t vocab() const override { return static_cast<int64_t>(tokens_.size()); }
  int64_t own_vocab() const override { return own_vocab_; }
  std::vector<std::string> notes() const override { return notes_; }
  int32_t eod() const override { return eod_; }
  std::string why_no_eod() const override { return why_no_eod_; }
  std::vector<int32_t> before() const override { return around_.before; }
  std::vector<int32_t> after() const override { return around_.after; }

  Status encode(std::string_view text, std::vector<int32_t>* ids) const override { return encode_part(text, {}, ids); }

  Status encode_part(std::string_view text, Part whole, std::vector<int32_t>* ids) const override {
    RT_TRY(encode_all(text, whole, {}, {}, ids));
    return {};
  }

  Result<std::vector<Place>> encode_joined(std::string_view text, std::span<const size_t> bytes,
                                           std::span<const ByteRange> plain, std::vector<int32_t>* ids) const override {
    return encode_all(text, {}, bytes, plain, ids);
  }

  Result<std::string> special_within(std::string_view text) const override {
    if (const std::string_view found = raw_added_.special_within(text); !found.empty()) return std::string(found);
    if (normalized_added_.empty()) return std::string();
    RT_TRY_SET(const std::string normal, normalizer_.apply(text));
    return std::string(normalized_added_.special_within(normal));
  }

  bool special(int32_t id) const override { return has(id) && tokens_[id].special; }

  bool has(int32_t id) const override { return Tokenizer::has(id) && tokens_[id].known; }

  Result<std::string> decode(std::span<const int32_t> ids, Specials specials) const override {
    std::vector<std::string> tokens;
    tokens.reserve(ids.size());
    for (const int32_t id : ids) {
      if (!has(id)) {
        return Error{ErrorCode::kInvalidInput,
                     fmt::format("no token has the id {}; the tokenizer's are within 0 to {}", id, vocab() - 1)};
      }
      if (specials == Specials::kKeep || !tokens_[id].special) tokens.push_back(tokens_[id].text);
    }
    return decoder_.apply(std::move(tokens));
  }

  std::optional<int32_t> find(std::string_view token) const override {
    if (const auto found = added_.find(token); found != added_.end()) return found->second;
    const auto found = model_->vocabulary().find(token);
    return found == model_->vocabulary().end() ? std::nullopt : std::optional<int32_t>(found->second);
  }

 private:
  struct Named {
    std::string text;
    bool known = false, special = false;
  };
  using Remembered = std::unordered_map<std::string, std::vector<int32_t>>;

  Result<std::vector<Place>> encode_all(std::string_view text, Part whole, std::span<const size_t> bytes,
                                        std::span<const ByteRange> plain, std::vector<int32_t>* ids) const {
    if (const int64_t bad = find_invalid_utf8(text); bad >= 0) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("byte {}: 0x{:02x} is not UTF-8 here; convert the text or use the bytes tokenizer", bad,
                               static_cast<unsigned char>(text[static_cast<size_t>(bad)]))};
    }
    Remembered remembered;
    const auto between = [&](size_t begin, size_t end, std::vector<int32_t>* out) {
      return encode_between(text, {begin, end}, whole, &remembered, out);
    };
    return encode_with_places(*this, raw_added_.split(text, plain), bytes, between, ids);
  }

  /// Text without raw tokens.
  Status encode_between(std::string_view text, ByteRange range, Part whole, Remembered* remembered,
                        std::vector<int32_t>* ids) const {
    const bool begins = range.begin == 0;
    const Part ends{.first = whole.first || !begins, .last = whole.last || range.end < text.size()};
    RT_TRY_SET(const std::string normal, normalizer_.apply(text.substr(range.begin, range.end - range.begin), ends));
    for (const TextPart& inner : normalized_added_.split(normal)) {
      if (inner.id >= 0) {
        ids->push_back(inner.id);
        continue;
      }
      RT_TRY_SET(const std::vector<Piece> pieces,
                 pre_tokenizer_.apply({.text = normal.substr(inner.begin, inner.end - inner.begin),
                                       .at_start = whole.first && begins && inner.begin == 0,
                                       .goes_on = !whole.first && begins && inner.begin == 0}));
      for (const Piece& piece : pieces) encode_piece(piece.text, remembered, ids);
    }
    return {};
  }

  Status name(int32_t id, const std::string& token) {
    constexpr int32_t kMostIds = 1 << 24;
    if (id < 0 || id >= kMostIds) {
      return Error{ErrorCode::kInvalidInput, fmt::format("the token \"{}\" has the id {}", token, id)};
    }
    if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
    tokens_[id].text = token;
    tokens_[id].known = true;
    return {};
  }

  Status read_added(const json& list, std::vector<AddedToken>* out) {
    if (list.is_null()) return {};
    if (!list.is_array()) return bad_field("added_tokens", "a list", list);
    for (const json& entry : list) {
      AddedToken token;
      const std::optional<int32_t> id =
          entry.is_object() && entry.contains("id") ? token_id(entry["id"]) : std::nullopt;
      if (!id) return bad_field("added_tokens", "objects with \"id\" and \"content\"", entry);
      token.id = *id;
      RT_TRY_SET(token.content, string_field(entry, "content"));
      RT_TRY_SET(token.single_word, bool_field(entry, "single_word", false));
      RT_TRY_SET(token.lstrip, bool_field(entry, "lstrip", false));
      RT_TRY_SET(token.rstrip, bool_field(entry, "rstrip", false));
      RT_TRY_SET(token.special, bool_field(entry, "special", false));
      RT_TRY_SET(token.normalized, bool_field(entry, "normalized", !token.special));
      const auto in_model = model_->vocabulary().find(token.content);
      if (in_model != model_->vocabulary().end() && in_model->second != token.id) {
        return Error{ErrorCode::kInvalidInput, fmt::format("added_tokens: \"{}\" has the id {}, in the vocabulary {}",
                                                           token.content, token.id, in_model->second)};
      }
      RT_TRY(name(token.id, token.content).with("added_tokens"));
      added_.emplace(token.content, token.id);
      out->push_back(std::move(token));
    }
    return {};
  }

  /// Tokens of the files beside: with the ids that they have, else the next ones. A listed one has the say on switches.
  Status add_beside(const Beside& beside, std::vector<AddedToken>* tokens) {
    const auto known = static_cast<int64_t>(model_->vocabulary().size());
    int64_t next = known;
    for (const AddedToken& token : *tokens) next = std::max<int64_t>(next, token.id + 1);
    const auto place = [&](const AddedToken& wanted) {
      return std::ranges::find(*tokens, wanted.content, &AddedToken::content);
    };
    const auto add = [&](AddedToken token) -> Status {
      const std::optional<int32_t> id = find(token.content);
      token.id = id ? *id : static_cast<int32_t>(next++);
      RT_TRY(name(token.id, token.content).with(std::string(kConfigFile)));
      added_.emplace(token.content, token.id);
      if (const auto found = place(token); found != tokens->end()) {
        *found = std::move(token);
      } else {
        tokens->push_back(std::move(token));
      }
      return {};
    };
    for (AddedToken token : beside.listed) {
      const auto is_it = [&](const AddedToken& named) { return named.content == token.content; };
      token.special = token.special || std::ranges::any_of(beside.named, is_it);
      RT_TRY(add(std::move(token)));
    }
    for (const AddedToken& token : beside.named) {
      if (place(token) == tokens->end()) RT_TRY(add(token));
    }
    return {};
  }

  Status look_for(const std::vector<AddedToken>& tokens, bool split_special) {
    for (AddedToken token : tokens) {
      tokens_[token.id].special = token.special;
      if (split_special && token.special) continue;
      if (token.normalized) {
        RT_TRY_SET(token.content, normalizer_.apply(token.content));
        normalized_added_.add(std::move(token));
      } else {
        raw_added_.add(std::move(token));
      }
    }
    return {};
  }

  /// transformers 4 sets it for every class, 5 for those that build their own pre-tokenizer.
  void set_prefix_space(const Beside& beside, json* spec) {
    const bool own = beside.tokenizer_class == "GPT2Tokenizer" || beside.tokenizer_class == "GPTNeoXTokenizer";
    if (!beside.configured || (beside.line != 4 && !own)) return;
    const auto found = spec->find("pre_tokenizer");
    if (found == spec->end() || !found->is_object() || json_field(*found, "type") != "ByteLevel") return;
    const bool wanted = beside.add_prefix_space.value_or(false);
    const json before = found->contains("add_prefix_space") ? (*found)["add_prefix_space"] : json(true);
    if (before == wanted) return;
    (*found)["add_prefix_space"] = wanted;
    if (own) return;
    notes_.push_back(
        fmt::format("{} a space is put before a text, as transformers 4 has it by {}; tokenizer.json and "
                    "transformers 5 {}",
                    wanted ? "" : "no", kConfigFile, wanted ? "put none" : "put one"));
  }

  /// Puts bos and eos around a text where transformers 4 asks the class; 5 follows tokenizer.json only.
  void set_around(const Beside& beside) {
    const std::optional<Beside::Around> wanted = beside.around_by_class();
    if (!wanted) return;
    const bool llama = beside.tokenizer_class.ends_with("LlamaTokenizer");
    const std::string bos = !beside.bos.empty() ? beside.bos : llama ? "<s>" : "<bos>";
    const std::string eos = !beside.eos.empty() ? beside.eos : llama ? "</s>" : "<eos>";
    Around around;
    for (const auto& [put, token, side] :
         {std::tuple(wanted->bos, &bos, &around.before), std::tuple(wanted->eos, &eos, &around.after)}) {
      if (!put) continue;
      const std::optional<int32_t> id = find(*token);
      if (!id) return;  // no line opens such a folder
      side->push_back(*id);
    }
    if (around.before == around_.before && around.after == around_.after) return;
    const auto spelled = [&](const Around& of) {
      const auto side = [&](const std::vector<int32_t>& ids) {
        std::string out;
        for (const int32_t id : ids) out += has(id) ? tokens_[id].text : "?";
        return out.empty() ? "nothing" : out;
      };
      return fmt::format("{} before a text and {} behind it", side(of.before), side(of.after));
    };
    notes_.push_back(
        fmt::format("{} of class {} puts {}, as transformers 4 reads it; tokenizer.json and transformers 5 "
                    "put {}",
                    kConfigFile, beside.tokenizer_class, spelled(around), spelled(around_)));
    around_ = std::move(around);
  }

  void encode_piece(const std::string& piece, Remembered* remembered, std::vector<int32_t>* ids) const {
    if (piece.size() > kRememberedBytes || remembered->size() >= kRememberedPieces) return model_->encode(piece, ids);
    const auto [entry, fresh] = remembered->try_emplace(piece);
    if (fresh) model_->encode(piece, &entry->second);
    ids->insert(ids->end(), entry->second.begin(), entry->second.end());
  }

  std::unique_ptr<SubwordModel> model_;
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  Decoder decoder_;
  Around around_;
  AddedTokens raw_added_, normalized_added_;
  Vocabulary added_;
  std::vector<Named> tokens_;  // by id
  int64_t own_vocab_ = 0;
  int32_t eod_ = -1;
  std::string why_no_eod_;
  std::vector<std::string> notes_;
};

}  // namespace

Result<std::unique_ptr<Tokenizer>> make_hf_tokenizer(std::string_view tokenizer_json, const BesideFiles& beside) {
  auto out = std::make_unique<HfTokenizer>();
  RT_TRY(out->load(tokenizer_json, beside));
  return std::unique_ptr<Tokenizer>(std::move(out));
}

}  // namespace cairn::text
