#include "converters/gguf_vocab.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "runtime/json/json.h"
#include "runtime/text/byte_level.h"
#include "runtime/text/sentencepiece_json.h"
#include "runtime/text/tokenizer.h"

namespace cairn::convert {
namespace {

using nlohmann::json;
using text::PieceType;

Error unsupported(std::string message) {
  return Error{ErrorCode::kUnsupported, message + "; --without-tokenizer leaves the tokenizer out"};
}

/// How texts are cut before merges, by the name that llama.cpp has for it.
struct Cutter {
  std::string_view name, pattern;
  bool whole_first = false;  // a piece that is a token is taken as it is (ignore_merges)
};
constexpr std::string_view kWordsOfThree =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kWordsOfOne =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kByteLevel = "ByteLevel", kDigits = "Digits, ByteLevel";
constexpr Cutter kCutters[] = {{"gpt-2", kByteLevel},
                               {"starcoder", kDigits},
                               {"llama-bpe", kWordsOfThree, true},
                               {"smaug-bpe", kWordsOfThree},
                               {"qwen2", kWordsOfOne}};

struct Token {
  std::string text;
  float score = 0;
  PieceType type = PieceType::kUnused;
};

class Vocab {
 public:
  Vocab(const std::map<std::string, std::string>& files, const nlohmann::ordered_json& config, int64_t vocab,
        GgufKeys& keys, std::vector<std::string>* warnings)
      : files_(files), config_(config), keys_(keys), warnings_(warnings), tokens_(static_cast<size_t>(vocab)) {
    for (size_t id = 0; id < tokens_.size(); ++id) tokens_[id].text = fmt::format("[PAD{}]", id);
  }

  Status put() {
    const std::string_view file = file_of("tokenizer.json"), model = file_of("tokenizer.model");
    if (file.empty() && model.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   "the model has no tokenizer.json and no tokenizer.model; --like FOLDER takes them from a folder, "
                   "--without-tokenizer writes a file that only programs with a tokenizer of their own can use"};
    }
    if (!file.empty()) {
      RT_TRY_SET(tokenizer_, parse_json_strictly(file, "tokenizer.json", kMaxJsonDepth, 0, JsonNumbers::kPython));
    }
    const json& kind = json_field(tokenizer_, "model");
    const bool byte_level =
        json_string(kind, "type") == "BPE" && (!json_flag(kind, "byte_fallback") || json_field(kind, "merges").empty());
    if (!model.empty() && !byte_level) return put_pieces(model);
    if (!byte_level) {
      return unsupported(fmt::format(
          "tokenizer.json: its model is {}{}\n  expected byte-level BPE, or a tokenizer.model of SentencePiece beside "
          "it",
          json_string(kind, "type", "of no type"), json_flag(kind, "byte_fallback") ? " with byte_fallback" : ""));
    }
    return put_bpe(kind);
  }

 private:
  std::string_view file_of(const std::string& name) const {
    const auto found = files_.find(name);
    return found == files_.end() ? std::string_view() : std::string_view(found->second);
  }

  void set(int64_t id, std::string text, PieceType type, float score = 0) {
    if (id < 0 || id >= std::ssize(tokens_)) {
      ++beyond_;
    } else {
      tokens_[static_cast<size_t>(id)] = {std::move(text), score, type};
    }
  }

  /// A token that the vocabulary's own list lacks, or that is no text.
  struct Added {
    int64_t id = -1;
    std::string content;
    PieceType type = PieceType::kUserDefined;
  };
  /// Reads added_tokens.json, then tokenizer.json.
  std::vector<Added> added_tokens() const {
    std::vector<Added> out;
    const json beside = json_or_nothing(file_of("added_tokens.json"), JsonNumbers::kPython);
    if (beside.is_object()) {
      for (const auto& [content, id] : beside.items()) {
        if (id.is_number_integer()) out.push_back({id.get<int64_t>(), content});
      }
    }
    if (const json& own = json_field(tokenizer_, "added_tokens"); own.is_array()) {
      for (const json& token : own) {
        out.push_back({json_count(token, "id", -1), json_string(token, "content"),
                       json_flag(token, "special") ? PieceType::kControl : PieceType::kUserDefined});
      }
    }
    return out;
  }

  // --- byte-level BPE

  Result<const Cutter*> cutter() const {
    std::string found;
    RT_TRY(describe(json_field(tokenizer_, "pre_tokenizer"), &found));
    const json& model = json_field(tokenizer_, "model");
    if (json_field(model, "merges").empty()) return &kCutters[0];  // each byte is a token, wherever a text is cut
    const bool whole_first = json_flag(model, "ignore_merges");
    std::vector<std::string_view> names;
    for (const Cutter& one : kCutters) {
      if (one.pattern == found && one.whole_first == whole_first) return &one;
      names.push_back(one.name);
    }
    return unsupported(fmt::format(
        "tokenizer.json: how it cuts texts has no name that is known here: {}{}\n  expected that of one of {}", found,
        whole_first ? ", with ignore_merges" : "", fmt::join(names, ", ")));
  }

  /// "ByteLevel", a pattern, or several parts. A ByteLevel without use_regex only spells bytes.
  static Status describe(const json& part, std::string* out) {
    const std::string type = json_string(part, "type");
    std::string text;
    if (type == "Sequence") {
      for (const json& one : json_field(part, "pretokenizers")) RT_TRY(describe(one, out));
      return {};
    }
    if (type == "ByteLevel") {
      if (json_flag(part, "add_prefix_space")) {
        return unsupported(
            "tokenizer.json: adds a space before a text (add_prefix_space), which GGUF cannot say of BPE");
      }
      if (json_field(part, "use_regex") == json(false)) return {};
      text = kByteLevel;
    } else if (type == "Digits" && json_flag(part, "individual_digits")) {
      text = "Digits";
    } else if (type == "Split" && json_string(part, "behavior") == "Isolated" && !json_flag(part, "invert")) {
      const json& pattern = json_field(part, "pattern");
      text = json_string(pattern, "Regex", json_string(pattern, "String"));
    } else {
      text = type.empty() ? "not at all" : json_text(part);
    }
    *out += (out->empty() ? "" : ", ") + text;
    return {};
  }

  /// A fallback's token of one byte, "<0x41>", in the alphabet of byte-level BPE; others as they are.
  static std::string byte_level_text(const std::string& token) {
    unsigned byte = 0;
    const bool fallback = token.size() == 6 && token.starts_with("<0x") && token.ends_with(">") &&
                          std::from_chars(token.data() + 3, token.data() + 5, byte, 16).ptr == token.data() + 5;
    return fallback ? text::bytes_to_alphabet(std::string(1, static_cast<char>(byte))) : token;
  }

  Status put_bpe(const json& model) {
    RT_TRY_SET(const Cutter* const cut, cutter());
    const json& of_texts = json_field(tokenizer_, "normalizer");
    const std::string normalizer = json_string(of_texts, "type");
    const bool nothing =
        normalizer.empty() || (normalizer == "Sequence" && json_field(of_texts, "normalizers").empty());
    if (normalizer == "NFC") {
      warnings_->emplace_back("the tokenizer normalises texts (NFC), llama.cpp does not");
    } else if (!nothing) {
      return unsupported(fmt::format("tokenizer.json: its normalizer {} has no place in GGUF", normalizer));
    }
    const json& vocab = json_field(model, "vocab");
    const json& merges = json_field(model, "merges");
    if (!vocab.is_object() || !merges.is_array()) {
      return Error{ErrorCode::kCorrupt, "tokenizer.json: model has no vocab or no merges"};
    }
    for (const auto& [token, id] : vocab.items()) {
      if (id.is_number_integer()) set(id.get<int64_t>(), byte_level_text(token), PieceType::kNormal);
    }
    for (const Added& token : added_tokens()) set(token.id, token.content, token.type);
    std::vector<std::string> pairs;
    for (const json& merge : merges) {
      const bool pair = merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
      if (!pair && !merge.is_string())
        return Error{ErrorCode::kCorrupt, "tokenizer.json: a merge is no pair of tokens"};
      pairs.push_back(pair ? merge[0].get<std::string>() + " " + merge[1].get<std::string>()
                           : merge.get<std::string>());
    }
    keys_.put("tokenizer.ggml.model", "gpt2");
    keys_.put("tokenizer.ggml.pre", cut->name);
    put_tokens();
    keys_.put("tokenizer.ggml.merges", std::span<const std::string>(pairs));
    return put_special(-1);
  }

  // --- SentencePiece

  Status put_pieces(std::string_view bytes) {
    const text::SentencePieces model = text::sentence_pieces(bytes);
    if (model.pieces.empty()) return Error{ErrorCode::kInvalidInput, "tokenizer.model: is no model of SentencePiece"};
    if (!model.bpe) {
      return unsupported(fmt::format("tokenizer.model: is {}, which GGUF has no place for here\n  expected BPE",
                                     model.other ? "a model of words or characters" : "a Unigram model"));
    }
    const bool bytes_there =
        std::ranges::any_of(model.pieces, [](const auto& piece) { return piece.type == PieceType::kByte; });
    if (!bytes_there) {
      return unsupported(
          "tokenizer.model: has no pieces for bytes (byte_fallback), without which llama.cpp cannot spell "
          "a character that no piece has");
    }
    if (model.suffix_spaces) return unsupported("tokenizer.model: puts spaces behind words");
    int64_t unknown = -1;
    for (size_t id = 0; id < model.pieces.size(); ++id) {
      const text::SentencePiece& piece = model.pieces[id];
      if (piece.type == PieceType::kUnknown) unknown = static_cast<int64_t>(id);
      set(static_cast<int64_t>(id), piece.text, piece.type, piece.score);
    }
    for (const Added& token : added_tokens()) {
      if (token.id >= std::ssize(model.pieces)) set(token.id, token.content, token.type, -1000);
    }
    if (!model.charsmap.empty()) {
      warnings_->emplace_back("the tokenizer normalises characters, llama.cpp does not");
    }
    keys_.put("tokenizer.ggml.model", "llama");
    keys_.put("tokenizer.ggml.pre", "default");
    put_tokens();
    std::vector<float> scores;
    for (const Token& token : tokens_) scores.push_back(token.score);
    keys_.put("tokenizer.ggml.scores", std::span<const float>(scores));
    keys_.put("tokenizer.ggml.add_space_prefix", model.dummy_prefix);
    keys_.put("tokenizer.ggml.remove_extra_whitespaces", model.remove_spaces);
    return put_special(unknown);
  }

  // --- both

  void put_tokens() {
    std::vector<std::string> texts;
    std::vector<int32_t> types;
    for (const Token& token : tokens_) {
      texts.push_back(token.text);
      types.push_back(static_cast<int32_t>(token.type));
    }
    keys_.put("tokenizer.ggml.tokens", std::span<const std::string>(texts));
    keys_.put("tokenizer.ggml.token_type", std::span<const int32_t>(types));
    if (beyond_ > 0) {
      warnings_->push_back(
          fmt::format("{} tokens of the tokenizer have ids that the model has no row for: left out", beyond_));
    }
  }

  /// The first id of a list counts.
  std::optional<int64_t> special(const char* key) const {
    const auto found = config_.find(key);
    if (found == config_.end()) return std::nullopt;
    const auto& id = found->is_array() && !found->empty() ? found->front() : *found;
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= std::ssize(tokens_))
      return std::nullopt;
    return id.get<int64_t>();
  }

  Status put_special(int64_t unknown) {
    const std::optional<int64_t> bos = special("bos_token_id"), eos = special("eos_token_id");
    const auto put = [&](const char* name, std::optional<int64_t> id) {
      if (id && *id >= 0) keys_.put(fmt::format("tokenizer.ggml.{}_token_id", name), static_cast<uint32_t>(*id));
    };
    put("bos", bos);
    put("eos", eos);
    put("unknown", unknown);
    put("padding", special("pad_token_id"));
    RT_TRY(put_around(bos, eos));
    std::string chat(file_of("chat_template.jinja"));
    if (chat.empty()) {
      chat = json_string(json_or_nothing(file_of("tokenizer_config.json"), JsonNumbers::kPython), "chat_template");
    }
    if (!chat.empty()) keys_.put("tokenizer.chat_template", std::string_view(chat));
    return {};
  }

  /// Says which tokens a reader puts around a text.
  Status put_around(std::optional<int64_t> bos, std::optional<int64_t> eos) {
    text::BesideFiles beside;
    for (const char* name : text::kBesideNames) *beside.find(name) = file_of(name);
    const bool pieces = tokenizer_.is_null() || file_of("tokenizer.json").empty();
    RT_TRY_SET(const std::unique_ptr<text::Tokenizer> made,
               pieces ? text::make_sentencepiece_tokenizer(file_of("tokenizer.model"), beside)
                      : text::make_hf_tokenizer(file_of("tokenizer.json"), beside));
    const std::vector<int32_t> before = made->before(), after = made->after();
    const bool with_bos = bos && before == std::vector<int32_t>{static_cast<int32_t>(*bos)};
    const bool with_eos = eos && after == std::vector<int32_t>{static_cast<int32_t>(*eos)};
    if ((!before.empty() && !with_bos) || (!after.empty() && !with_eos)) {
      warnings_->emplace_back(
          "the tokenizer puts other tokens around a text than the model's first and last, which GGUF cannot say");
    }
    keys_.put("tokenizer.ggml.add_bos_token", with_bos);
    keys_.put("tokenizer.ggml.add_eos_token", with_eos);
    return {};
  }

  const std::map<std::string, std::string>& files_;
  const nlohmann::ordered_json& config_;
  GgufKeys& keys_;
  std::vector<std::string>* warnings_;
  std::vector<Token> tokens_;
  json tokenizer_;  // null: there is no tokenizer.json
  int64_t beyond_ = 0;
};

}  // namespace

Status put_gguf_vocab(const std::map<std::string, std::string>& files, const nlohmann::ordered_json& config,
                      int64_t vocab, GgufKeys& keys, std::vector<std::string>* warnings) {
  return Vocab(files, config, vocab, keys, warnings).put();
}

}  // namespace cairn::convert
