#include "runtime/text/tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/core/lfs_pointer.h"
#include "runtime/json/json.h"
#include "runtime/text/places.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

namespace fs = std::filesystem;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

class ByteTokenizer final : public Tokenizer {
 public:
  int64_t vocab() const override { return 256; }
  int32_t eod() const override { return 0; }
  Status encode(std::string_view text, std::vector<int32_t>* ids) const override {
    ids->reserve(ids->size() + text.size());
    for (const char c : text) ids->push_back(static_cast<unsigned char>(c));
    return {};
  }
  Result<std::vector<Place>> encode_joined(std::string_view text, std::span<const size_t> bytes,
                                           std::span<const ByteRange> plain, std::vector<int32_t>* ids) const override {
    for (const ByteRange& range : plain) {
      const size_t nul = text.find('\0', range.begin);
      if (nul < range.end)
        return invalid(fmt::format("byte {} is NUL, which ends a document here and has no id as text", nul));
    }
    RT_TRY(encode(text, ids));
    std::vector<Place> out;
    for (const size_t byte : bytes) out.push_back({byte, byte});
    return out;
  }
  Result<std::string> special_within(std::string_view text) const override {
    return text.find('\0') == text.npos ? std::string() : std::string(1, '\0');
  }
  bool special(int32_t id) const override { return id == eod(); }
  Result<std::string> decode(std::span<const int32_t> ids, Specials specials) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) {
      if (id < 0 || id > 255) return invalid(fmt::format("token {} is no byte: expected 0 to 255", id));
      if (id != eod() || specials == Specials::kKeep) text.push_back(static_cast<char>(id));
    }
    return text;
  }
  std::optional<int32_t> find(std::string_view token) const override {
    return token.size() == 1 ? std::optional<int32_t>(static_cast<unsigned char>(token[0])) : std::nullopt;
  }
};

/// A SentencePiece model with what stands beside it. Special and added tokens are cut out of a text before the pieces
/// are; without tokenizer_config.json there are none. Where legacy is not false, transformers 4 puts the space of a
/// text's beginning behind each such token too, and finds a `normalized` one only behind a space.
class SentencePieceTokenizer final : public Tokenizer {
 public:
  Status load(std::string_view bytes, const BesideFiles& files) {
    RT_TRY(load_model(bytes, &model_));
    RT_TRY_SET(const Beside beside, read_beside(files));
    eod_ = model_.eos_id();
    if (beside.tokenizer_class == "ChatGLMTokenizer") return {};  // its code numbers its marks itself
    const bool legacy = beside.line == 4 && beside.legacy.value_or(true);
    space_again_ = legacy;
    space_first_ = beside.add_prefix_space.value_or(true);
    if (beside.configured || !beside.listed.empty() || !beside.named.empty()) RT_TRY(add_tokens(beside, legacy));
    if (!beside.eos.empty() && find(beside.eos)) eod_ = *find(beside.eos);
    if (!beside.configured) {
      if (model_.bos_id() > 0) {
        notes_.push_back(fmt::format("no tokenizer_config.json is beside it: no {} is put before a text",
                                     model_.IdToPiece(model_.bos_id())));
      }
      return load_without_space(bytes);
    }
    const bool by_class = beside.line == 4;
    const auto put = [&](const std::optional<bool>& said, bool usual, const std::string& named, int own,
                         std::vector<int32_t>* side) {
      const std::optional<int32_t> id = named.empty() ? std::optional<int32_t>(own) : find(named);
      if (said.value_or(usual) && id && *id >= 0) side->push_back(*id);
    };
    put(beside.add_bos, by_class, beside.bos, model_.bos_id(), &before_);
    put(beside.add_eos, false, beside.eos, model_.eos_id(), &after_);
    if (!beside.add_bos && by_class && !before_.empty()) {
      notes_.push_back(
          fmt::format("tokenizer_config.json says no add_bos_token: {} is put before a text, as transformers "
                      "4 has it; 5 puts none",
                      model_.IdToPiece(before_[0])));
    }
    return load_without_space(bytes);
  }

  int64_t vocab() const override { return model_.GetPieceSize() + std::ssize(more_); }
  int64_t own_vocab() const override { return model_.GetPieceSize(); }
  std::vector<std::string> notes() const override { return notes_; }
  std::vector<int32_t> before() const override { return before_; }
  std::vector<int32_t> after() const override { return after_; }
  int32_t eod() const override { return eod_; }
  std::string why_no_eod() const override { return "the model has no eos piece (it was trained with --eos_id=-1)"; }

  Status encode(std::string_view text, std::vector<int32_t>* ids) const override {
    RT_TRY(encode_joined(text, {}, {}, ids));
    return {};
  }
  Result<std::vector<Place>> encode_joined(std::string_view text, std::span<const size_t> bytes,
                                           std::span<const ByteRange> plain, std::vector<int32_t>* ids) const override {
    const int64_t bad = find_invalid_utf8(text);  // the library would put U+FFFD there and say nothing
    if (bad >= 0)
      return invalid(fmt::format("byte {}: 0x{:02x} is not UTF-8 here; convert the text or use the bytes tokenizer",
                                 bad, static_cast<unsigned char>(text[static_cast<size_t>(bad)])));
    const auto between = [&](size_t begin, size_t end, std::vector<int32_t>* out) {
      return encode_between(text.substr(begin, end - begin), begin == 0, out);
    };
    return encode_with_places(*this, raw_.split(text, plain), bytes, between, ids);
  }
  Result<std::string> special_within(std::string_view text) const override {
    if (const std::string_view found = raw_.special_within(text); !found.empty()) return std::string(found);
    return std::string(normalized_.special_within(" " + std::string(text)));
  }
  bool special(int32_t id) const override {
    if (!has(id)) return false;
    if (id < model_.GetPieceSize() && model_.IsControl(id)) return true;
    return std::ranges::find(marks_, id, &AddedToken::id) != marks_.end();
  }
  Result<std::string> decode(std::span<const int32_t> ids, Specials specials) const override {
    std::string text;
    std::vector<int> run;
    bool first = true;
    const auto spell = [&]() -> Status {
      if (run.empty()) return {};
      std::string part;
      const auto status = (first ? model_ : plain()).Decode(run, &part);
      if (!status.ok()) return Error{ErrorCode::kInternal, "SentencePiece: " + status.ToString()};
      text += part;
      run.clear();
      first = false;
      return {};
    };
    for (const int32_t id : ids) {
      if (!has(id)) {
        return invalid(fmt::format("token {} is outside the model: expected 0 to {}", id, vocab() - 1));
      }
      if (id < model_.GetPieceSize()) {
        if (specials == Specials::kKeep || !model_.IsControl(id)) run.push_back(id);
        continue;
      }
      RT_TRY(spell());
      const AddedToken& token = more_[static_cast<size_t>(id - model_.GetPieceSize())];
      if (specials == Specials::kKeep || !token.special) text += token.content;
      first = first && specials == Specials::kSkip && token.special;
    }
    RT_TRY(spell());
    return text;
  }
  std::optional<int32_t> find(std::string_view token) const override {
    for (const AddedToken& added : more_) {
      if (added.content == token) return added.id;
    }
    const int id = model_.PieceToId({token.data(), token.size()});
    return model_.IsUnknown(id) && token != model_.IdToPiece(id) ? std::nullopt : std::optional<int32_t>(id);
  }

 private:
  using Model = sentencepiece::SentencePieceProcessor;
  static Status load_model(std::string_view bytes, Model* out) {
    const auto status = out->LoadFromSerializedProto({bytes.data(), bytes.size()});
    if (status.ok() && out->GetPieceSize() > 0) return {};
    return invalid(fmt::format("not a SentencePiece model ({})", status.ok() ? "it has no pieces" : status.ToString()));
  }

  /// The same model that puts no space before a text, where one may be needed.
  Status load_without_space(std::string_view bytes) {
    if (space_first_ && raw_.empty() && normalized_.empty()) return {};
    // Messages of protobuf that follow each other are merged: normalizer_spec { add_dummy_prefix: false
    // remove_extra_whitespaces: false }.
    constexpr std::string_view kNoSpace("\x1a\x04\x18\x00\x20\x00", 6);
    without_space_ = std::make_unique<Model>();
    return load_model(std::string(bytes).append(kNoSpace), without_space_.get());
  }
  const Model& plain() const { return without_space_ ? *without_space_ : model_; }

  Status add_tokens(const Beside& beside, bool legacy) {
    const auto look_for = [&](AddedToken token) {
      if (const std::optional<int32_t> id = find(token.content)) {
        token.id = *id;
        const bool mark = *id < model_.GetPieceSize() && (model_.IsControl(*id) || model_.IsUnknown(*id));
        token.normalized = token.normalized && !mark;  // the model's own marks are found anywhere
      } else {
        token.id = static_cast<int32_t>(vocab());
        more_.push_back(token);
      }
      if (token.special) marks_.push_back(token);
      if (beside.split_special && token.special) return;
      if (!legacy || !token.normalized) {
        raw_.add(std::move(token));
      } else {  // the space before it is its own
        token.content.insert(0, " ");
        normalized_.add(std::move(token));
      }
    };
    for (AddedToken token : beside.listed) {
      token.special =
          token.special || std::ranges::find(beside.named, token.content, &AddedToken::content) != beside.named.end();
      look_for(std::move(token));
    }
    for (const AddedToken& token : beside.named) {
      if (std::ranges::find(beside.listed, token.content, &AddedToken::content) == beside.listed.end()) look_for(token);
    }
    return {};
  }

  Status encode_pieces(const Model& model, std::string_view text, std::vector<int32_t>* ids) const {
    std::vector<int> pieces;
    const auto status = model.Encode(absl::string_view(text.data(), text.size()), &pieces);
    if (!status.ok()) return Error{ErrorCode::kInternal, "SentencePiece: " + status.ToString()};
    ids->insert(ids->end(), pieces.begin(), pieces.end());
    return {};
  }

  /// Text without raw tokens.
  Status encode_between(std::string_view text, bool first, std::vector<int32_t>* ids) const {
    const bool space = space_first_ && (first || space_again_);
    if (!normalized_.empty()) {
      const std::string spaced = (space ? " " : "") + std::string(text);
      const std::vector<TextPart> parts = normalized_.split(spaced);
      if (std::ranges::any_of(parts, [](const TextPart& part) { return part.id >= 0; })) {
        for (const TextPart& part : parts) {
          if (part.id >= 0) {
            ids->push_back(part.id);
          } else {
            const bool begins = space && part.begin == 0 && part.end > 1;  // the model puts this space itself
            const std::string_view piece = std::string_view(spaced).substr(part.begin, part.end - part.begin);
            RT_TRY(encode_pieces(begins ? model_ : plain(), begins ? piece.substr(1) : piece, ids));
          }
        }
        return {};
      }
    }
    return encode_pieces(space ? model_ : plain(), text, ids);
  }

  Model model_;
  std::unique_ptr<Model> without_space_;  // null: never needed
  AddedTokens raw_, normalized_;
  std::vector<AddedToken> marks_;  // those that are special
  std::vector<AddedToken> more_;   // those that are no pieces, from the model's end on
  std::vector<int32_t> before_, after_;
  std::vector<std::string> notes_;
  int32_t eod_ = -1;
  bool space_first_ = true, space_again_ = false;
};

Result<std::string> read_file(const fs::path& path) {
  std::error_code error;
  if (fs::is_symlink(fs::symlink_status(path, error)) && !fs::exists(path, error)) {
    return invalid(fmt::format("{}: is a link to {}, which does not exist; put the file there, or remove the link",
                               path.string(), fs::read_symlink(path, error).string()));
  }
  if (!fs::is_regular_file(path, error)) {
    return invalid(fmt::format("{}: {}", path.string(),
                               fs::exists(path, error) ? "is no file" : "No such file; a tokenizer's was expected"));
  }
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in.is_open()) return os_error(errno == 0 ? EIO : errno, path.string());
  std::ostringstream out;
  out << in.rdbuf();
  if (in.bad()) return os_error(EIO, path.string());
  if (is_lfs_pointer(out.view())) return invalid(fmt::format("{}: {}", path.string(), kLfsPointer));
  return std::move(out).str();
}

/// The contents, or nothing when there is no such file.
Result<std::string> read_if_there(const fs::path& path) {
  std::error_code error;
  const fs::file_type type = fs::symlink_status(path, error).type();
  if (type == fs::file_type::not_found) return std::string();
  if (type == fs::file_type::none) return os_error(error.value(), path.string());
  RT_TRY_SET(std::string out, read_file(path));
  RT_TRY(parse_python_object(out).with(path.string()));  // an empty file too
  return out;
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> make_sentencepiece_tokenizer(std::string_view model, const BesideFiles& beside) {
  auto out = std::make_unique<SentencePieceTokenizer>();
  RT_TRY(out->load(model, beside));
  return std::unique_ptr<Tokenizer>(std::move(out));
}

Result<std::unique_ptr<Tokenizer>> make_tokenizer(const TokenizerConfig& config) {
  if (config.kind == TokenizerConfig::Kind::kBytes) {
    return std::unique_ptr<Tokenizer>(std::make_unique<ByteTokenizer>());
  }
  if (config.kind == TokenizerConfig::Kind::kNone) {
    return invalid("no tokenizer is given; expected bytes, a tokenizer.json or a SentencePiece model");
  }
  RT_TRY_SET(const std::string file, read_file(config.path));
  RT_TRY_SET(const BesideFiles beside, beside_files(config.path));
  const bool json = config.kind == TokenizerConfig::Kind::kHf;
  return (json ? make_hf_tokenizer(file, beside) : make_sentencepiece_tokenizer(file, beside)).with(config.path);
}

Result<BesideFiles> beside_files(const std::string& path) {
  BesideFiles out;
  for (const char* name : kBesideNames) {
    RT_TRY_SET(*out.find(name), read_if_there(fs::path(path).parent_path() / name));
  }
  return out;
}

namespace {

std::string hash_of(std::string_view text) { return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())); }

}  // namespace

TokenizerHashes tokenizer_hashes(std::string_view file, BesideFiles beside) {
  TokenizerHashes out;
  if (file.empty()) return out;
  out.file = hash_of(file);
  out.beside.emplace();
  for (const char* name : kBesideNames) {
    if (const std::string* text = beside.find(name); !text->empty()) (*out.beside)[name] = hash_of(*text);
  }
  return out;
}

Result<TokenizerHashes> tokenizer_hashes(const TokenizerConfig& config) {
  if (config.path.empty()) return TokenizerHashes{};
  RT_TRY_SET(const std::string file, read_file(config.path));
  RT_TRY_SET(BesideFiles beside, beside_files(config.path));
  return tokenizer_hashes(file, std::move(beside));
}

std::vector<TokenizerChange> tokenizer_changes(const std::string& path, const TokenizerHashes& then,
                                               const TokenizerHashes& now) {
  std::vector<TokenizerChange> out;
  if (then.file.empty() || now.file.empty()) return out;
  if (then.file != now.file) out.push_back({path, then.file, now.file});
  if (!then.beside || !now.beside) return out;
  for (const char* name : kBesideNames) {
    const auto of = [&](const TokenizerHashes& hashes) {
      const auto found = hashes.beside->find(name);
      return found == hashes.beside->end() ? std::string("missing") : found->second;
    };
    if (of(then) != of(now)) out.push_back({(fs::path(path).parent_path() / name).string(), of(then), of(now)});
  }
  return out;
}

TokenizerConfig tokenizer_config(const std::string& name) {
  if (name == "bytes") return {.kind = TokenizerConfig::Kind::kBytes};
  fs::path path(name);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    const bool json = fs::exists(fs::symlink_status(path / "tokenizer.json", error));  // a link to nothing is refused
    path /= json ? "tokenizer.json" : "tokenizer.model";
  }
  const bool json = path.extension() == ".json";
  return {json ? TokenizerConfig::Kind::kHf : TokenizerConfig::Kind::kSentencePiece, path.string()};
}

Result<std::string> StreamDecoder::text_of(size_t begin) const {
  return tokenizer_.decode(std::span<const int32_t>(ids_).subspan(begin), specials_);
}

Result<std::string> StreamDecoder::add(int32_t id) {
  // What a token spells may depend on those before it (a space that only the first one drops, half a character), so the
  // latest ones are decoded together, and the window moves on where the text is whole.
  constexpr size_t kWindow = 16;
  if (!tokenizer_.has(id)) return std::string();
  ids_.push_back(id);
  RT_TRY_SET(const std::string text, text_of(context_));
  const size_t end = std::max(shown_, whole_characters(text));
  std::string out = shown_ < text.size() ? text.substr(shown_, end - shown_) : std::string();
  shown_ = end;
  if (ids_.size() - context_ >= 2 * kWindow && end == text.size()) {
    const size_t next = ids_.size() - kWindow;
    RT_TRY_SET(const std::string rest, text_of(next));
    if (whole_characters(rest) == rest.size()) {  // the window itself may not begin inside a character
      context_ = next;
      shown_ = rest.size();
    }
  }
  return out;
}

Result<std::string> StreamDecoder::finish() {
  RT_TRY_SET(const std::string text, text_of(context_));
  std::string out = shown_ < text.size() ? text.substr(shown_) : std::string();
  shown_ = text.size();
  return out;
}

}  // namespace cairn::text
